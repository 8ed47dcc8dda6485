"""A step's plan in the making: its rows, and what is left of the token budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatserve.sched.plan import Admitted, Row

if TYPE_CHECKING:
    from chatserve.sched.request import Request
    from chatserve.types import BlockId, RequestId


class Draft:
    """Rows in the order in which they were added, at most `budget` tokens together."""

    __slots__ = ("admitted", "budget", "pressed", "rows")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.rows: dict[RequestId, Row] = {}
        self.admitted: list[Admitted] = []
        self.pressed = False
        """Someone was preempted or had to wait for blocks: no time to let others in."""

    def add(self, request: Request, end: int, new_block_ids: tuple[BlockId, ...]) -> None:
        """The request computes up to its token `end`."""
        start = request.num_computed
        sample = end == len(request.token_ids)
        self.rows[request.request_id] = Row(request.request_id, start, end - start, new_block_ids, sample)
        self.budget -= end - start

    def discard(self, request: Request) -> None:
        """Take back its row, if it has one."""
        row = self.rows.pop(request.request_id, None)
        if row is not None:
            self.budget += row.num_tokens
