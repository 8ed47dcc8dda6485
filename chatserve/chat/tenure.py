"""How a session ceases to be this process's, and may come back: leases that are lost, doubted, given up and taken anew.

Owns what is known of leases that are no longer ours: under whose fence something may still be on its way, and what
nobody may have gone on with. What is in memory is `sessions`' business, and how a lease is taken that of `leases`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from chatserve.chat.store import Lease, LeaseLostError, OwnedElsewhereError, Store
from chatserve.errors import NotFoundError
from chatserve.types import SessionId, UserId

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from chatserve.chat.following import Following
    from chatserve.chat.health import StoreHealth
    from chatserve.chat.leases import Leases
    from chatserve.chat.live_session import LiveSession
    from chatserve.chat.sessions import Sessions

log = logging.getLogger(__name__)


class Tenure:
    """Of the sessions that `sessions` has in memory."""

    def __init__(
        self, store: Store, health: StoreHealth, leases: Leases, following: Following, sessions: Sessions
    ) -> None:
        self._store = store
        self._health = health
        self._leases = leases
        self._following = following
        self._sessions = sessions
        self._tasks: set[asyncio.Task[None]] = set()
        self._expelled: list[LiveSession] = []
        """Lost with answers that were being generated, and perhaps taken over by nobody."""
        self._spent: dict[SessionId, tuple[LiveSession, int]] = {}
        """Under whose fence something may still be on its way, and up to which number events were shown that the store
        has lost. It is given back before the session is loaded again, whoever asks for that.
        """
        self.on_lost: Callable[[LiveSession], None] = lambda _: None
        """Called when a lease is another's."""
        leases.on_expelled = self.lose_all
        leases.on_rejoined = self.take_back

    # --- lost ---------------------------------------------------------------------------------------------------------

    def lose(self, user: UserId, session: SessionId) -> None:
        """The lease is another's, if it was ours."""
        if (live := self._sessions.peek(user, session)) is not None:
            self._sessions.forget(live)
            live.lose()
            log.warning("session %s was taken over by another server", session)
            self.on_lost(live)
            self._following.step_in(user, session, live.seq)
            self.drop([live])

    def doubt(self, user: UserId, session: SessionId) -> None:
        """The lease is said to be another's. That may be long ago: it may have been given back and be ours anew."""
        if (live := self._sessions.peek(user, session)) is not None:
            self._start(self._health.persist(partial(self.check_lease, live)))

    def lose_all(self) -> None:
        """The others took this process for dead, and each lease may be another's."""
        for live in self._sessions:
            if live.generations:
                self._expelled.append(live)
                self._spent[live.session] = (live, 0)
            self.lose(live.user, live.session)

    def take_back(self) -> None:
        """Go on with what was lost by `lose_all` and is nobody else's: an heir goes on with what it finds noted, and
        something may have begun after it looked.
        """
        expelled, self._expelled = self._expelled, []
        for live in expelled:
            self._start(self._health.persist(partial(self._take_back, live)))

    def read_again(self, live: LiveSession, *, lost_up_to: int = 0) -> None:
        """What the store has of a session that is ours is not what is in memory: go on with what it has, under another
        fence, so that what is on its way is not written among what comes now.
        """
        if self._sessions.peek(live.user, live.session) is live:
            self._spent[live.session] = (live, lost_up_to)
            self.lose(live.user, live.session)
            self._start(self._health.persist(partial(self._take_back, live)))

    async def give_up(self, user: UserId, session: SessionId) -> bool:
        """Let another process have a session, unless something is going on in it or somebody here follows it.

        Raises:
            StoreUnavailableError: that cannot be done now.
        """
        live = self._sessions.peek(user, session)
        if live is not None and not live.is_idle:
            return False
        fence = live.fence if live is not None else await self._leases.acquire(user, session)
        if live is not None:
            self._sessions.forget(live)
            live.lose()  # whoever comes to hold its lock finds it gone
            self._following.step_in(user, session, live.seq)
        await self._store.release(user, session, fence)
        await self._leases.drop([(user, session)])
        return True

    async def check_lease(self, live: LiveSession) -> None:
        """Find out whether a lease is still ours, and whether the store still has what it had.

        A replica that became the primary may lack the last writes. Then what is in memory is not the truth, and what is
        on its way must not be written: the session is read again, under another fence, and its followers start afresh.
        """
        user, session = live.user, live.session
        lease: Lease | None
        try:
            lease = await self._store.acquire(user, session, self._leases.owner)
        except (OwnedElsewhereError, NotFoundError):
            lease = None
        if self._sessions.peek(user, session) is not live:
            return  # lost meanwhile; what is in memory now has a lease of its own
        if lease is None or lease.fence != live.fence:
            self.lose(user, session)
        elif lease.seq < live.seq:
            log.error("session %s: the store has lost events %d to %d", session, lease.seq + 1, live.seq)
            self.read_again(live, lost_up_to=live.seq)
            self._following.break_off(user, session)

    async def check_leases(self) -> None:
        """After the feed was interrupted: what is in memory must still be ours, and the truth."""
        for live in self._sessions:
            if not live.is_lost:
                await self.check_lease(live)

    def drop(self, dropped: Sequence[LiveSession]) -> None:
        """They are no longer in memory. A lease that nobody asks for stays noted as ours and costs nothing."""
        self._start(self._leases.drop([(live.user, live.session) for live in dropped]))

    # --- taken anew ---------------------------------------------------------------------------------------------------

    async def give_back(self, session: SessionId) -> None:
        """Before the session is loaded again: nothing of an earlier lease of ours is written from now on."""
        if (spent := self._spent.get(session)) is not None:
            lost, lost_up_to = spent
            await self._store.release(lost.user, session, lost.fence, lost_up_to=lost_up_to)
            if self._spent.get(session) is spent:
                del self._spent[session]

    async def _take_back(self, lost: LiveSession) -> None:
        with contextlib.suppress(NotFoundError, OwnedElsewhereError, LeaseLostError):
            await self._sessions.get(lost.user, lost.session)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
