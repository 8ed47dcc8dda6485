"""Requests from their submission to their one end.

Owns who is here, and what an end does: whoever waits leaves the queue, whoever runs leaves the batch with what it has
computed left in the cache, and the journal has it to tell. Why a request ends is for others to say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from chatserve.sched.outcome import Ended
from chatserve.sched.request import Phase

if TYPE_CHECKING:
    from chatserve.sched.batch import Batch
    from chatserve.sched.flights import Flights
    from chatserve.sched.outcome import Journal
    from chatserve.sched.queue import WaitingQueue
    from chatserve.sched.request import Request
    from chatserve.types import FinishReason, RequestId


class LiveRequests:
    """All that wait in `queue` or run in `batch`."""

    __slots__ = ("_batch", "_flights", "_journal", "_queue", "by_id")

    def __init__(self, queue: WaitingQueue, batch: Batch, flights: Flights, journal: Journal) -> None:
        self._queue = queue
        self._batch = batch
        self._flights = flights
        self._journal = journal
        self.by_id: Final[dict[RequestId, Request]] = {}
        """To be read; written here alone."""

    def is_taken(self, request_id: RequestId) -> bool:
        """Whether the id cannot be used: its request waits or runs, or has an end that is still in the journal."""
        return request_id in self.by_id or any(ended.request_id == request_id for ended in self._journal.ended)

    def add(self, request: Request) -> None:
        """It is here from now on; it neither waits nor runs yet."""
        self.by_id[request.request_id] = request

    def end(
        self,
        request: Request,
        reason: FinishReason,
        *,
        keep: int | None = None,
        stop_token_id: int | None = None,
        detail: str = "",
    ) -> None:
        """The one end of every request. Its blocks stay cached, up to `keep` of its output tokens (None: all)."""
        num_output_tokens = request.num_output_tokens
        kept = request.token_ids
        if keep is not None and keep < num_output_tokens:
            kept = kept[: request.num_submitted + max(keep, 0)]
        if request.phase in (Phase.RUNNING, Phase.FETCHING):
            self._batch.finish(request, len(kept))
            self._flights.drop(request.request_id)
        elif request in self._queue:
            self._queue.remove(request)
        request.phase = Phase.FINISHED
        del self.by_id[request.request_id]
        self._journal.ended.append(
            Ended(
                request_id=request.request_id,
                user=request.user,
                reason=reason,
                token_ids=kept,
                num_output_tokens=num_output_tokens,
                stop_token_id=stop_token_id,
                detail=detail,
            )
        )

    def check(self) -> None:
        self._queue.check()
        self._batch.check()
        self._flights.check(self.by_id.values())
        assert len(self.by_id) == len(self._batch) + len(self._queue)
        for request in (*self._batch, *self._queue.in_order()):
            assert self.by_id[request.request_id] is request
