"""Who follows which session, from the wish to do so to live events, and the fan-out to them.

Owns subscriptions. Knows nothing of who is connected: it is given sockets, events in order of `seq`, and a reader of
sessions. Everything but `open` is synchronous and never waits.

There is neither gap nor repeat between what is read and what comes live: a subscription is entered before the read and
holds back what is published meanwhile; then it sends what was read, and of what it held back only the later numbers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

from chatserve.chat.events import AnyEvent, SessionDeleted
from chatserve.chat.store import SessionState
from chatserve.server.outbox import Frame, Outbox, encode_event, first_seq, frame_of, merge_events
from chatserve.server.snapshot import snapshot_frames
from chatserve.types import SessionId, UserId

_log = logging.getLogger(__name__)

MAX_SEQ = 2**53
"""No session gets here; a client that names a greater number has made it up."""


class SessionReader(Protocol):
    """`snapshot` and `replay` raise `NotFoundError` for what does not exist or belongs to another user."""

    async def follow(self, user: UserId, session: SessionId) -> None:
        """From now on every event of the session is published to the hub."""
        ...

    async def snapshot(self, user: UserId, session: SessionId) -> SessionState: ...

    async def replay(self, user: UserId, session: SessionId, after: int) -> list[AnyEvent] | None: ...


class Socket:
    """One connection that has said hello. Its own `Connection` reads `outbox`; everything else is the hub's."""

    __slots__ = ("opening", "outbox", "pending", "subscriptions", "user")

    def __init__(self, user: UserId, outbox: Outbox) -> None:
        self.user = user
        self.outbox = outbox
        self.subscriptions: dict[SessionId, Subscription] = {}
        self.pending: dict[SessionId, list[Subscription]] = {}
        self.opening = asyncio.Lock()


class Subscription:
    """One socket following one session: holding back while it reads, then live."""

    __slots__ = ("cancelled", "held", "held_bytes", "live", "seq", "session", "socket")

    def __init__(self, socket: Socket, session: SessionId) -> None:
        self.socket = socket
        self.session = session
        self.cancelled = False
        self.live = False
        self.seq = 0
        self.held: list[tuple[AnyEvent, Frame]] = []
        self.held_bytes = 0


