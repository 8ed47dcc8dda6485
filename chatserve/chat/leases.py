"""Which sessions this process may change: it takes leases, keeps itself alive in the others' eyes, and inherits what
the dead were generating.

Owns the heartbeat and the judgement of who is dead. What a session is, `Sessions` knows.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import TYPE_CHECKING, Final

from chatserve.chat.store import LeaseLostError, OwnedElsewhereError, Store
from chatserve.chat.workers import BEAT_S, Owner, Standing
from chatserve.errors import NotFoundError, StoreUnavailableError
from chatserve.types import SessionId, UserId

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

log = logging.getLogger(__name__)

CONFIRM_S: Final = 1.5
"""Whoever is silent is looked at again so much later before it counts as dead: when a store that stood still goes on,
everyone has been silent for a moment."""
MOST_STEALS: Final = 3


class Leases:
    """What one process holds, and its place among the others."""

    def __init__(
        self, store: Store, owner: Owner, *, beat_s: float = BEAT_S, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._beat_s = beat_s
        self._monotonic = monotonic
        self._silent_since: dict[Owner, float] = {}
        self._inheriting: asyncio.Task[None] | None = None
        self.owner: Final = owner
        self.take_over: Callable[[UserId, SessionId], Awaitable[None]] = _nothing
        """Called for each unfinished session of a dead process; makes sure that somebody goes on with it."""
        self.on_expelled: Callable[[], None] = lambda: None
        """Called when the others took this process for dead: nothing that it holds is its own any more."""
        self.on_rejoined: Callable[[], None] = lambda: None
        """Called when it has its place again: what nobody took meanwhile is still its own to go on with."""

    async def join(self) -> None:
        """Take the place, and what is known to be left over.

        Raises:
            StoreUnavailableError: the store is away.
        """
        await self._store.workers.join(self.owner)
        await self._sweep()

    async def beat(self) -> None:
        """Stay alive, and look after the others, for ever.

        Raises:
            RuntimeError: another process has taken this one's place.
        """
        is_heard = True
        while True:
            await asyncio.sleep(self._beat_s)
            try:
                standing = await self._store.workers.beat(self.owner)
                if standing is not Standing.ALIVE:
                    self.on_expelled()
                if standing is Standing.GONE:
                    raise RuntimeError(f"another process has the place of {self.owner}")
                if standing is Standing.SILENT:
                    log.warning("the other servers took this one for dead; its conversations are read again")
                    await self._store.workers.join(self.owner)
                    self.on_rejoined()
                is_heard = True
                if self._inheriting is None or self._inheriting.done():
                    self._inheriting = asyncio.create_task(self._sweep_quietly(), name="inheriting")
            except StoreUnavailableError as error:
                self._silent_since.clear()  # while the store stands still all are silent
                if is_heard:  # an outage is one line, however long it is
                    log.info("no heartbeat: %s", error)
                is_heard = False

    async def acquire(self, user: UserId, session: SessionId) -> int:
        """Take the lease of a session; its fence.

        Raises:
            NotFoundError: there is no such session.
            OwnedElsewhereError: a process that lives, or may live, has it.
        """
        await self.note(user, session)
        dead: Owner | None = None
        for _ in range(MOST_STEALS):
            try:
                return (await self._store.acquire(user, session, self.owner, instead_of=dead)).fence
            except OwnedElsewhereError as elsewhere:
                if not await self.is_dead(elsewhere.owner):
                    raise
                dead = elsewhere.owner
        assert dead is not None
        raise OwnedElsewhereError(dead)  # whoever is so quick will have it

    async def note(self, user: UserId, session: SessionId) -> None:
        """Before a lease is taken or a session created: so that whoever inherits from us finds it."""
        await self._store.workers.note(self.owner, user, session)

    async def drop(self, sessions: Iterable[tuple[UserId, SessionId]]) -> None:
        """They are no longer held here. That nobody hears of it costs the heir a look at each."""
        try:
            await self._store.workers.unnote(self.owner, sessions)
        except StoreUnavailableError as error:
            log.debug("leases stay noted: %s", error)

    async def is_dead(self, owner: Owner) -> bool:
        """Whether an owner is gone for good; one that has just fallen silent may not be."""
        (standing,) = await self._store.workers.standings([owner])
        return self._judge(owner, standing)

    async def leave(self, *, is_empty: bool) -> None:
        """Be gone: with nothing that is worth inheriting, or for the others to inherit at once."""
        if self._inheriting is not None:
            self._inheriting.cancel()
            await asyncio.gather(self._inheriting, return_exceptions=True)
        try:
            if is_empty:
                await self._store.workers.forget(self.owner)
            else:
                await self._store.workers.leave(self.owner)
        except StoreUnavailableError as error:
            log.info("the others will notice that this server is gone: %s", error)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _judge(self, owner: Owner, standing: Standing) -> bool:
        if standing is not Standing.SILENT:
            self._silent_since.pop(owner, None)
            return standing is Standing.GONE
        now = self._monotonic()
        return now - self._silent_since.setdefault(owner, now) >= CONFIRM_S

    async def _sweep_quietly(self) -> None:
        try:
            await self._sweep()
        except StoreUnavailableError as error:
            log.info("left to inherit later: %s", error)
        except Exception:  # a bug of ours; the next beat tries again
            log.exception("what the dead were generating could not be looked for")

    async def _sweep(self) -> None:
        others = [owner for owner in await self._store.workers.known() if owner != self.owner]
        if not others:
            return
        for owner, standing in zip(others, await self._store.workers.standings(others), strict=True):
            if self._judge(owner, standing):
                await self._inherit(owner)

    async def _inherit(self, dead: Owner) -> None:
        unfinished = await self._store.unfinished(await self._store.workers.noted(dead))
        random.shuffle(unfinished)  # several may inherit at once, each a part
        num_taken = 0
        for user, session in unfinished:
            try:
                await self.take_over(user, session)
                num_taken += 1
            except (NotFoundError, OwnedElsewhereError, LeaseLostError) as error:
                log.debug("%s was not to be taken over: %s", session, error)
            except StoreUnavailableError:
                raise
            except Exception:  # one that cannot be read must not keep the others from going on
                log.exception("session %s of %s could not be taken over", session, dead)
        await self._store.workers.forget(dead)
        self._silent_since.pop(dead, None)
        if unfinished:
            log.warning("took over %d of %d unfinished conversations of %s", num_taken, len(unfinished), dead)


async def _nothing(user: UserId, session: SessionId) -> None:
    pass
