"""Answers that nobody reads: a generation whose session has had no follower on any server for a while is stopped.

Owns the clocks. How many follow a session here it is told; whether somebody follows it elsewhere it asks the store,
once the grace is over and then every few seconds as long as somebody does.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from chatserve.chat.feed import Feed
from chatserve.chat.live_session import LiveSession
from chatserve.errors import StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

LEAST_PAUSE_S: Final = 0.5
MOST_PAUSE_S: Final = 2.0


class Orphans:
    """The sessions with a generation and without a follower here."""

    def __init__(self, feed: Feed, *, grace_s: float, watch: Callable[[asyncio.Task[None]], None]) -> None:
        self._feed = feed
        self._grace_s = grace_s
        self._watch = watch
        self._waiting: dict[LiveSession, asyncio.Task[None]] = {}
        self.stop: Callable[[LiveSession], None] = lambda _: None
        """Called with a session that nobody follows."""

    def subscribers_changed(self, live: LiveSession) -> None:
        """Somebody came or left here, or a generation began."""
        self.forget(live)
        if live.generations and not live.num_subscribers:
            task = self._waiting[live] = asyncio.create_task(self._wait(live), name="orphan grace")
            task.add_done_callback(self._watch)

    def forget(self, live: LiveSession) -> None:
        """Nothing is generated in it any more."""
        if (task := self._waiting.pop(live, None)) is not None:
            task.cancel()

    async def close(self) -> None:
        tasks = list(self._waiting.values())
        self._waiting.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait(self, live: LiveSession) -> None:
        loop = asyncio.get_running_loop()
        pause_s = min(max(self._grace_s, LEAST_PAUSE_S), MOST_PAUSE_S)
        followed_at = loop.time()
        await asyncio.sleep(self._grace_s)
        while True:
            try:
                is_followed = bool(await self._feed.num_followers(live.user, live.session))
            except StoreUnavailableError as error:
                log.debug("nobody knows who follows %s: %s", live.session, error)
                is_followed = True
            if is_followed:
                followed_at = loop.time()
            elif loop.time() - followed_at >= self._grace_s:
                break
            await asyncio.sleep(pause_s)
        if self._waiting.get(live) is asyncio.current_task():
            del self._waiting[live]  # before it is stopped, which would cancel us
        self.stop(live)
