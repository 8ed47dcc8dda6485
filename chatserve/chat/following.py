"""Sessions that somebody here follows and another process may change: their events come from the store's feed.

A relay publishes one session's events in the order of their numbers. It may publish one again, and whoever follows
drops what he has; but it never leaves one out: where one is missing, the store is read. There is a relay for each
session that is followed here and not held here (`Sessions`), and none otherwise, so that nobody is told twice of what
this process writes itself.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final

from chatserve.chat.events import AnyEvent
from chatserve.chat.feed import Feed, News
from chatserve.chat.health import StoreHealth
from chatserve.chat.store import Store
from chatserve.errors import StoreUnavailableError
from chatserve.types import SessionId, UserId

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

    from chatserve.chat.live_session import Publish

    Key = tuple[UserId, SessionId]

log = logging.getLogger(__name__)

CATCH_UP_S: Final = 2.0
"""How long an answer waits for the events that precede it."""


class _Relay:
    def __init__(self, key: Key, seq: int | None) -> None:
        self.key = key
        self.seq = seq
        """Of the last event published; None: nobody here has read the session yet."""
        self.epoch = 0
        """Raised when something may have been missed."""
        self.opening: asyncio.Task[None] | None = None
        self.reading: asyncio.Task[None] | None = None
        self.held: list[News] = []
        self.moved = asyncio.Event()


class Following:
    """All relays of this process."""

    def __init__(
        self,
        store: Store,
        feed: Feed,
        health: StoreHealth,
        *,
        publish: Publish,
        break_off: Callable[[UserId, SessionId], None],
    ) -> None:
        """`break_off` sends a session's followers away to come back: what they are owed is no longer to be had."""
        self._store = store
        self._feed = feed
        self._health = health
        self._publish = publish
        self._break_off = break_off
        self._wanted: set[Key] = set()
        self._relays: dict[Key, _Relay] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_held: Callable[[UserId, SessionId], bool] = lambda _user, _session: False
        """Whether this process holds the session's lease."""
        self.on_answer: Callable[[UserId, str, bytes], None] = lambda _user, _request_id, _answer: None
        """Told of each request that a write answered, before the events of that write are published."""
        self.answer_first: Callable[[UserId, SessionId], Awaitable[None]] = _nothing
        """Answers what was asked of another process and is done, before events are published that were read."""

    def __len__(self) -> int:
        return len(self._relays)

    async def follow(self, user: UserId, session: SessionId) -> None:
        """From now on every event of the session is published here, until `unfollow`.

        Raises:
            StoreUnavailableError: that cannot be promised now.
        """
        key = (user, session)
        self._wanted.add(key)
        if self.is_held(user, session):
            return
        relay = self._relays.get(key)
        if relay is None:
            relay = self._open(key, None)
        assert relay.opening is not None
        try:
            await asyncio.shield(relay.opening)
        except StoreUnavailableError:
            if self._relays.get(key) is relay:
                self._close(relay)
            raise

    def unfollow(self, user: UserId, session: SessionId) -> None:
        key = (user, session)
        self._wanted.discard(key)
        if (relay := self._relays.get(key)) is not None:
            self._close(relay)

    def epoch(self, user: UserId, session: SessionId) -> tuple[object, int] | None:
        """Read it before a session is read from the store, and give it to `note_read` afterwards."""
        relay = self._relays.get((user, session))
        return None if relay is None else (relay, relay.epoch)

    def note_read(self, user: UserId, session: SessionId, seq: int, epoch: tuple[object, int] | None) -> bool:
        """Somebody here knows the session up to `seq`. False: something may have been missed meanwhile; read again."""
        relay = self._relays.get((user, session))
        if epoch != self.epoch(user, session):
            return False
        if relay is not None and relay.seq is None:
            relay.seq = seq
        return True

    def break_off(self, user: UserId, session: SessionId) -> None:
        """Whatever is known here of a session is not to be built on."""
        self.give_way(user, session)
        self._break_off(user, session)

    async def caught_up(self, user: UserId, session: SessionId, seq: int) -> None:
        """Wait a little until events up to `seq` have been published here, if anyone follows."""
        relay = self._relays.get((user, session))
        try:
            async with asyncio.timeout(CATCH_UP_S):
                while relay is not None and relay.seq is not None and relay.seq < seq:
                    relay.moved.clear()
                    await relay.moved.wait()
                    relay = self._relays.get((user, session))
        except TimeoutError:
            log.warning("session %s: the events before an answer are late", session)

    # --- between a relay and a lease ----------------------------------------------------------------------------------

    def published(self, user: UserId, session: SessionId) -> int | None:
        """The number of the last event that the session's relay has published; None where nothing depends on it."""
        relay = self._relays.get((user, session))
        return None if relay is None else relay.seq

    def give_way(self, user: UserId, session: SessionId) -> None:
        """The session is held here: its events are published by whoever writes them."""
        if (relay := self._relays.get((user, session))) is not None:
            self._close(relay)

    def step_in(self, user: UserId, session: SessionId, seq: int) -> None:
        """The session is no longer held here; events up to `seq` have been published."""
        key = (user, session)
        if key in self._wanted and key not in self._relays:
            self._read_on(self._open(key, seq))

    # --- what the feed says -------------------------------------------------------------------------------------------

    def take(self, news: News) -> None:
        relay = self._relays.get((news.user, news.session))
        if relay is None:
            return
        if news.request_id:
            self.on_answer(news.user, news.request_id, news.answer)
        if relay.reading is not None:
            relay.held.append(news)
            return
        first, last = news.events[0].seq, news.events[-1].seq
        if relay.seq is not None and first > relay.seq + 1:
            relay.held.append(news)
            self._read_on(relay)
            return
        relay.seq = max(last, relay.seq or 0)
        self._publish(*relay.key, news.events)
        relay.moved.set()

    def missed(self) -> None:
        """The feed was interrupted: whatever is followed may have gone on."""
        for relay in self._relays.values():
            relay.epoch += 1
            if relay.seq is not None:
                self._read_on(relay)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _open(self, key: Key, seq: int | None) -> _Relay:
        relay = self._relays[key] = _Relay(key, seq)
        relay.opening = self._start(self._feed.follow(*key), "follow a session")
        return relay

    def _close(self, relay: _Relay) -> None:
        del self._relays[relay.key]
        if relay.reading is not None:
            relay.reading.cancel()
        relay.moved.set()
        self._start(self._end(relay), "unfollow a session")

    async def _end(self, relay: _Relay) -> None:
        if relay.opening is not None:
            await asyncio.gather(relay.opening, return_exceptions=True)
        if relay.key not in self._relays:  # else the next one hears by the same channel
            await self._feed.unfollow(*relay.key)

    def _read_on(self, relay: _Relay) -> None:
        if relay.reading is None:
            relay.reading = self._start(self._read(relay), "read what was missed")

    async def _read(self, relay: _Relay) -> None:
        user, session = relay.key
        epoch = None
        while epoch != relay.epoch:
            epoch = relay.epoch
            try:
                events = await self._health.persist(lambda: self._events(relay))
                await self.answer_first(user, session)
                if events is None:
                    log.warning("session %s went on too far to be caught up with", session)
            except Exception:  # what cannot be read now may be read as a whole: whoever follows comes back for that
                log.exception("session %s cannot be caught up with", session)
                events = None
            if events is None:
                relay.seq = None
                self._break_off(user, session)
                break
            if events:
                relay.seq = events[-1].seq
                self._publish(user, session, events)
        relay.reading = None
        relay.moved.set()
        held, relay.held = relay.held, []
        for news in held:
            if self._relays.get(relay.key) is relay:
                self.take(news)

    async def _events(self, relay: _Relay) -> list[AnyEvent] | None:
        if relay.opening is not None and relay.opening.done() and relay.opening.exception() is not None:
            relay.opening = self._start(self._feed.follow(*relay.key), "follow a session")
        if relay.opening is not None:
            await asyncio.shield(relay.opening)
        assert relay.seq is not None
        return await self._store.events(*relay.key, relay.seq)

    def _start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            level = logging.INFO if isinstance(error, StoreUnavailableError) else logging.ERROR
            log.log(level, "%s: %s", task.get_name(), error, exc_info=None if level == logging.INFO else error)


async def _nothing(user: UserId, session: SessionId) -> None:
    pass
