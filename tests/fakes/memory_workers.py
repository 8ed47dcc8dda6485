"""The processes that share a store in memory: who lives, and what they hear of each other.

`MemoryWorkers.die(owner)` is a process that stops beating; `interrupt` breaks every feed's connection for a moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence

from chatserve.chat.feed import Announced, Heard, Letter, Missed, News
from chatserve.chat.workers import Owner, Standing, place_of
from chatserve.types import SessionId, UserId


class MemoryWorkers:
    """Implements `WorkerRegistry`; time passes only by `die`."""

    def __init__(self, turn: Callable[[], Awaitable[None]]) -> None:
        self._turn = turn
        self._places: dict[str, Owner | None] = {}
        self._known: set[Owner] = set()
        self._held: dict[Owner, set[tuple[UserId, SessionId]]] = {}
        self._silent: set[Owner] = set()

    def die(self, owner: Owner) -> None:
        """It has not been heard of for a while."""
        self._silent.add(owner)

    async def join(self, owner: Owner) -> None:
        await self._turn()
        self._places[place_of(owner)] = owner
        self._known.add(owner)
        self._silent.discard(owner)

    async def beat(self, owner: Owner) -> Standing:
        await self._turn()
        if self._places.get(place_of(owner), owner) != owner:
            return Standing.GONE
        self._silent.discard(owner)
        return Standing.ALIVE if owner in self._known else Standing.SILENT

    async def leave(self, owner: Owner) -> None:
        await self._turn()
        self._places[place_of(owner)] = None

    async def forget(self, owner: Owner) -> None:
        await self._turn()
        self._known.discard(owner)
        self._held.pop(owner, None)

    async def known(self) -> list[Owner]:
        await self._turn()
        return sorted(self._known)

    async def standings(self, owners: Sequence[Owner]) -> list[Standing]:
        await self._turn()
        return [self._standing(owner) for owner in owners]

    def _standing(self, owner: Owner) -> Standing:
        if owner not in self._known or self._places.get(place_of(owner), owner) != owner:
            return Standing.GONE
        return Standing.SILENT if owner in self._silent else Standing.ALIVE

    async def note(self, owner: Owner, user: UserId, session: SessionId) -> None:
        await self._turn()
        self._held.setdefault(owner, set()).add((user, session))

    async def unnote(self, owner: Owner, sessions: Iterable[tuple[UserId, SessionId]]) -> None:
        await self._turn()
        self._held.get(owner, set()).difference_update(sessions)

    async def noted(self, owner: Owner) -> list[tuple[UserId, SessionId]]:
        await self._turn()
        return sorted(self._held.get(owner, ()))


class MemoryFeeds:
    """What connects the feeds of one store."""

    def __init__(self, turn: Callable[[], Awaitable[None]]) -> None:
        self.turn = turn
        self.feeds: set[MemoryFeed] = set()

    def interrupt(self) -> None:
        """All connections break and come back."""
        for feed in self.feeds:
            feed.hear(Missed())

    def tell(self, news: News) -> None:
        for feed in self.feeds:
            if (news.user, news.session) in feed.sessions and not feed.is_deaf:
                feed.hear(news)

    def announce(self, user: UserId, announcement: bytes) -> None:
        for feed in self.feeds:
            if user in feed.users and not feed.is_deaf:
                feed.hear(Announced(user, announcement))

    def send(self, owner: str, body: bytes) -> bool:
        receivers = [feed for feed in self.feeds if feed.owner == owner and not feed.is_deaf]
        for feed in receivers:
            feed.hear(Letter(body))
        return bool(receivers)


class MemoryFeed:
    """Implements `Feed`. While `is_deaf` it hears nothing; `recover` tells it so."""

    def __init__(self, feeds: MemoryFeeds, owner: Owner) -> None:
        self._feeds = feeds
        self.owner = owner
        self.sessions: set[tuple[UserId, SessionId]] = set()
        self.users: set[UserId] = set()
        self.is_deaf = False
        self._queue: asyncio.Queue[Heard | None] = asyncio.Queue()
        feeds.feeds.add(self)

    def hear(self, heard: Heard) -> None:
        self._queue.put_nowait(heard)

    def recover(self) -> None:
        self.is_deaf = False
        self.hear(Missed())

    async def follow(self, user: UserId, session: SessionId) -> None:
        await self._feeds.turn()
        self.sessions.add((user, session))

    async def unfollow(self, user: UserId, session: SessionId) -> None:
        await self._feeds.turn()
        self.sessions.discard((user, session))

    async def follow_user(self, user: UserId) -> None:
        await self._feeds.turn()
        self.users.add(user)

    async def unfollow_user(self, user: UserId) -> None:
        await self._feeds.turn()
        self.users.discard(user)

    async def num_followers(self, user: UserId, session: SessionId) -> int:
        await self._feeds.turn()
        return sum((user, session) in feed.sessions for feed in self._feeds.feeds)

    async def send(self, owner: str, body: bytes) -> bool:
        await self._feeds.turn()
        return self._feeds.send(owner, body)

    async def heard(self) -> AsyncIterator[Heard]:
        while (heard := await self._queue.get()) is not None:
            yield heard

    async def close(self) -> None:
        self._feeds.feeds.discard(self)
        self._queue.put_nowait(None)
