"""Who may join the batch.

Waiting requests are let in, in the queue's order, into the room that is left by those who run: nobody overtakes one for
whom there is none, except those who wait for another's prefix. Owns the decision and what is said of it; the queue owns
the order, the batch who runs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatserve.sched.leaders import find_leader
from chatserve.sched.outcome import Begun, Journal, Waiting
from chatserve.sched.request import Phase

if TYPE_CHECKING:
    from chatserve.cache.kv_manager import KVManager, PrefixMatch
    from chatserve.sched.batch import Batch
    from chatserve.sched.draft import Draft
    from chatserve.sched.queue import WaitingQueue
    from chatserve.sched.request import Request


class AdmissionControl:
    """Moves requests from `queue` to `batch`, and notes in `journal` who has begun and where the others stand."""

    __slots__ = ("_batch", "_journal", "_kv", "_max_running", "_min_fetched_tokens", "_queue")

    def __init__(
        self,
        kv: KVManager,
        queue: WaitingQueue,
        batch: Batch,
        journal: Journal,
        *,
        max_running: int,
        min_fetched_blocks: int,
    ) -> None:
        self._kv = kv
        self._queue = queue
        self._batch = batch
        self._journal = journal
        self._max_running = max_running
        self._min_fetched_tokens = min_fetched_blocks * kv.block_size

    def let_in(self, draft: Draft) -> Request | None:
        """Let requests in until the budget, the rows or the blocks run out.

        Returns the one for whom there is no room though nobody runs. It would wait for ever, unless blocks are on the
        move that will be free.
        """
        leaders = [request for request in self._batch if request.is_prefilling]
        for request in self._queue.in_order():
            if draft.budget <= 0 or draft.pressed or len(self._batch) >= self._max_running:
                return None
            if request.blocked_on is not None and request.blocked_on.holds():
                continue
            if self._is_refused_still(request):
                return None
            if self._is_being_read(request):
                continue
            match = self._kv.match(request.token_ids, request.user)
            num_here = match.num_cached + match.num_swapped
            request.blocked_on = find_leader(request, num_here, leaders, self._kv.block_size)
            if request.blocked_on is not None:
                continue
            if self._batch and not self._has_room(request, match.num_cached):
                return None
            # What comes from the host does not hold up those who have a row, unless it is less than a step is worth.
            ahead = bool(self._batch) and match.num_swapped >= self._min_fetched_tokens
            if not self._enter(draft, request, match, ahead=ahead):
                return None if self._batch else request
            if request.is_prefilling:
                leaders.append(request)
        return None

    def tell_positions(self) -> None:
        """Say where those stand who have not been told, or whose place has halved."""
        for position, request in enumerate(self._queue.in_order()):
            told = request.told_position
            if not request.started and (told is None or position <= told // 2 < told):
                request.told_position = position
                self._journal.waiting.append(Waiting(request.request_id, position))

    def _num_unpinned(self) -> int:
        counts, _ = self._kv.counts()
        return counts.total - counts.pinned

    def _is_refused_still(self, request: Request) -> bool:
        """Nothing has changed for the better since it found no room: matching a long prompt again at every step of the
        others would cost them milliseconds.
        """
        if request.refused_at is None or not self._batch:
            return False
        num_unpinned, num_running = request.refused_at
        return self._num_unpinned() <= num_unpinned and len(self._batch) >= num_running

    def _is_being_read(self, request: Request) -> bool:
        """Whether it waits for what a snapshot holds of its path; it is asked once more a turn until it does not."""
        request.awaits_reading = request.awaits_reading and self._kv.awaits_reading(request.token_ids, request.user)
        return request.awaits_reading

    def _has_room(self, request: Request, num_on_device: int) -> bool:
        """Whether everything that the request must hold to decode fits beside what others hold.

        A guess that saves swapping: blocks that match may or may not be held by others already. A preempted request's
        are its own, so all of them count; and it leaves one block to each of the others, lest it be thrown out again.
        """
        block_size, num_unpinned = self._kv.block_size, self._num_unpinned()
        num_needed = -(-(len(request.token_ids) + 1) // block_size)
        if request.phase is Phase.PREEMPTED:
            num_needed += len(self._batch)
        else:
            num_needed -= num_on_device // block_size
        fits = num_needed <= num_unpinned
        request.refused_at = None if fits else (num_unpinned, len(self._batch))
        return fits

    def _enter(self, draft: Draft, request: Request, match: PrefixMatch, *, ahead: bool) -> bool:
        """Admit one request with its first chunk. False: there are not enough blocks, and nothing has changed."""
        admission = self._kv.admit(
            request.request_id,
            request.token_ids,
            request.user,
            request.num_shared_tokens,
            match=match,
            ahead=ahead,
        )
        if admission is None:
            return False
        self._queue.take(request)
        self._batch.enter(request, admission)
        if not request.started:
            request.started = True
            self._journal.begun.append(
                Begun(request.request_id, request.num_submitted, admission.num_cached, admission.num_swapped_in)
            )
        if not self._batch.is_ready(request):
            return True
        end = min(len(request.token_ids), request.num_scheduled + draft.budget)
        new_block_ids = self._batch.grow(request, end)
        if new_block_ids is None:
            draft.pressed = True  # it waits in the batch, holding its path
        else:
            draft.add(request, end, new_block_ids)
        return True
