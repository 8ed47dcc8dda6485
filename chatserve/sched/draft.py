"""A step's plan in the making: its rows, and what is left of the token budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatserve.sched.plan import Admitted, Row

if TYPE_CHECKING:
    from chatserve.sched.request import Request
    from chatserve.types import BlockId, RequestId


class Draft:
    """Rows in the order in which they were added, at most `budget` tokens together."""

    __slots__ = ("_rows", "budget", "pressed")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._rows: dict[RequestId, tuple[Request, Row]] = {}
        self.pressed = False
        """Someone was preempted or had to wait for blocks: no time to let others in."""

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, request: Request, end: int, new_block_ids: tuple[BlockId, ...]) -> None:
        """The request computes up to its token `end`."""
        start = request.num_scheduled
        sample = end == len(request.token_ids) + request.num_pending
        self._rows[request.request_id] = request, Row(request.request_id, start, end - start, new_block_ids, sample)
        self.budget -= end - start

    def discard(self, request: Request) -> None:
        """Take back its row, if it has one."""
        _, row = self._rows.pop(request.request_id, (None, None))
        if row is not None:
            self.budget += row.num_tokens

    def close(self) -> tuple[tuple[Admitted, ...], tuple[Row, ...]]:
        """Whoever has a row for the first time, and the rows, which are the step's now: their requests are that far."""
        admitted: list[Admitted] = []
        rows: list[Row] = []
        for request, row in self._rows.values():
            if request.admitted_with is not None:
                admitted.append(_introduce(request, request.admitted_with))
                request.admitted_with = None
            request.num_scheduled += row.num_tokens
            if row.sample:
                request.num_pending += 1
            rows.append(row)
        return tuple(admitted), tuple(rows)


def _introduce(request: Request, block_ids: tuple[BlockId, ...]) -> Admitted:
    return Admitted(
        request_id=request.request_id,
        token_ids=tuple(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        num_computed=request.num_computed,
        block_ids=block_ids,
        sampling=request.sampling,
    )
