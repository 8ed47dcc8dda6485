"""Rows for those who run: who gets how many tokens of a step, and who gives way where blocks are short.

Owns whether a row has found no blocks, in which case no step begins until what is under way has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from chatserve.sched.request import Phase

if TYPE_CHECKING:
    from chatserve.sched.batch import Batch
    from chatserve.sched.draft import Draft
    from chatserve.sched.flights import Flights
    from chatserve.sched.hints import Hints
    from chatserve.sched.queue import WaitingQueue
    from chatserve.sched.request import Request

CHUNK_TOKENS: Final = 256
"""Tokens of a prompt's beginning that a step takes beside rows that decode, if there are so many. A GPU that decodes
for a few dozen sessions waits for its weights, so these cost it less than half a step more; and with fewer, a prompt of
8,192 tokens would be part of most steps of the second that follows."""
CHUNK_POSITION: Final = 12_288
"""A token there costs twice what the first one does, since it attends to all before it. Chunks shrink accordingly, so
that whoever decodes beside a long prompt waits equally long for each token."""
CHUNK_UNIT: Final = 64
"""Chunks are multiples of this, as a GPU's matrix products are made of tiles: beside 64 rows that decode, 128 tokens
cost 160 us a layer of 8B, 160 cost 188 and 192 cost 180 (H200)."""
DECODE_WEIGHT: Final = 4
"""Of a step's budget prompts get their share by heads, where one that decodes counts as so many that wait: a session
that waits for its next token has been promised a steady flow of them."""
CHUNK_STEPS: Final = 192
"""Whatever waits is computed in about so many steps at most."""


def level_chunk_tokens(position: int) -> int:
    """Tokens from `position` on that take about as long as `CHUNK_TOKENS` from a prompt's beginning on."""
    tokens = CHUNK_TOKENS * CHUNK_POSITION // (CHUNK_POSITION + position)
    return max(CHUNK_UNIT, tokens - tokens % CHUNK_UNIT)


class Placement:
    """Places the requests of `batch`; what is computed ahead for `hints` gives way first, and who gives way goes to
    `queue`.
    """

    __slots__ = ("_batch", "_flights", "_hints", "_is_starved", "_queue")

    def __init__(self, batch: Batch, queue: WaitingQueue, flights: Flights, hints: Hints) -> None:
        self._batch = batch
        self._queue = queue
        self._flights = flights
        self._hints = hints
        self._is_starved = False

    @property
    def must_wait(self) -> bool:
        """A row found no blocks, and what is under way may hold enough."""
        return self._is_starved and not self._flights.is_quiet

    def place_all(self, draft: Draft) -> None:
        """Rows for all who decode, then for prompts, oldest first."""
        self._is_starved = False
        prefilling: list[Request] = []
        running = Phase.RUNNING
        for request in self._batch:
            length = len(request.token_ids) + request.num_pending
            if request.num_scheduled < length - 1:
                prefilling.append(request)
            elif length >= request.max_length:  # its last token is under way
                continue
            elif request.phase is running and length <= request.capacity:  # as nearly always
                draft.add(request, length, ())
            else:
                self._place(draft, request)
        if len(draft):
            draft.budget = min(draft.budget, self._max_chunk_tokens(draft, prefilling))
        for request in prefilling:
            if draft.budget > 0:
                self._place(draft, request)

    def _max_chunk_tokens(self, draft: Draft, prefilling: list[Request]) -> int:
        """Tokens of prompts for a step in which others decode."""
        num_waiting = len(prefilling) + len(self._queue)
        share = draft.budget * num_waiting // (num_waiting + DECODE_WEIGHT * len(draft))
        backlog = self._queue.num_tokens + sum([len(r.token_ids) - r.num_scheduled for r in prefilling])
        position = prefilling[0].num_scheduled if prefilling else 0
        return max(level_chunk_tokens(position), share, backlog // CHUNK_STEPS)

    def _place(self, draft: Draft, request: Request) -> None:
        """Give a running request its row, preempting newer ones for the blocks, or leave it out of this step."""
        if not self._batch.is_ready(request):  # or preempted by an older one of this step
            return
        end = min(len(request.token_ids) + request.num_pending, request.num_scheduled + draft.budget)
        if self._is_starved and end > request.capacity:  # older ones wait for blocks
            return
        new_block_ids = self._batch.grow(request, end)
        while new_block_ids is None:
            if self._hints.pause():
                new_block_ids = self._batch.grow(request, end)
                continue
            draft.pressed = True
            if not self._flights.is_quiet:
                self._is_starved = True
                return
            newest = self._batch.newest
            if newest is not request or len(self._batch) == 1:
                draft.discard(newest)
                self._batch.preempt(newest)
                self._queue.push_preempted(newest)
            if newest is request:
                return
            new_block_ids = self._batch.grow(request, end)
        draft.add(request, end, new_block_ids)