class Topics:
    """Each session that somebody here follows, by its user."""

    def __init__(self) -> None:
        self.on_subscribers: Callable[[SessionId, int], None] = lambda _session, _count: None
        """Told how many subscribers a session has here, whenever that changes."""
        self.on_unfollowed: Callable[[UserId, SessionId], None] = lambda _user, _session: None
        """Told when nobody here follows a session any more, or wants to."""
        self._topics: dict[tuple[UserId, SessionId], dict[Subscription, None]] = {}
        self._counts: dict[SessionId, int] = {}

    # --- subscriptions ------------------------------------------------------------------------------------------------

    def reserve(self, socket: Socket, session: SessionId) -> Subscription:
        """Note the wish to follow a session, so that an `unsubscribe` that comes later also ends what has not begun."""
        subscription = Subscription(socket, session)
        socket.pending.setdefault(session, []).append(subscription)
        return subscription

    async def open(
        self,
        subscription: Subscription,
        reader: SessionReader,
        after: int | None,
        opened: Callable[[], None] = lambda: None,
    ) -> None:
        """Bring a reserved subscription up to date and live.

        `opened` is called once, when the session has been found and before anything of it is sent. After event `after`
        the later ones are replayed; where that is None, or they are gone, a snapshot is sent.

        Raises:
            NotFoundError, StoreUnavailableError: nothing was sent and `opened` was not called.
        """
        socket, session = subscription.socket, subscription.session
        try:
            async with socket.opening:
                frames = await self._read(subscription, reader, after)
                opened()
                if subscription.cancelled:
                    return
                self._establish(subscription)
                for frame in frames:
                    await socket.outbox.room(frame.num_bytes)
                    if subscription.cancelled:
                        return
                    socket.outbox.put(frame)
                self._go_live(subscription)
        finally:
            waiting = socket.pending.get(session, [])
            if subscription in waiting:
                waiting.remove(subscription)
                if not waiting:
                    del socket.pending[session]
            if not subscription.live:
                self._remove(subscription)

    def unsubscribe(self, socket: Socket, session: SessionId) -> None:
        """After this no event of the session is queued for the socket."""
        for subscription in socket.pending.get(session, ()):
            subscription.cancelled = True
            subscription.held.clear()
            self._leave_topic(subscription)
        current = socket.subscriptions.get(session)
        if current is not None:
            self._remove(current)

    def leave_all(self, socket: Socket) -> None:
        """The socket is gone."""
        for session in [*socket.subscriptions, *socket.pending]:
            self.unsubscribe(socket, session)

    async def _read(self, subscription: Subscription, reader: SessionReader, after: int | None) -> Iterator[Frame]:
        user, session = subscription.socket.user, subscription.session
        if not subscription.cancelled:
            self._topics.setdefault((user, session), {})[subscription] = None
            await reader.follow(user, session)
        events = None
        if after is not None and after < MAX_SEQ:
            events = await reader.replay(user, session, after)
        if events is not None:
            assert after is not None
            subscription.seq = events[-1].seq if events else after
            return map(encode_event, merge_events(events))
        state = await reader.snapshot(user, session)
        subscription.seq = state.seq
        return map(frame_of, snapshot_frames(state))

    def _establish(self, subscription: Subscription) -> None:
        """From here on it counts, in place of an older one of the same socket."""
        socket, session = subscription.socket, subscription.session
        older = socket.subscriptions.get(session)
        socket.subscriptions[session] = subscription
        if older is None:
            self._count(session, +1)
        else:
            older.cancelled = True
            self._leave_topic(older)

    def _go_live(self, subscription: Subscription) -> None:
        held, subscription.held, subscription.held_bytes = subscription.held, [], 0
        subscription.live = True
        for event, frame in held:
            self._deliver(subscription, event, frame)

    def _remove(self, subscription: Subscription) -> None:
        socket, session = subscription.socket, subscription.session
        subscription.cancelled = True
        subscription.held.clear()
        self._leave_topic(subscription)
        if socket.subscriptions.get(session) is subscription:
            del socket.subscriptions[session]
            self._count(session, -1)

    def _leave_topic(self, subscription: Subscription) -> None:
        topic = (subscription.socket.user, subscription.session)
        followers = self._topics.get(topic)
        if followers is None:
            return
        followers.pop(subscription, None)
        if not followers:
            del self._topics[topic]
            self.on_unfollowed(*topic)

    def _count(self, session: SessionId, change: int) -> None:
        count = self._counts.get(session, 0) + change
        if count:
            self._counts[session] = count
        else:
            self._counts.pop(session, None)
        self.on_subscribers(session, count)

    # --- fan-out ------------------------------------------------------------------------------------------------------

    def publish(self, user: UserId, session: SessionId, events: Sequence[AnyEvent]) -> None:
        """Send a session's next events, numbered by the store, to all that follow it."""
        followers = self._topics.get((user, session))
        if not followers:
            return
        for event in events:
            frame = encode_event(event)  # once for all
            for subscription in list(followers):
                if subscription.live:
                    self._deliver(subscription, event, frame)
                elif not subscription.cancelled:
                    self._hold(subscription, event, frame)

    def break_off(self, user: UserId, session: SessionId) -> None:
        """What a session's followers are owed cannot be had: they come back and resume, with a snapshot."""
        for subscription in list(self._topics.get((user, session), ())):
            subscription.socket.outbox.end()

    def _hold(self, subscription: Subscription, event: AnyEvent, frame: Frame) -> None:
        subscription.held.append((event, frame))
        subscription.held_bytes += frame.num_bytes
        outbox = subscription.socket.outbox
        if subscription.held_bytes + outbox.num_bytes > outbox.max_bytes:
            outbox.end()

    def _deliver(self, subscription: Subscription, event: AnyEvent, frame: Frame) -> None:
        if subscription.cancelled or event.seq <= subscription.seq:
            return
        outbox = subscription.socket.outbox
        if first_seq(event) > subscription.seq + 1:
            # A bug of ours must not become a hole in somebody's text: the client comes back and resumes.
            _log.error("session %s went from event %d to %d", subscription.session, subscription.seq, event.seq)
            outbox.end()
            return
        subscription.seq = event.seq
        outbox.put(frame)
        if isinstance(event, SessionDeleted):
            self._remove(subscription)

    # --- invariants ---------------------------------------------------------------------------------------------------

    def check(self, sockets: Collection[Socket]) -> None:
        """Assert that topics, subscriptions and counts say the same, and that nobody but `sockets` is in them."""
        counts: dict[SessionId, int] = {}
        for socket in sockets:
            for session, subscription in socket.subscriptions.items():
                assert not subscription.cancelled
                assert subscription in self._topics[socket.user, session]
                counts[session] = counts.get(session, 0) + 1
        assert counts == self._counts
        for (user, session), followers in self._topics.items():
            assert followers
            for subscription in followers:
                assert subscription.socket in sockets
                assert (subscription.socket.user, subscription.session) == (user, session)
                current = subscription.socket.subscriptions.get(session) is subscription
                assert current or subscription in subscription.socket.pending[session]
