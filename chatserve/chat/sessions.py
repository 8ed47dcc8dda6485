"""Sessions in memory: the tree, the number of the last event, and what is being generated.

A `LiveSession` is what this process knows of a session as of the last event it delivered. All changes go through the
store first; `deliver` then applies and publishes them in the order of their numbers, whichever write returned first. So
memory, snapshots and subscribers agree at every moment. Knows no prompts, and of the engine only the paths that it
holds.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from chatserve.chat.events import AnyEvent, GenerationDelta, GenerationEnd, GenerationQueued, GenerationStarted
from chatserve.chat.health import StoreHealth
from chatserve.chat.store import SessionRecord, SessionState, Store, Transaction
from chatserve.chat.tree import Tree
from chatserve.engine.messages import PathRef
from chatserve.errors import NotFoundError, StoreUnavailableError
from chatserve.types import MessageId, SessionId, UserId

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence

    from chatserve.chat.generation import Generation

    Publish = Callable[[UserId, SessionId, Sequence[AnyEvent]], None]

MAX_IDLE_SESSIONS: Final = 512
HINT_EVERY_S: Final = 0.5
_TOLD_BY_WRITER: Final = (GenerationQueued, GenerationStarted, GenerationDelta)
"""Events that are written without a session's lock, again and again until their number is known."""


class LiveSession:
    """One session. Whoever plans a change of the tree holds `lock` until it is applied."""

    def __init__(self, state: SessionState, publish: Publish) -> None:
        self.record = state.record
        self.tree = _tree(state)
        self.seq = state.seq
        """Of the last event that was applied and published."""
        self.lock = asyncio.Lock()
        self.generations: dict[MessageId, Generation] = {}
        self.paths: dict[MessageId, PathRef] = {}
        """What the engine holds of the prompt up to and with a message, or of its beginning."""
        self.is_uncertain = False
        """A write failed in a way that leaves open whether it was done."""
        self.is_deleted = False
        self.num_subscribers = 0
        self._hinted_at = -math.inf
        self._publish = publish
        self._early: dict[int, tuple[list[AnyEvent], Callable[[], None]]] = {}

    @property
    def session(self) -> SessionId:
        return self.record.session

    @property
    def user(self) -> UserId:
        return self.record.user

    def may_hint(self, now: float) -> bool:
        """Whether the engine may be told that somebody types: each telling makes it look through the whole path, so a
        client that sends one a key, or a thousand a second, is heard every `HINT_EVERY_S` only."""
        due = abs(now - self._hinted_at) >= HINT_EVERY_S
        if due:
            self._hinted_at = now
        return due

    @property
    def is_idle(self) -> bool:
        in_use = self.generations or self.num_subscribers or self.lock.locked()
        return not (in_use or self._early or self.is_uncertain)

    def state(self) -> SessionState:
        """The session as of `seq`, with the text generated so far."""
        messages = tuple(
            generation.as_stored(record)
            if (generation := self.generations.get(record.message)) and not generation.is_told
            else record
            for record in self.tree
        )
        return SessionState(record=self.record, seq=self.seq, messages=messages)

    def deliver(self, first_seq: int, events: Sequence[AnyEvent], apply: Callable[[], None]) -> None:
        """Apply and publish a stored change, as soon as every one before it has been."""
        if not events:
            apply()
            return
        numbered = [msgspec.structs.replace(event, seq=first_seq + i) for i, event in enumerate(events)]
        self._early[first_seq] = numbered, apply
        self._catch_up()

    def _catch_up(self) -> None:
        while self._early and (first := min(self._early)) <= self.seq + 1:
            events, apply = self._early.pop(first)
            new = [event for event in events if event.seq > self.seq]
            self.seq = max(self.seq, events[-1].seq)
            apply()
            if new:
                self._publish(self.user, self.session, new)

    def reload(self, state: SessionState, missed: Sequence[AnyEvent] | None) -> None:
        """Take over the store's view after an uncertain write, and publish the events it turns out to have made.

        Text is left to its writer, who tries until it knows; what comes after it waits for it. The end of a generation
        is not: its writer needs the lock, which whoever waits for a later event would hold. `missed` is None where the
        store has trimmed them: whoever missed them gets a snapshot when it reconnects.
        """
        if missed is None:
            self.seq = max(self.seq, state.seq)
        for event in missed or ():
            if event.seq > self.seq and not isinstance(event, _TOLD_BY_WRITER):
                self._early.setdefault(event.seq, ([event], partial(self._note_told, event)))
        self.record = state.record
        self.tree = _tree(state)
        self._catch_up()
        self.is_uncertain = False

    def _note_told(self, event: AnyEvent) -> None:
        if isinstance(event, GenerationEnd) and (generation := self.generations.get(event.message)) is not None:
            generation.is_told = True

    def forget_paths(self, messages: Iterable[MessageId]) -> tuple[PathRef, ...]:
        """Take out what the engine holds of messages that are gone, and whatever else has the same handle."""
        gone = tuple(self.paths[message] for message in messages if message in self.paths)
        handles = {(path.epoch, path.handle) for path in gone}
        self.paths = {m: path for m, path in self.paths.items() if (path.epoch, path.handle) not in handles}
        return gone

    def check(self) -> None:
        self.tree.check()
        for message, generation in self.generations.items():
            assert message in self.tree
            assert generation.message == message
        assert all(seq > self.seq for seq in self._early)


