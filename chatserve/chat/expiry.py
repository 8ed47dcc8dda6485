"""Sessions that nobody has changed for long are deleted, where the operator wants it.

Every process looks through all of them now and then, and deletes those that are free or its own: so each is deleted by
whoever holds it, and its followers are told as of any deletion.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from chatserve.chat.session_requests import SessionRequests
from chatserve.chat.store import LeaseLostError, OwnedElsewhereError, Store
from chatserve.errors import NotFoundError, StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

FIRST_AFTER_S: Final = 60.0
EVERY_S: Final = 3600.0


class Expiry:
    """Deletes what was last changed longer than `age_s` ago."""

    def __init__(self, store: Store, sessions: SessionRequests, *, age_s: float, clock: Callable[[], float]) -> None:
        assert age_s > 0
        self._store = store
        self._sessions = sessions
        self._age_s = age_s
        self._clock = clock

    async def run(self) -> None:
        """Now and then, for ever."""
        await asyncio.sleep(FIRST_AFTER_S)
        while True:
            try:
                await self.once()
            except StoreUnavailableError as error:
                log.info("old conversations are deleted later: %s", error)
            await asyncio.sleep(EVERY_S)

    async def once(self) -> int:
        """Go through all sessions; how many were deleted."""
        before = self._clock() - self._age_s
        num_deleted = 0
        async for user, session in self._store.untouched(before):
            try:
                num_deleted += await self._sessions.expire(user, session, before)
            except (NotFoundError, OwnedElsewhereError, LeaseLostError) as error:
                log.debug("%s is left to others: %s", session, error)
        if num_deleted:
            log.info("deleted %d conversations that were not changed for %.1f days", num_deleted, self._age_s / 86400)
        return num_deleted
