"""What `GET /metrics` says, in Prometheus' text format.

Owns the names and the registry (not the library's global one, so that several servers can live in one process).
Counters of the engine are its own totals; they start anew with a new engine, which Prometheus expects of counters.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from chatserve.chat.events import AnyEvent, GenerationDelta, GenerationEnd
from chatserve.engine.messages import CacheReport
from chatserve.server.hub import Hub
from chatserve.types import MessageId

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_TTFT_BUCKETS: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_MOST_ANSWERS: Final = 10_000
"""Whose last piece's time is remembered."""
_INTER_TOKEN_BUCKETS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)

_ENGINE_COUNTERS: Final = {
    "output_tokens": "Tokens generated",
    "steps": "Steps of the engine's loop that computed something",
    "late_steps": "Steps launched when the device had already come to the end of the one before, and stood still",
    "scheduling_us": "Microseconds in which the engine planned steps",
    "launching_us": "Microseconds in which the engine launched steps, or computed them where it does so at once",
    "waiting_us": "Microseconds in which the engine waited for the tokens of steps that it had launched",
    "copies": "Blocks copied on write",
    "swapped_out_blocks": "Blocks copied to host memory",
    "swapped_in_blocks": "Blocks brought back from host memory",
    "dropped_blocks": "Host blocks given up, to be recomputed if they are needed",
    "hinted_tokens": "Tokens computed ahead, while their user was typing",
    "restored_blocks": "Blocks read back from the KV snapshot",
    "damaged_blocks": "Blocks of the KV snapshot that could not be read back, to be recomputed if they are needed",
    "preemptions": "Running requests put back to wait",
}


class Metrics:
    def __init__(self, hub: Hub, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector()
        self._registry.register(self._engine)
        self._registry.register(_HubCollector(hub))
        self._last_delta: dict[MessageId, float] = {}
        self._ttft = Histogram(
            "chatserve_time_to_first_token_seconds",
            "From a request's acceptance to its first token",
            buckets=_TTFT_BUCKETS,
            registry=self._registry,
        )
        self._inter_token = Histogram(
            "chatserve_inter_token_seconds",
            "Between neighbouring pieces of one answer, as they are sent",
            buckets=_INTER_TOKEN_BUCKETS,
            registry=self._registry,
        )
        self._generations = Counter(
            "chatserve_generations", "Generations that ended", ["reason"], registry=self._registry
        )
        self._requests = Counter(
            "chatserve_requests",
            "Requests over sockets, by type and outcome",
            ["type", "code"],
            registry=self._registry,
        )
        self._closes = Counter(
            "chatserve_socket_closes", "Sockets closed by the server", ["code"], registry=self._registry
        )

    def observe(self, events: Sequence[AnyEvent]) -> None:
        """Take note of a session's events as they are published."""
        for event in events:
            match event:
                case GenerationDelta(message=message):
                    now = self._clock()
                    before = self._last_delta.pop(message, None)
                    self._last_delta[message] = now
                    if len(self._last_delta) > _MOST_ANSWERS:  # those that another server took over do not end here
                        del self._last_delta[next(iter(self._last_delta))]
                    if before is not None:
                        self._inter_token.observe(now - before)
                case GenerationEnd(message=message, reason=reason, usage=usage):
                    self._last_delta.pop(message, None)
                    self._generations.labels(reason).inc()
                    if isinstance(usage.ttft_ms, int | float):
                        self._ttft.observe(usage.ttft_ms / 1000)
                case _:
                    pass

    def request(self, kind: str, code: str) -> None:
        self._requests.labels(kind, code).inc()

    def socket_closed(self, code: int) -> None:
        self._closes.labels(str(code)).inc()

    def render(self, report: CacheReport | None) -> bytes:
        """`report` is the engine's, or None while it is away."""
        self._engine.report = report
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    def __init__(self) -> None:
        self.report: CacheReport | None = None

    def collect(self) -> Iterator[Metric]:
        report = self.report
        yield GaugeMetricFamily("chatserve_engine_up", "Whether the engine answers", value=float(report is not None))
        yield GaugeMetricFamily(
            "chatserve_running_requests", "Requests in the running batch", value=report.running if report else 0
        )
        yield GaugeMetricFamily(
            "chatserve_queued_requests", "Requests that wait to be admitted", value=report.waiting if report else 0
        )
        blocks = GaugeMetricFamily("chatserve_kv_blocks", "KV blocks by tier and state", labels=["tier", "state"])
        for tier in ("device", "host"):
            counts = getattr(report, tier) if report else None
            for state in ("total", "free", "cached", "private", "transit", "pinned"):
                blocks.add_metric([tier, state], getattr(counts, state) if counts else 0)
        yield blocks
        counters = report.counters if report else {}
        tokens = CounterMetricFamily(
            "chatserve_prompt_tokens", "Prompt tokens by where their KV came from", labels=["source"]
        )
        for source in ("cached", "swapped_in", "computed"):
            tokens.add_metric([source], counters.get(f"prompt_tokens_{source}", 0))
        yield tokens
        for name, text in _ENGINE_COUNTERS.items():
            yield CounterMetricFamily(f"chatserve_{name}", text, value=counters.get(name, 0))
        yield GaugeMetricFamily(
            "chatserve_kv_wasted_slots",
            "Token slots of allocated blocks that hold no token",
            value=counters.get("wasted_slots", 0),
        )


class _HubCollector(Collector):
    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def collect(self) -> Iterator[Metric]:
        sockets = list(self._hub.sockets())
        yield GaugeMetricFamily("chatserve_sockets", "Connections that have said hello", value=len(sockets))
        yield GaugeMetricFamily("chatserve_tasks", "Tasks of this web worker's event loop", value=_num_tasks())
        yield GaugeMetricFamily(
            "chatserve_subscriptions",
            "Sessions followed, counted once a socket",
            value=sum(len(socket.subscriptions) for socket in sockets),
        )
        yield GaugeMetricFamily(
            "chatserve_socket_queue_bytes",
            "Bytes that wait to be sent on all sockets",
            value=sum(socket.outbox.num_bytes for socket in sockets),
        )


def _num_tasks() -> int:
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:  # whoever asks has no event loop
        return 0