class Sessions:
    """The sessions that this process holds, the least recently used idle ones dropped."""

    def __init__(self, store: Store, health: StoreHealth, publish: Publish) -> None:
        self._store = store
        self._health = health
        self._publish = publish
        self._live: OrderedDict[SessionId, LiveSession] = OrderedDict()
        self._loading: dict[SessionId, asyncio.Lock] = {}
        self._subscribers: dict[SessionId, int] = {}
        self.on_reloaded: Callable[[LiveSession], None] = lambda _: None
        """Called when an uncertain write turned out one way or the other."""

    def __iter__(self) -> Iterator[LiveSession]:
        return iter(list(self._live.values()))

    def peek(self, user: UserId, session: SessionId) -> LiveSession | None:
        """The session if it is in memory."""
        live = self._live.get(session)
        return live if live is not None and live.user == user and not live.is_deleted else None

    async def get(self, user: UserId, session: SessionId) -> LiveSession:
        """The session, loaded if need be.

        Raises:
            NotFoundError: it does not exist for this user.
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
        """Forget a deleted session."""
        live.is_deleted = True
        self._live.pop(live.session, None)

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
            StoreUnavailableError: the store is away.
        """
        while True:
            self._health.require()
            live = await self.get(user, session)
            async with live.lock:
                if live.is_uncertain:
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
        """
        try:
            committed = await self._store.commit(change)
        except StoreUnavailableError:
            live.is_uncertain = True
            raise
        if committed.answer is not None:
            return committed.answer
        done = asyncio.Event()

        def apply_and_note() -> None:
            apply()
            done.set()

        live.deliver(committed.first_seq, change.events, apply_and_note)
        await done.wait()
        return None

    async def settle(self) -> None:
        """After the store came back: find out what became of uncertain writes."""
        for live in self:
            if live.is_uncertain:
                async with live.lock:
                    if live.is_uncertain:
                        await self._reload(live)

    # --- inside -------------------------------------------------------------------------------------------------------

    async def _load(self, user: UserId, session: SessionId) -> LiveSession:
        lock = self._loading.setdefault(session, asyncio.Lock())
        try:
            async with lock:
                if (live := self._live.get(session)) is not None:
                    return live
                state = await self._store.load(user, session)
                if (live := self._live.get(session)) is not None:
                    return live  # after a load that failed there may be two at once, and one session has one lock
                if state is None:
                    raise _not_found()
                return self.add(state)
        finally:
            if not lock.locked():
                self._loading.pop(session, None)

    async def _reload(self, live: LiveSession) -> None:
        missed = await self._store.events(live.user, live.session, live.seq)
        state = await self._store.load(live.user, live.session)
        if state is None:
            self.remove(live)
            return
        live.reload(state, missed)
        self.on_reloaded(live)

    def _shrink(self) -> None:
        excess = len(self._live) - MAX_IDLE_SESSIONS
        if excess <= 0:
            return
        for session, live in list(self._live.items())[:-1]:
            if excess <= 0:
                return
            if live.is_idle:
                del self._live[session]
                excess -= 1


def _tree(state: SessionState) -> Tree:
    return Tree(state.messages, leaf=state.record.leaf, root_child=state.record.root_child)


def _not_found() -> NotFoundError:
    return NotFoundError("there is no such session")


def with_tree(
    record: SessionRecord, *, leaf: MessageId | None, root_child: MessageId | None, now: float
) -> SessionRecord:
    """The session's record after its tree changed."""
    return msgspec.structs.replace(record, leaf=leaf, root_child=root_child, updated_at=now)
