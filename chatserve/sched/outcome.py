"""What became of requests in one turn of the scheduler, for whoever tells their owners."""

from __future__ import annotations

import msgspec

from chatserve.engine.messages import TokenDelta
from chatserve.types import FinishReason, RequestId, UserId


class Waiting(msgspec.Struct, frozen=True):
    """The request waits; `position` 0 is next. Said once, and again whenever the position has halved."""

    request_id: RequestId
    position: int


class Begun(msgspec.Struct, frozen=True):
    """First admission: where KV of the submitted tokens comes from. The rest is computed."""

    request_id: RequestId
    num_submitted: int
    num_cached: int
    num_swapped_in: int


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """The one end of a request. `token_ids` are all submitted and the kept output ones."""

    request_id: RequestId
    user: UserId
    reason: FinishReason
    token_ids: list[int]
    num_output_tokens: int
    stop_token_id: int | None = None
    detail: str = ""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """All that happened since the last one, in this order."""

    waiting: tuple[Waiting, ...] = ()
    begun: tuple[Begun, ...] = ()
    deltas: tuple[TokenDelta, ...] = ()
    ended: tuple[Ended, ...] = ()


class Journal:
    """Collects what happens until it is taken."""

    __slots__ = ("begun", "deltas", "ended", "waiting")

    def __init__(self) -> None:
        self.waiting: list[Waiting] = []
        self.begun: list[Begun] = []
        self.deltas: list[TokenDelta] = []
        self.ended: list[Ended] = []

    def take(self) -> Outcome:
        """All since the last time."""
        outcome = Outcome(
            waiting=tuple(self.waiting),
            begun=tuple(self.begun),
            deltas=tuple(self.deltas),
            ended=tuple(self.ended),
        )
        for events in (self.waiting, self.begun, self.deltas, self.ended):
            events.clear()
        return outcome
