"""The requests that run, and how far the KV manager has been told of what they compute.

Owns who is in the batch and every call to the KV manager that concerns one of them; who comes and who goes is for
admission and the scheduler to say.
"""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

from chatserve.sched.queue import by_arrival
from chatserve.sched.request import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator

    from chatserve.cache.kv_manager import Admission, KVManager
    from chatserve.sched.request import Request
    from chatserve.types import BlockId, RequestId


class Batch:
    """Running requests, oldest first."""

    __slots__ = ("_kv", "_left", "_requests")

    def __init__(self, kv: KVManager) -> None:
        self._kv = kv
        self._requests: list[Request] = []
        self._left: dict[RequestId, None] = {}
        """Requests that the runner still knows and that are here no longer."""

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """Who runs now; the batch may change under the iteration, which does not notice."""
        return iter(tuple(self._requests))

    @property
    def newest(self) -> Request:
        return self._requests[-1]

    @property
    def has_left(self) -> bool:
        """Whether the runner has someone to forget."""
        return bool(self._left)

    def take_left(self) -> tuple[RequestId, ...]:
        """Whom the next step tells the runner to forget."""
        left = tuple(self._left)
        self._left.clear()
        return left

    # --- one request --------------------------------------------------------------------------------------------------

    def enter(self, request: Request, admission: Admission) -> None:
        """The KV manager has admitted it."""
        is_resident = self._kv.is_resident(request.request_id)
        request.phase = Phase.RUNNING if is_resident else Phase.FETCHING
        request.num_scheduled = request.num_computed = request.num_committed = admission.num_computed
        request.admitted_with = admission.block_ids
        request.capacity = len(admission.block_ids) * self._kv.block_size
        insort(self._requests, request, key=by_arrival)

    def is_ready(self, request: Request) -> bool:
        """Whether it may have a row: its blocks are there."""
        if request.phase is Phase.FETCHING and self._kv.is_resident(request.request_id):
            request.phase = Phase.RUNNING
        return request.phase is Phase.RUNNING

    def grow(self, request: Request, end: int) -> tuple[BlockId, ...] | None:
        """Room for KV of its first `end` tokens: the new blocks; None, and no change, where there are not enough."""
        if end <= request.capacity:
            return ()
        new_block_ids = self._kv.grow(request.request_id, end)
        if new_block_ids is not None:
            request.capacity += len(new_block_ids) * self._kv.block_size
        return new_block_ids

    def settle(self, request: Request) -> None:
        """Tell the KV manager of all that is computed."""
        self._settle(request, request.num_computed)

    def settle_full_blocks(self, request: Request) -> None:
        """Tell the KV manager of all that is computed but the end that fills no block."""
        self._settle(request, request.num_computed - request.num_computed % self._kv.block_size)

    def _settle(self, request: Request, end: int) -> None:
        if request.num_committed < end:
            self._kv.commit(request.request_id, request.token_ids[request.num_committed : end])
            request.num_committed = end

    def finish(self, request: Request, keep_tokens: int) -> None:
        """It ends; the first `keep_tokens` of what it computed stay cached."""
        self.settle(request)
        self._kv.finish(request.request_id, keep_tokens)
        self._leave(request)

    def finish_hint(self, request: Request, num_settled: int) -> None:
        """It was a hint's, of which the first `num_settled` tokens are a conversation and the rest a draft."""
        self.settle(request)
        self._kv.finish_hint(request.request_id, num_settled)
        self._leave(request)

    def preempt(self, request: Request) -> None:
        """It makes room and will be admitted again."""
        self.settle(request)
        self._kv.preempt(request.request_id)
        self._leave(request)
        request.phase = Phase.PREEMPTED

    def _leave(self, request: Request) -> None:
        self._requests.remove(request)
        if request.admitted_with is None:
            self._left[request.request_id] = None
        request.admitted_with = None
        request.num_scheduled = request.num_computed = request.num_committed = request.capacity = 0
        request.num_pending = 0

    def check(self) -> None:
        assert self._requests == sorted(self._requests, key=by_arrival)
        for request in self._requests:
            assert request.phase in (Phase.RUNNING, Phase.FETCHING)
            assert request.num_committed <= request.num_computed <= request.num_scheduled <= request.capacity
            assert request.num_computed < len(request.token_ids) < request.max_length
            length = len(request.token_ids) + request.num_pending
            assert request.num_scheduled < length <= request.max_length, "computes what will never be there"
            if request.phase is Phase.FETCHING:
                assert request.num_scheduled == request.num_computed, "a row that reads what is not there yet"
            if request.admitted_with is not None:
                assert request.num_scheduled == request.num_computed
            else:
                assert request.request_id not in self._left
