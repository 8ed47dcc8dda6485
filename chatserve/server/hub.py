"""Who is connected, and what all of a user's sockets, or all there are, are told.

Owns sockets; `topics` has who of them follows which session. Knows nothing of frames coming in, of HTTP, or of how a
session works. Nothing here waits, so one slow socket holds up nobody: what it is owed piles up in its outbox, and past
the bound it is ended.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from msgspec import UNSET

from chatserve.server.frames import Degraded, Recovered, SessionsChanged
from chatserve.server.outbox import Outbox, encode
from chatserve.server.topics import Socket, Topics
from chatserve.types import SessionId, UserId


class Hub:
    """Sockets by user."""

    def __init__(self) -> None:
        self.topics: Final = Topics()
        self.on_user_came: Callable[[UserId], None] = lambda _user: None
        self.on_user_left: Callable[[UserId], None] = lambda _user: None
        self._sockets: dict[UserId, set[Socket]] = {}
        self._degraded: dict[str, float] = {}

    # --- sockets ------------------------------------------------------------------------------------------------------

    def attach(self, user: UserId, outbox: Outbox) -> Socket:
        socket = Socket(user, outbox)
        if user not in self._sockets:
            self._sockets[user] = set()
            self.on_user_came(user)
        self._sockets[user].add(socket)
        return socket

    def detach(self, socket: Socket) -> None:
        self.topics.leave_all(socket)
        sockets = self._sockets[socket.user]
        sockets.discard(socket)
        if not sockets:
            del self._sockets[socket.user]
            self.on_user_left(socket.user)

    def count_sockets(self, user: UserId) -> int:
        return len(self._sockets.get(user, ()))

    def sockets(self) -> Iterator[Socket]:
        for sockets in self._sockets.values():
            yield from sockets

    def send_health(self, socket: Socket) -> None:
        """Tell a new socket what is degraded already."""
        for component, since in self._degraded.items():
            socket.outbox.put(encode(Degraded(component=component, since=since)))

    # --- what concerns no session alone -------------------------------------------------------------------------------

    def publish_changed(self, user: UserId, session: SessionId, title: str | None, *, deleted: bool) -> None:
        sockets = self._sockets.get(user)
        if not sockets:
            return
        changed = SessionsChanged(
            session=session,
            title=UNSET if title is None else title,
            deleted=True if deleted else UNSET,
        )
        frame = encode(changed)
        for socket in sockets:
            socket.outbox.put(frame)

    def publish_health(self, component: str, since: float | None) -> None:
        """Something that the server needs went away at `since` (seconds since the epoch), or is back (None)."""
        if since is None:
            if self._degraded.pop(component, None) is None:
                return
            frame = encode(Recovered(component=component))
        else:
            self._degraded[component] = since
            frame = encode(Degraded(component=component, since=since))
        for socket in self.sockets():
            socket.outbox.put(frame)

    def check(self) -> None:
        """Assert that what is followed, and by whom, is told alike everywhere, and that nobody gone is in it."""
        sockets = set(self.sockets())
        self.topics.check(sockets)
        for socket in sockets:
            socket.outbox.check()
