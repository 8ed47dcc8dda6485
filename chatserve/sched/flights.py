"""Steps that were launched and are not booked yet, and copies in the background that are not done.

Owns which step comes next to be booked, and whose rows in it are of no use any more. Decides nothing.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from chatserve.sched.plan import StepPlan, Transfers
    from chatserve.sched.request import Request
    from chatserve.types import RequestId


class _Flight:
    """One step. `gone` are requests that have ended since it was planned, whose rows are dropped."""

    __slots__ = ("gone", "plan")

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.gone: set[RequestId] = set()


class Flights:
    """All that is under way."""

    __slots__ = ("_background", "_steps")

    def __init__(self) -> None:
        self._steps: deque[_Flight] = deque()
        """Oldest first."""
        self._background: dict[int, Transfers] = {}
        """By the number of the step that brought them."""

    def __len__(self) -> int:
        """How many steps are in flight."""
        return len(self._steps)

    @property
    def is_copying(self) -> bool:
        """Whether anything is being copied in the background."""
        return bool(self._background)

    @property
    def is_quiet(self) -> bool:
        """Nothing is under way, so that every block is where it belongs."""
        return not self._steps and not self._background

    def launch(self, plan: StepPlan) -> None:
        self._steps.append(_Flight(plan))
        if plan.background:
            self._background[plan.step] = plan.background

    def drop(self, request_id: RequestId) -> None:
        """The request has ended: what steps in flight compute for it is of no use."""
        for flight in self._steps:
            flight.gone.add(request_id)

    def land(self, plan: StepPlan) -> set[RequestId]:
        """Take the oldest step out. The requests that have ended since it was planned."""
        flight = self._steps.popleft()
        assert flight.plan is plan, "a plan is booked once, and in order"
        return flight.gone

    def background_done(self, step: int) -> Transfers:
        """What that step had copied in the background, which is there now."""
        return self._background.pop(step)

    def check(self, requests: Iterable[Request]) -> None:
        """Assert that each request counts what is in flight for it."""
        num_tokens: Counter[RequestId] = Counter()
        num_sampled: Counter[RequestId] = Counter()
        for flight in self._steps:
            for row in flight.plan.rows:
                if row.request_id not in flight.gone:
                    num_tokens[row.request_id] += row.num_tokens
                    num_sampled[row.request_id] += row.sample
        for request in requests:
            assert request.num_pending == num_sampled[request.request_id]
            assert request.num_scheduled - request.num_computed == num_tokens[request.request_id]
