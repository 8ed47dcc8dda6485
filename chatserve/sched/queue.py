"""Requests that wait, in the order in which they are to be admitted.

Preempted requests come first, oldest first: they were admitted once and their users see text. Behind them the users
take turns, each with their oldest request. Owns order only; knows nothing of blocks or budgets.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from typing import TYPE_CHECKING

from chatserve.sched.request import Phase, Request

if TYPE_CHECKING:
    from collections.abc import Iterator

    from chatserve.types import RequestId, UserId


def by_arrival(request: Request) -> int:
    return request.arrival


class WaitingQueue:
    """Round robin over users, first in first out within one."""

    def __init__(self) -> None:
        self._preempted: list[Request] = []
        self._turns: OrderedDict[UserId, dict[RequestId, Request]] = OrderedDict()
        """Users in the order of their next turns, each with what they have waiting, oldest first."""
        self._num_new = 0
        self.num_tokens = 0
        """Tokens of all that wait, whatever is cached of them."""

    def __len__(self) -> int:
        return len(self._preempted) + self._num_new

    def __contains__(self, request: Request) -> bool:
        if request.phase is Phase.PREEMPTED:
            return request in self._preempted
        return request.request_id in self._turns.get(request.user, ())

    @property
    def num_new(self) -> int:
        """Those that were never admitted; preempted ones do not count against the bound of the queue."""
        return self._num_new

    def push(self, request: Request) -> None:
        """A new request, behind its user's others."""
        self._turns.setdefault(request.user, {})[request.request_id] = request
        self._num_new += 1
        self.num_tokens += len(request.token_ids)

    def push_preempted(self, request: Request) -> None:
        insort(self._preempted, request, key=by_arrival)
        self.num_tokens += len(request.token_ids)

    def take(self, request: Request) -> None:
        """Remove an admitted request; its user's next turn comes after everyone else's."""
        user = request.user
        self.remove(request)
        if request.phase is Phase.WAITING and user in self._turns:
            self._turns.move_to_end(user)

    def remove(self, request: Request) -> None:
        """Remove a request that will not be admitted; nobody's turn changes."""
        self.num_tokens -= len(request.token_ids)
        if request.phase is Phase.PREEMPTED:
            self._preempted.remove(request)
            return
        waiting = self._turns[request.user]
        del waiting[request.request_id]
        self._num_new -= 1
        if not waiting:
            del self._turns[request.user]

    def in_order(self) -> Iterator[Request]:
        """All requests, next one first. The queue may change under the iteration, which does not notice."""
        yield from tuple(self._preempted)
        waiting = [iter(tuple(requests.values())) for requests in self._turns.values()]
        while waiting:
            left = []
            for requests in waiting:
                request = next(requests, None)
                if request is not None:
                    yield request
                    left.append(requests)
            waiting = left

    def check(self) -> None:
        assert all(request.phase is Phase.PREEMPTED for request in self._preempted)
        assert self.num_tokens == sum(len(request.token_ids) for request in self.in_order())
        assert self._preempted == sorted(self._preempted, key=by_arrival)
        assert self._num_new == sum(len(waiting) for waiting in self._turns.values())
        for user, waiting in self._turns.items():
            assert waiting, f"{user} has a turn and nothing waiting"
            assert all(request.phase is Phase.WAITING for request in waiting.values())
