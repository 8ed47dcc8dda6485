"""What a step that has been executed means for the requests of its rows.

Takes the oldest step out of flight and books it: how far KV is computed, which tokens there are now, and who has come
to an end by that. Steps overlap, so a row may be of a request that has ended since; it is dropped. Plans nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatserve.engine.messages import TokenDelta
from chatserve.types import FinishReason

if TYPE_CHECKING:
    from chatserve.cache.kv_manager import KVManager
    from chatserve.sched.batch import Batch
    from chatserve.sched.flights import Flights
    from chatserve.sched.hints import Hints
    from chatserve.sched.live import LiveRequests
    from chatserve.sched.outcome import Journal
    from chatserve.sched.plan import StepPlan, StepResult
    from chatserve.types import RequestId


class Booking:
    """`commit` or `fail` for each step of `flights` in its order. Rows of nobody in `live` are those of `hints`."""

    __slots__ = ("_batch", "_flights", "_hints", "_journal", "_kv", "_live")

    def __init__(
        self, kv: KVManager, live: LiveRequests, batch: Batch, flights: Flights, hints: Hints, journal: Journal
    ) -> None:
        self._kv = kv
        self._live = live
        self._batch = batch
        self._flights = flights
        self._hints = hints
        self._journal = journal

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """KV is there, and each row with `sample` has one more token."""
        assert result.step == plan.step, f"expected the result of step {plan.step}, got that of {result.step}"
        gone = self._land(plan)
        block_size, requests, deltas = self._kv.block_size, self._live.by_id, self._journal.deltas
        tokens = iter(result.token_ids)
        for row in plan.rows:
            request_id = row.request_id
            if request_id in gone:
                if row.sample:
                    next(tokens)
                continue
            request = requests.get(request_id)
            if request is None:
                self._hints.commit(row)
                continue
            request.num_computed = end = row.start + row.num_tokens
            if end <= request.num_submitted:
                self._batch.settle(request)
            # Output is of no use to others before it ends, so it can wait: not all who began together at one step.
            elif (end + request.arrival) % block_size == 0:
                self._batch.settle_full_blocks(request)
            if not row.sample:
                continue
            request.num_pending -= 1
            token_id = next(tokens)
            if token_id in request.stop_token_ids:
                self._live.end(request, FinishReason.STOP, stop_token_id=token_id)
                continue
            token_ids = request.token_ids
            deltas.append(TokenDelta(request_id, len(token_ids) - request.num_submitted, (token_id,)))
            token_ids.append(token_id)
            if len(token_ids) >= request.max_length:
                self._live.end(request, FinishReason.LENGTH)
        assert next(tokens, None) is None, "the runner gave more tokens than rows ask for"

    def fail(self, plan: StepPlan, detail: str) -> None:
        """Transfers were made and rows were not computed: their requests end with `error`, and whatever later steps in
        flight compute for them is dropped.
        """
        gone = self._land(plan)
        for row in plan.rows:
            request = self._live.by_id.get(row.request_id)
            if request is None:
                self._hints.fail(row)
            elif row.request_id not in gone:
                self._live.end(request, FinishReason.ERROR, detail=detail)

    def _land(self, plan: StepPlan) -> set[RequestId]:
        """Take the oldest step out of flight. The requests that have ended since it was planned."""
        gone = self._flights.land(plan)
        self._kv.transfers_done(plan.transfers)
        return gone
