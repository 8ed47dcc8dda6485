"""Who waits for whom: requests that begin alike do not compute their beginning twice.

A request whose next block another one is about to compute waits for that one, its *leader*, and then finds the block in
the cache. The wait is bounded: it lasts only while the leader moves. Knows token ids and progress, no blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from chatserve.sched.request import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable

    from chatserve.sched.request import Request

PATIENCE_TURNS: Final = 4
"""Turns that a request waits for a leader that does not move."""
MAX_LEADERS: Final = 64
"""Leaders that a request follows in its life; then it goes its own way."""


class Blocker:
    """Whom a waiting request waits for: `leader` is computing the first `num_common` tokens of both.

    The wait ends when the leader has computed them, leaves the batch, or has not moved for a few turns.
    """

    __slots__ = ("idle_turns", "leader", "num_common", "seen_computed")

    def __init__(self, leader: Request, num_common: int) -> None:
        self.leader = leader
        self.num_common = num_common
        self.seen_computed = leader.num_computed
        self.idle_turns = 0

    def holds(self) -> bool:
        """Count one more turn and say whether the wait goes on."""
        leader = self.leader
        if leader.phase not in (Phase.RUNNING, Phase.FETCHING) or leader.num_computed >= self.num_common:
            return False
        if leader.num_computed > self.seen_computed:
            self.seen_computed = leader.num_computed
            self.idle_turns = 0
        else:
            self.idle_turns += 1
        return self.idle_turns <= PATIENCE_TURNS


def find_leader(request: Request, num_here: int, leaders: Iterable[Request], block_size: int) -> Blocker | None:
    """Whom a request should wait for, if anyone is about to compute at least one more block of its prompt.

    `num_here` of the request's tokens are cached. Another user's work is of use only as far as it is shared between
    users.
    """
    if request.num_leaders >= MAX_LEADERS:
        return None
    most = len(request.token_ids) - 1
    for leader in leaders:
        limit = most if leader.user == request.user else min(most, leader.num_shared_tokens)
        if limit - num_here < block_size:
            continue
        num_common = common_prefix_length(leader.token_ids, request.token_ids, limit)
        if num_common - num_here >= block_size and leader.num_computed < num_common:
            request.num_leaders += 1
            return Blocker(leader, num_common)
    return None


def common_prefix_length(a: list[int], b: list[int], limit: int) -> int:
    """Length of the longest common prefix, at most `limit`; by bisection, because slices compare at memory speed."""
    low, high = 0, min(limit, len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # a[:low] == b[:low] and a[:high] != b[:high]
        mid = (low + high) // 2
        if a[low:mid] == b[low:mid]:
            low = mid
        else:
            high = mid
    return low
