"""Engines on a `FakeRunner`, and what tests ask of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from chatserve.engine.engine import Engine
from chatserve.engine.messages import (
    EngineInfo,
    Finished,
    PathRef,
    Queued,
    Rejected,
    Started,
    StepOutput,
    Submit,
)
from chatserve.engine.paths import PathTable
from chatserve.engine.snapshot import Snapshot
from chatserve.sched.scheduler import MIN_FETCHED_BLOCKS, Scheduler
from chatserve.types import RequestId, SamplingParams, UserId
from tests.fakes.fake_runner import FakeRunner

USER = UserId("ann")
_epochs = itertools.count(1)


def make_engine(
    runner: FakeRunner,
    *,
    kv: object = None,
    max_batched_tokens: int = 64,
    max_running: int = 64,
    max_queued: int = 256,
    context_tokens: int | None = None,
    min_fetched_blocks: int = MIN_FETCHED_BLOCKS,
    paths: PathTable | None = None,
    kv_snapshot: Path | None = None,
    snapshot_blocks: int = 1_000_000,
    model: str = "fake",
) -> Engine:
    """An engine of a new epoch with a `KVManager` (or `kv`) of the runner's size, and a snapshot in `kv_snapshot`."""
    if kv is None:
        from chatserve.cache.kv_manager import KVManager

        kv = KVManager(
            num_blocks=runner.num_blocks, num_host_blocks=runner.num_host_blocks, block_size=runner.block_size
        )
    if context_tokens is None:
        context_tokens = min(runner.context_tokens, (runner.num_blocks - 1) * runner.block_size)
    scheduler = Scheduler(
        kv,  # type: ignore[arg-type]
        max_batched_tokens=max_batched_tokens,
        max_running=max_running,
        max_queued=max_queued,
        context_tokens=context_tokens,
        min_fetched_blocks=min_fetched_blocks,
    )
    info = EngineInfo(
        epoch=f"epoch-{next(_epochs)}",
        model=model,
        context_tokens=context_tokens,
        block_size=runner.block_size,
        vocab_size=runner.vocab_size,
        max_queued=max_queued,
        device="fake",
    )
    snapshot = None
    if kv_snapshot is not None:
        snapshot = Snapshot(
            kv,  # type: ignore[arg-type]
            runner.block_bytes(),
            kv_snapshot,
            {"model": model, "layout": str(runner.block_size)},
            max_blocks=snapshot_blocks,
        )
        snapshot.restore()
    return Engine(kv, scheduler, runner, info, paths=paths, snapshot=snapshot)  # type: ignore[arg-type]


def make_submit(
    request_id: str,
    token_ids: Sequence[int] = (),
    *,
    max_tokens: int | None = 8,
    user: UserId = USER,
    base: PathRef | None = None,
    num_shared_tokens: int = 0,
    num_prompt_tokens: int | None = None,
    stop_token_ids: Sequence[int] = (),
    temperature: float = 0.0,
    seed: int = 7,
) -> Submit:
    """A submit whose fields are those of a plain greedy turn unless said otherwise."""
    if num_prompt_tokens is None:
        num_prompt_tokens = len(token_ids) + (0 if base is None else base.num_tokens)
    return Submit(
        request_id=RequestId(request_id),
        user=user,
        base=base,
        token_ids=tuple(token_ids),
        num_shared_tokens=num_shared_tokens,
        num_prompt_tokens=num_prompt_tokens,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed),
        stop_token_ids=tuple(stop_token_ids),
    )


class Transcript:
    """Everything an engine has said, by request, with the order of a request's events checked as they come."""

    def __init__(self) -> None:
        self.texts: dict[str, list[int]] = {}
        self.queued: dict[str, list[Queued]] = {}
        self.started: dict[str, Started] = {}
        self.finished: dict[str, Finished] = {}
        self.rejected: dict[str, Rejected] = {}
        self.started_in: dict[str, int] = {}
        self.first_token_in: dict[str, int] = {}
        """Number of the output in which the first token came."""
        self.num_outputs = 0

    def add(self, output: StepOutput | None) -> None:
        if output is None:
            return
        self.num_outputs += 1
        for rejected in output.rejected:
            self._assert_live(rejected.request_id)
            assert rejected.request_id not in self.started
            self.rejected[rejected.request_id] = rejected
        for queued in output.queued:
            self._assert_live(queued.request_id)
            assert queued.request_id not in self.started
            self.queued.setdefault(queued.request_id, []).append(queued)
        for started in output.started:
            self._assert_live(started.request_id)
            assert started.request_id not in self.started, "started twice"
            total = started.cached_tokens + started.swapped_in_tokens + started.computed_tokens
            assert total == started.prompt_tokens
            assert started.computed_tokens >= 1
            self.started[started.request_id] = started
            self.started_in[started.request_id] = self.num_outputs
        for delta in output.deltas:
            self._assert_live(delta.request_id)
            assert delta.request_id in self.started
            text = self.texts.setdefault(delta.request_id, [])
            assert delta.first == len(text), "a delta is lost or doubled"
            text.extend(delta.token_ids)
            self.first_token_in.setdefault(delta.request_id, self.num_outputs)
        for finished in output.finished:
            self._assert_live(finished.request_id)
            assert finished.num_output_tokens == len(self.texts.get(finished.request_id, []))
            self.finished[finished.request_id] = finished

    def text(self, request_id: str) -> list[int]:
        return self.texts.get(request_id, [])

    def _assert_live(self, request_id: str) -> None:
        assert request_id not in self.finished, f"{request_id} speaks after its end"
        assert request_id not in self.rejected, f"{request_id} speaks after its end"


def run_until_idle(engine: Engine, transcript: Transcript | None = None, *, max_steps: int = 10_000) -> Transcript:
    """Step until there is nothing to do, checking every invariant at every step."""
    transcript = Transcript() if transcript is None else transcript
    for _ in range(max_steps):
        if not engine.has_work:
            engine.check()
            return transcript
        transcript.add(engine.step())
        engine.check()
    raise AssertionError(f"still busy after {max_steps} steps")
