"""A store that tells someone when it does not answer, whoever was asking. Adds nothing else."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, TypeVar

from chatserve.chat.events import AnyEvent
from chatserve.chat.feed import Feed
from chatserve.chat.store import Committed, Delta, Lease, SessionPage, SessionState, Store, Transaction
from chatserve.chat.workers import Owner, WorkerRegistry
from chatserve.errors import StoreUnavailableError
from chatserve.types import SessionId, UserId

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

T = TypeVar("T")


class WatchedStore:
    """Implements `Store`; calls `on_unavailable` with each `StoreUnavailableError` before it is raised."""

    def __init__(self, store: Store, on_unavailable: Callable[[StoreUnavailableError], None]) -> None:
        self._store = store
        self._on_unavailable = on_unavailable

    @property
    def workers(self) -> WorkerRegistry:
        return self._store.workers

    def open_feed(self, owner: Owner) -> Feed:
        return self._store.open_feed(owner)

    async def acquire(
        self, user: UserId, session: SessionId, owner: Owner, *, instead_of: Owner | None = None
    ) -> Lease:
        return await self._watch(self._store.acquire(user, session, owner, instead_of=instead_of))

    async def release(self, user: UserId, session: SessionId, fence: int, *, lost_up_to: int = 0) -> None:
        await self._watch(self._store.release(user, session, fence, lost_up_to=lost_up_to))

    async def commit(self, change: Transaction) -> Committed:
        return await self._watch(self._store.commit(change))

    async def append(self, deltas: Sequence[Delta]) -> list[int | None]:
        return await self._watch(self._store.append(deltas))

    async def answer(self, user: UserId, request_id: str) -> tuple[str, bytes] | None:
        return await self._watch(self._store.answer(user, request_id))

    async def load(self, user: UserId, session: SessionId) -> SessionState | None:
        return await self._watch(self._store.load(user, session))

    async def events(self, user: UserId, session: SessionId, after: int) -> list[AnyEvent] | None:
        return await self._watch(self._store.events(user, session, after))

    async def list_sessions(self, user: UserId, limit: int, cursor: str | None, query: str | None) -> SessionPage:
        return await self._watch(self._store.list_sessions(user, limit, cursor, query))

    async def untouched(self, before: float) -> AsyncIterator[tuple[UserId, SessionId]]:
        found = self._store.untouched(before)
        with contextlib.suppress(StopAsyncIteration):
            while True:
                yield await self._watch(anext(found))

    async def unfinished(self, sessions: Sequence[tuple[UserId, SessionId]]) -> list[tuple[UserId, SessionId]]:
        return await self._watch(self._store.unfinished(sessions))

    async def ping(self) -> None:
        await self._watch(self._store.ping())

    async def close(self) -> None:
        await self._store.close()

    async def _watch(self, operation: Awaitable[T]) -> T:
        try:
            return await operation
        except StoreUnavailableError as error:
            self._on_unavailable(error)
            raise
