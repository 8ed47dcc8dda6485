"""What a process hears of the others' doing, as soon as the store has it: the events of sessions that somebody here
follows, changes of users' lists, and letters from process to process.

Nothing here is kept by anyone: what is missed while a connection is broken is read from the store again, and a
`Missed` says that there may be something.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from chatserve.chat.events import AnyEvent
from chatserve.types import SessionId, UserId

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class News(msgspec.Struct, frozen=True, kw_only=True):
    """One write to a session that is followed: its events in order, numbered. If it answered a request of a client,
    that request's id and the answer's JSON.
    """

    user: UserId
    session: SessionId
    events: tuple[AnyEvent, ...]
    request_id: str = ""
    answer: bytes = b""


class Announced(msgspec.Struct, frozen=True):
    """`Transaction.announcement`, to those who follow its user."""

    user: UserId
    announcement: bytes


class Letter(msgspec.Struct, frozen=True):
    """Sent to this process with `Feed.send`."""

    body: bytes


class Missed(msgspec.Struct, frozen=True):
    """The connection was broken and is whole again."""


Heard = News | Announced | Letter | Missed


class Feed(Protocol):
    """One process's. All but `heard` raise `StoreUnavailableError` where the store does not answer in time."""

    async def follow(self, user: UserId, session: SessionId) -> None:
        """Hear of every write to the session from the moment this returns, until `unfollow`."""
        ...

    async def unfollow(self, user: UserId, session: SessionId) -> None: ...

    async def follow_user(self, user: UserId) -> None: ...

    async def unfollow_user(self, user: UserId) -> None: ...

    async def num_followers(self, user: UserId, session: SessionId) -> int:
        """How many processes follow a session."""
        ...

    async def send(self, owner: str, body: bytes) -> bool:
        """Send a letter. False: nobody of that name hears it; True: it went out, which is no proof that it arrives."""
        ...

    def heard(self) -> AsyncIterator[Heard]:
        """Everything, in order, for one consumer; it ends after `close`."""
        ...

    async def close(self) -> None: ...
