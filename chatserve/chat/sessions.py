"""The sessions that this process holds the lease of: found or loaded, changed under their lock, dropped when idle.

A session is in memory (`LiveSession`) as long as its lease is ours, and what is in memory is then the truth; `tenure`
owns the ways in which that ends. Where another process writes a session that somebody here follows, `Following` tells
of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import msgspec

from chatserve.chat.events import AnyEvent
from chatserve.chat.following import Following
from chatserve.chat.health import StoreHealth
from chatserve.chat.leases import Leases
from chatserve.chat.live_session import LiveSession, Publish
from chatserve.chat.store import (
    LeaseLostError,
    SessionRecord,
    SessionState,
    Store,
    Transaction,
)
from chatserve.chat.tenure import Tenure
from chatserve.errors import NotFoundError, StoreUnavailableError
from chatserve.types import MessageId, SessionId, UserId

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

MAX_IDLE_SESSIONS: Final = 512


class Sessions:
    """The sessions that this process holds, the least recently used idle ones dropped."""

    def __init__(
        self, store: Store, health: StoreHealth, leases: Leases, following: Following, publish: Publish
    ) -> None:
        self._store = store
        self._health = health
        self._leases = leases
        self._following = following
        self._publish = publish
        self._live: OrderedDict[SessionId, LiveSession] = OrderedDict()
        self._loading: dict[SessionId, asyncio.Lock] = {}
        self._subscribers: dict[SessionId, int] = {}
        self.on_reloaded: Callable[[LiveSession], None] = lambda _: None
        """Called when an uncertain write turned out one way or the other."""
        self.on_loaded: Callable[[LiveSession], None] = lambda _: None
        """Called when a lease was taken: what the session has of unfinished answers is ours to go on with."""
        self.tenure: Final = Tenure(store, health, leases, following, self)
        following.is_held = lambda user, session: self.peek(user, session) is not None
        leases.take_over = self.take_over

    def __iter__(self) -> Iterator[LiveSession]:
        return iter(list(self._live.values()))

    def peek(self, user: UserId, session: SessionId) -> LiveSession | None:
        """The session if it is in memory."""
        live = self._live.get(session)
        return live if live is not None and live.user == user and not live.is_deleted else None

    async def get(self, user: UserId, session: SessionId) -> LiveSession:
        """The session, its lease taken and itself loaded if need be.

        Raises:
            NotFoundError: it does not exist for this user.
            OwnedElsewhereError: another process has its lease.
            StoreUnavailableError: that cannot be known now.
        """
        live = self._live.get(session)
        if live is None:
            live = await self._load(user, session)
        if live.user != user or live.is_deleted:
            raise _not_found()
        self._live.move_to_end(session)
        return live

    def add(self, state: SessionState) -> LiveSession:
        """Take in a session that was just created or loaded."""
        live = LiveSession(state, self._publish)
        live.num_subscribers = self._subscribers.get(live.session, 0)
        self._live[live.session] = live
        self._shrink()
        return live

    def remove(self, live: LiveSession) -> None:
        """A session was deleted."""
        live.is_deleted = True
        self._live.pop(live.session, None)
        self.tenure.drop([live])

    def forget(self, live: LiveSession) -> None:
        """It is no longer ours to have in memory."""
        del self._live[live.session]

    async def take_over(self, user: UserId, session: SessionId) -> None:
        """Go on with what a dead process had of a session; raises as `get` does."""
        await self.get(user, session)

    def set_subscribers(self, session: SessionId, count: int) -> LiveSession | None:
        if count:
            self._subscribers[session] = count
        else:
            self._subscribers.pop(session, None)
        live = self._live.get(session)
        if live is not None:
            live.num_subscribers = count
        return live

    @asynccontextmanager
    async def changing(self, user: UserId, session: SessionId) -> AsyncIterator[LiveSession]:
        """Hold a session's lock, with memory known to be the store's truth.

        Raises:
            NotFoundError: the session does not exist for this user, or was deleted meanwhile.
            OwnedElsewhereError, LeaseLostError: another process has it.
            StoreUnavailableError: the store is away.
        """
        while True:
            self._health.require()
            live = await self.get(user, session)
            async with live.lock:
                if live.is_uncertain and not live.is_lost:
                    await self._reload(live)
                if live.is_deleted:
                    raise _not_found()
                if self._live.get(session) is not live:
                    continue  # dropped as idle while we waited for the lock
                yield live
                return

    async def commit(self, live: LiveSession, change: Transaction, apply: Callable[[], None]) -> bytes | None:
        """Store a change of a session whose lock is held, and wait until it is applied and published.

        Returns an earlier answer if the request had been done before; then nothing was changed.

        Raises:
            LeaseLostError: another process has the session; nothing was changed, unless it had been before.
        """
        try:
            committed = await self._store.commit(msgspec.structs.replace(change, fence=live.fence, seq=live.seq))
        except StoreUnavailableError:
            live.is_uncertain = True
            raise
        except LeaseLostError:
            await self.tenure.check_lease(live)
            raise
        if committed.answer is not None:
            return committed.answer
        await live.delivered(committed.first_seq, change.events, apply)
        return None

    async def settle(self) -> None:
        """After the store came back: find out what became of uncertain writes."""
        for live in self:
            if live.is_uncertain:
                async with live.lock:
                    if live.is_uncertain and not live.is_lost:
                        with contextlib.suppress(LeaseLostError):
                            await self._reload(live)

    # --- inside -------------------------------------------------------------------------------------------------------

    async def _load(self, user: UserId, session: SessionId) -> LiveSession:
        lock = self._loading.setdefault(session, asyncio.Lock())
        try:
            async with lock:
                if (live := self._live.get(session)) is not None:
                    return live
                await self.tenure.give_back(session)
                fence = await self._leases.acquire(user, session)
                state = await self._store.load(user, session)
                if state is None:
                    raise _not_found()
                if state.fence != fence:
                    raise LeaseLostError
                missed = await self._missed(user, session)
                if (live := self._live.get(session)) is not None:
                    return live  # after a load that failed there may be two at once, and one session has one lock
                live = self.add(state)
                if missed is None:
                    self._following.break_off(user, session)
                else:
                    self._following.give_way(user, session)
                if missed:
                    self._publish(user, session, missed)
                self.on_loaded(live)
                return live
        finally:
            if not lock.locked():
                self._loading.pop(session, None)

    async def _missed(self, user: UserId, session: SessionId) -> list[AnyEvent] | None:
        """What was written before the lease was ours, and those who follow here have not been told; None where that is
        no longer to be had.
        """
        if (published := self._following.published(user, session)) is None:
            return []
        events = await self._store.events(user, session, published)
        if events:
            await self._following.answer_first(user, session)
        told = self._following.published(user, session)  # the feed may have been quicker
        return events if events is None or told is None else [event for event in events if event.seq > told]

    async def _reload(self, live: LiveSession) -> None:
        missed = await self._store.events(live.user, live.session, live.seq)
        state = await self._store.load(live.user, live.session)
        if state is None:
            self.remove(live)
            return
        if state.fence != live.fence:
            self.tenure.lose(live.user, live.session)
            raise LeaseLostError
        live.reload(state, missed)
        self.on_reloaded(live)

    def _shrink(self) -> None:
        excess = len(self._live) - MAX_IDLE_SESSIONS
        if excess <= 0:
            return
        dropped: list[LiveSession] = []
        for session, live in list(self._live.items())[:-1]:
            if len(dropped) == excess:
                break
            if live.is_idle:
                del self._live[session]
                dropped.append(live)
        self.tenure.drop(dropped)


def _not_found() -> NotFoundError:
    return NotFoundError("there is no such session")


def with_tree(
    record: SessionRecord, *, leaf: MessageId | None, root_child: MessageId | None, now: float
) -> SessionRecord:
    """The session's record after its tree changed."""
    return msgspec.structs.replace(record, leaf=leaf, root_child=root_child, updated_at=now)
