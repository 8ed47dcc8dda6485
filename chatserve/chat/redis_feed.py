"""`Feed` on Redis or Valkey: one connection of its own that subscribes and reads, and nothing else.

It is no part of the pools, so however long it waits nobody else does, and however busy they are it hears at once. A
connection that says nothing is asked for a sign of life; one that is lost is made again, with all its subscriptions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, Final

from chatserve.chat.feed import Announced, Heard, Letter, Missed
from chatserve.chat.redis_clients import UNREACHED
from chatserve.chat.redis_layout import LETTERS, Keys, read_news
from chatserve.chat.redis_link import RedisLink, one_line
from chatserve.chat.workers import Owner
from chatserve.errors import StoreUnavailableError
from chatserve.types import SessionId, UserId

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

log = logging.getLogger(__name__)

PING_S: Final = 2.0
SILENCE_S: Final = 5.0
"""Without so much as the answer to a ping a connection is given up."""
FIRST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 1.0
CONFIRM_S: Final = 3.0
"""How long a subscription may take."""
_BROKEN_WHILE_SENDING: Final = (*UNREACHED, AttributeError)
"""redis-py finds its writer gone where another task disconnects while it sends."""


class _Channel:
    def __init__(self, read: Callable[[bytes], Heard]) -> None:
        self.read = read
        self.confirmed = asyncio.Event()


class RedisFeed:
    """Implements `Feed`."""

    def __init__(self, link: RedisLink, owner: Owner) -> None:
        self._link = link
        self._channels: dict[bytes, _Channel] = {f"{LETTERS}{owner}".encode(): _Channel(Letter)}
        self._unconfirmed: dict[bytes, int] = {}
        """How often each channel was subscribed to on this connection and not confirmed yet. Only the last confirmation
        counts: what follows an earlier one may be the end of that subscription.
        """
        self._connection: Any = None
        self._closed = asyncio.Event()

    # --- subscriptions ------------------------------------------------------------------------------------------------

    async def follow(self, user: UserId, session: SessionId) -> None:
        """See `Feed.follow`."""
        await self._subscribe(Keys(user).news(session), lambda message: read_news(user, session, message))

    async def unfollow(self, user: UserId, session: SessionId) -> None:
        await self._unsubscribe(Keys(user).news(session))

    async def follow_user(self, user: UserId) -> None:
        await self._subscribe(Keys(user).of("list"), lambda message: Announced(user, message))

    async def unfollow_user(self, user: UserId) -> None:
        await self._unsubscribe(Keys(user).of("list"))

    async def num_followers(self, user: UserId, session: SessionId) -> int:
        """See `Feed.num_followers`."""
        return await self._link.num_subscribers(Keys(user).news(session))

    async def send(self, owner: str, body: bytes) -> bool:
        """See `Feed.send`."""
        channel = f"{LETTERS}{owner}".encode()
        if await self._link.command("send a letter", "PUBLISH", channel, body):
            return True
        # A cluster's node counts those that it tells itself, and hands the letter on to the other nodes.
        return self._link.is_cluster and await self._link.num_subscribers(channel) > 0

    async def _subscribe(self, name: bytes, read: Callable[[bytes], Heard]) -> None:
        channel = self._channels.get(name)
        if channel is None:
            channel = self._channels[name] = _Channel(read)
            self._unconfirmed[name] = self._unconfirmed.get(name, 0) + 1
            await self._say("SUBSCRIBE", name)
        try:
            async with asyncio.timeout(CONFIRM_S):
                await channel.confirmed.wait()
        except TimeoutError:
            raise StoreUnavailableError("the store does not say what others write; try again in a moment") from None

    async def _unsubscribe(self, name: bytes) -> None:
        if (channel := self._channels.pop(name, None)) is not None:
            channel.confirmed.set()  # nobody wants it any more: whoever waits for it has not met a store that is away
            await self._say("UNSUBSCRIBE", name)

    async def _say(self, *words: bytes | str) -> None:
        """Send, if there is a connection: a new one begins with all there is to say."""
        connection = self._connection
        if connection is not None and connection.is_connected:  # it would connect by itself, and hear nothing
            try:
                await connection.send_command(*words)
            except _BROKEN_WHILE_SENDING as error:
                log.info("the feed's connection to the store broke: %s", one_line(error))
                await self._hang_up(connection)

    # --- listening ----------------------------------------------------------------------------------------------------

    async def heard(self) -> AsyncIterator[Heard]:
        """See `Feed.heard`."""
        pause_s, was_connected = FIRST_PAUSE_S, False
        while not self._closed.is_set():
            connection: Any = None
            pinging: asyncio.Task[None] | None = None
            try:
                connection = await self._link.feed_connection(SILENCE_S)
                await connection.connect()
                self._connection = connection  # what is to be followed from here on says so itself
                self._unconfirmed = dict.fromkeys(self._channels, 1)
                await connection.send_command("SUBSCRIBE", *self._channels)
                pinging = asyncio.create_task(self._ping(connection), name="feed pings")
                if was_connected:
                    yield Missed()
                was_connected, pause_s = True, FIRST_PAUSE_S
                while True:
                    if (heard := self._take(await connection.read_response())) is not None:
                        yield heard
            except UNREACHED as error:
                if not self._closed.is_set() and pause_s == FIRST_PAUSE_S:  # an outage is one line, however long it is
                    log.info("the feed's connection to the store broke: %s", one_line(error))
            finally:
                self._connection = None
                for channel in self._channels.values():
                    channel.confirmed.clear()
                if pinging is not None:
                    pinging.cancel()
                if connection is not None:
                    await self._hang_up(connection)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._closed.wait()
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _take(self, reply: list[Any]) -> Heard | None:
        match reply:
            case [b"message", bytes(name), bytes(body)]:
                channel = self._channels.get(name)
                return None if channel is None else channel.read(body)
            case [b"subscribe", bytes(name), _]:
                self._confirm(name)
        return None

    def _confirm(self, name: bytes) -> None:
        if num_left := self._unconfirmed.pop(name) - 1:
            self._unconfirmed[name] = num_left
        elif (channel := self._channels.get(name)) is not None:
            channel.confirmed.set()

    async def _ping(self, connection: Any) -> None:
        with contextlib.suppress(*_BROKEN_WHILE_SENDING):
            while connection.is_connected:
                await connection.send_command("PING", check_health=False)
                await asyncio.sleep(PING_S)

    async def _hang_up(self, connection: Any) -> None:
        with contextlib.suppress(*UNREACHED):
            await connection.disconnect(nowait=True)

    async def close(self) -> None:
        """See `Feed.close`."""
        self._closed.set()
        if self._connection is not None:
            await self._hang_up(self._connection)
