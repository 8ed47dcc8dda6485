"""The engine's process with a profiler around some of its steps: `python -m chatserve.bench._traced_engine`.

Nothing is traced, and steps cost what they always do, until the process gets SIGUSR1. From then on each streak of like
steps is recorded once, when it has shown by its length that the batch is complete, and `trace.json` beside the engine's
socket says how long the device was idle and which kernel took how long a step. Everything else is the engine's own.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity

from chatserve.bench.gpu import TRACE_NAME
from chatserve.engine.process import read_settings, serve, start_logging
from chatserve.model.runner import ModelRunner, build_runner

if TYPE_CHECKING:
    from pathlib import Path

    from chatserve.config import EngineSettings
    from chatserve.model.runner import LaunchedStep
    from chatserve.sched.plan import StepPlan


class Streak(NamedTuple):
    """What steps that follow each other have in common."""

    kind: str
    """`decode`, `mixed` or `prefill`"""
    rows: int
    """That decode."""


class _Length(NamedTuple):
    settled: int
    """Steps before the first that is recorded."""
    traced: int


LENGTHS = {"decode": _Length(12, 24), "mixed": _Length(24, 20), "prefill": _Length(1, 3)}
_LEAST_PREFILL = 1024
"""Tokens of a step of prompts alone that is worth a look."""
_MOST_KERNELS = 20


def streak_of(plan: StepPlan) -> Streak | None:
    """Which steps this one is like, if such are recorded."""
    decodes = sum(row.num_tokens == 1 for row in plan.rows)
    if decodes == len(plan.rows):
        return Streak("decode", decodes) if decodes else None
    if decodes:
        return Streak("mixed", decodes)
    return Streak("prefill", 0) if plan.num_tokens >= _LEAST_PREFILL else None


def idle_share(spans: list[tuple[float, float]]) -> float:
    """The part of the time from the first begin to the last end in which nothing ran; spans are (begin, end)."""
    spans = sorted(spans)
    begin = reached = spans[0][0]
    idle = 0.0
    for start, end in spans:
        idle += max(0.0, start - reached)
        reached = max(reached, end)
    return idle / (reached - begin)


class _Tracer:
    """Counts like steps and records some of each streak."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self._path = path
        self._is_cuda = device.type == "cuda"
        self.is_armed = False
        self._streak: Streak | None = None
        self._count = 0
        """Steps of the streak so far."""
        self._tokens = 0
        self._profile: Any = None
        self._reports: list[dict[str, Any]] = []

    def before_launch(self, plan: StepPlan) -> None:
        streak = streak_of(plan)
        if streak != self._streak:
            self._stop(self._count)
            self._streak, self._count = streak, 0
        if streak is None:
            return
        length = LENGTHS[streak.kind]
        if self._count == length.settled + length.traced:
            self._stop(self._count)
        if self._count == length.settled:
            activity = ProfilerActivity.CUDA if self._is_cuda else ProfilerActivity.CPU
            self._profile = torch.profiler.profile(activities=[activity])
            self._profile.start()
        self._count += 1
        self._tokens = plan.num_tokens

    def _stop(self, count: int) -> None:
        profile, self._profile = self._profile, None
        if profile is None:
            return
        if self._is_cuda:
            torch.cuda.synchronize()
        profile.stop()
        assert self._streak is not None
        steps = count - LENGTHS[self._streak.kind].settled
        device_type = DeviceType.CUDA if self._is_cuda else DeviceType.CPU
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in profile.events()
            if event.device_type == device_type
        )
        if not spans:
            return
        took = "self_device_time_total" if self._is_cuda else "self_cpu_time_total"
        kernels = sorted(((getattr(each, took), each) for each in profile.key_averages()), key=lambda pair: -pair[0])
        self._reports.append(
            {
                **self._streak._asdict(),
                "tokens": self._tokens,
                "steps": steps,
                "step_ms": (max(end for _, end in spans) - spans[0][0]) / steps / 1e3,
                # Profiling itself slows the first steps: what lies before a third of the spans is left out.
                "idle": idle_share(spans[len(spans) // 3 :]),
                "kernels": [
                    {"name": each.key, "us": us / steps, "count": each.count / steps}
                    for us, each in kernels[:_MOST_KERNELS]
                    if us > 0
                ],
            }
        )
        self._path.write_text(json.dumps(self._reports, indent=1))


class TracedRunner(ModelRunner):
    """A `ModelRunner` whose steps are looked at."""

    def __init__(self, runner: ModelRunner, tracer: _Tracer) -> None:
        super().__init__(runner.storage, runner.executor, context_tokens=runner.context_tokens)
        self._tracer = tracer

    def launch(self, plan: StepPlan) -> LaunchedStep:
        if self._tracer.is_armed:
            self._tracer.before_launch(plan)
        return super().launch(plan)


def build_traced_runner(settings: EngineSettings) -> TracedRunner:
    runner = build_runner(settings)
    tracer = _Tracer(settings.socket_path.with_name(TRACE_NAME), runner.device)

    def arm(*_: object) -> None:
        tracer.is_armed = True

    signal.signal(signal.SIGUSR1, arm)
    return TracedRunner(runner, tracer)


if __name__ == "__main__":
    start_logging()
    sys.exit(serve(read_settings(), build_traced_runner))
