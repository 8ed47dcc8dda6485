"""What the engine has to say, put into one `StepOutput` a turn.

Owns what waits to be said and how an end is told: the path that a finished request leaves is remembered here, as a
continuation of the one that it went on from, so that the next turn can name it. Knows no runner and decides nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from chatserve.engine.messages import CacheReport, Finished, PathRef, Queued, Rejected, Started, StepOutput

if TYPE_CHECKING:
    from collections.abc import Container

    from chatserve.engine.messages import Submit
    from chatserve.engine.paths import PathTable
    from chatserve.sched.outcome import Begun, Ended, Outcome
    from chatserve.types import RequestId


class Outbox:
    """`reject` and `report` until the next `take`; `note_base` for each request that was taken."""

    __slots__ = ("_bases", "_epoch", "_paths", "_rejected", "_reports", "counters")

    def __init__(self, epoch: str, paths: PathTable) -> None:
        self._epoch = epoch
        self._paths = paths
        self._bases: dict[RequestId, PathRef] = {}
        """What live requests continue, so that their own paths can."""
        self._rejected: list[Rejected] = []
        self._reports: list[CacheReport] = []
        self.counters: Final = {
            "prompt_tokens_cached": 0,
            "prompt_tokens_swapped_in": 0,
            "prompt_tokens_computed": 0,
            "output_tokens": 0,
        }
        """Totals since the start, of what has been said."""

    def __bool__(self) -> bool:
        """Whether something waits to be said, whatever the scheduler has to tell."""
        return bool(self._rejected or self._reports)

    def reject(self, rejected: Rejected) -> None:
        self._rejected.append(rejected)

    def report(self, report: CacheReport) -> None:
        self._reports.append(report)

    def note_base(self, submit: Submit) -> None:
        """The request was taken, and continues what it names as its base."""
        if submit.base is not None:
            self._bases[submit.request_id] = submit.base

    def take(self, outcome: Outcome) -> StepOutput | None:
        """All that there is to say since the last time, with what became of requests since. None: nothing."""
        output = StepOutput(
            rejected=tuple(self._rejected),
            queued=tuple([Queued(waiting.request_id, waiting.position) for waiting in outcome.waiting]),
            started=tuple([self._start(begun) for begun in outcome.begun]),
            deltas=outcome.deltas,
            finished=tuple([self._finish(ended) for ended in outcome.ended]),
            reports=tuple(self._reports),
        )
        self.counters["output_tokens"] += len(outcome.deltas)
        self._rejected.clear()
        self._reports.clear()
        something = (
            output.rejected or output.queued or output.started or output.deltas or output.finished or output.reports
        )
        return output if something else None

    def _start(self, begun: Begun) -> Started:
        num_computed = begun.num_submitted - begun.num_cached - begun.num_swapped_in
        self.counters["prompt_tokens_cached"] += begun.num_cached
        self.counters["prompt_tokens_swapped_in"] += begun.num_swapped_in
        self.counters["prompt_tokens_computed"] += num_computed
        return Started(begun.request_id, begun.num_submitted, begun.num_cached, begun.num_swapped_in, num_computed)

    def _finish(self, ended: Ended) -> Finished:
        base = self._bases.pop(ended.request_id, None)
        handle = self._paths.add(
            ended.user,
            ended.token_ids,
            base=None if base is None else base.handle,
            num_inherited=0 if base is None else base.num_tokens,
        )
        return Finished(
            request_id=ended.request_id,
            reason=ended.reason.value,
            num_output_tokens=ended.num_output_tokens,
            path=PathRef(self._epoch, handle, len(ended.token_ids)),
            stop_token_id=ended.stop_token_id,
            detail=ended.detail,
        )

    def check(self, live: Container[RequestId]) -> None:
        """Assert that bases are remembered for live requests alone."""
        assert all(request_id in live for request_id in self._bases)
