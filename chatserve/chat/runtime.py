"""The parts of the chat service and the tasks that keep them going.

Owns the endless tasks (what the engine says, what the other processes say, the writer of text, heartbeats), and what
the service knows of the health of store and engine. Requests are `service`'s business.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from typing import TYPE_CHECKING, Any, Final

import msgspec

from chatserve.chat.core import Announcement, Core
from chatserve.chat.engine_link import EngineLink
from chatserve.chat.engine_watch import EngineWatch
from chatserve.chat.fair_pool import FairPool
from chatserve.chat.feed import Announced, Letter, Missed, News
from chatserve.chat.following import Following
from chatserve.chat.forgetting import Forgetting
from chatserve.chat.forwarding import Forwarding
from chatserve.chat.generations import Generations
from chatserve.chat.health import StoreHealth
from chatserve.chat.leases import Leases
from chatserve.chat.letters import decode_letter
from chatserve.chat.orphans import Orphans
from chatserve.chat.sessions import Sessions
from chatserve.chat.watched_store import WatchedStore

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from chatserve.chat.dependencies import Dependencies
    from chatserve.types import UserId

log = logging.getLogger(__name__)

_TOKENIZER_THREADS: Final = 2
CLOSE_TIMEOUT_S: Final = 3.0
"""How long a stopping server waits for its requests, and then for the ends of its generations to be stored."""


class Runtime:
    """Builds the parts; `start` and `close` frame their life."""

    def __init__(self, given: Dependencies) -> None:
        self._given = given
        self._on_crash = given.on_crash or _end_process
        self._engine_down_since: float | None = None
        self._engine_told_away = False
        self._patience: asyncio.TimerHandle | None = None
        self.health = StoreHealth(given.store, publish=self._store_health, watch=self._watch, clock=given.clock)
        watched = WatchedStore(given.store, self.health.report_down)
        self.feed = given.store.open_feed(given.owner)
        leases = Leases(watched, given.owner, beat_s=given.beat_s, monotonic=given.monotonic)
        following = Following(watched, self.feed, self.health, publish=given.publish_relayed, break_off=given.break_off)
        sessions = Sessions(watched, self.health, leases, following, given.publish)
        self.forwarding = Forwarding(watched, self.feed, leases, following, sessions)
        link = EngineLink(given.engine, on_up=self._engine_up, on_down=self._engine_down)
        self.engine_watch = EngineWatch(link, silence_s=given.engine_silence_s, on_change=self._tell_engine)
        self.orphans = Orphans(self.feed, grace_s=given.orphan_grace_s, watch=self._watch)
        generations = Generations(
            store=watched,
            sessions=sessions,
            link=link,
            encoder=given.encoder,
            health=self.health,
            orphans=self.orphans,
            resumes=given.resumes,
            watch=self._watch,
            clock=given.clock,
            monotonic=given.monotonic,
        )
        sessions.on_reloaded = generations.adopt
        sessions.on_loaded = generations.inherit
        sessions.tenure.on_lost = generations.lose
        self.core = Core(
            store=watched,
            leases=leases,
            following=following,
            sessions=sessions,
            link=link,
            forgetting=Forgetting(given.engine),
            generations=generations,
            encoder=given.encoder,
            limits=given.limits,
            pool=FairPool(_TOKENIZER_THREADS, "tokenizer"),
            clock=given.clock,
            new_id=given.new_id,
            publish_changed=given.publish_changed,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._settling: set[asyncio.Task[None]] = set()
        self._users: set[UserId] = set()
        """Whose lists somebody here looks at."""

    async def start(self) -> None:
        """Join the others, go on with what the dead left unfinished, then run.

        Raises:
            StoreUnavailableError: the store is away; it may be tried again.
        """
        if not self._tasks:
            # Whoever sees us alive may write to us.
            self.run(self._hear(), "store feed")
        await self.core.leases.join()
        self.run(self.core.leases.beat(), "heartbeat")
        self.run(self.core.link.listen(), "engine events")
        self.run(self.core.generations.text.run(), "text writer")
        self.run(self.engine_watch.run(), "engine watch")

    async def close(self) -> None:
        """Hand over what is being generated, or interrupt it and wait a little for that to be stored, and stop."""
        core = self.core
        await self.forwarding.drain(CLOSE_TIMEOUT_S)
        is_empty = len(core.generations) == 0
        if self._given.resumes:
            core.generations.hand_over()
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await core.generations.close()
            is_empty = len(core.generations) == 0
        core.generations.ends.abandon()
        if self._patience is not None:
            self._patience.cancel()
        for task in (*self._tasks, *self._settling):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._settling, return_exceptions=True)
        await self.orphans.close()
        await core.following.close()
        await self.feed.close()
        if self._tasks:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await core.leases.leave(is_empty=is_empty)
        await self.health.close()
        core.pool.close()

    def follow_user(self, user: UserId) -> None:
        self._users.add(user)
        self._spawn(self.health.persist(lambda: self._follow_user(user)), "follow a user's list")

    def unfollow_user(self, user: UserId) -> None:
        self._users.discard(user)
        self._spawn(self._unfollow_user(user), "unfollow a user's list")

    async def _follow_user(self, user: UserId) -> None:
        if user in self._users:
            await self.feed.follow_user(user)

    async def _unfollow_user(self, user: UserId) -> None:
        if user not in self._users:
            await self.feed.unfollow_user(user)

    def run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Keep something going until the end."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._watch)
        self._tasks.append(task)

    async def _hear(self) -> None:
        """Take in what the other processes do and say."""
        core = self.core
        async for heard in self.feed.heard():
            match heard:
                case News():
                    core.following.take(heard)
                case Announced(user=user, announcement=announcement):
                    changed = msgspec.msgpack.decode(announcement, type=Announcement)
                    if changed.origin != core.leases.owner:
                        self._given.publish_changed(user, changed.session, changed.title, deleted=changed.deleted)
                case Letter(body=body):
                    try:
                        self.forwarding.take(decode_letter(body))
                    except msgspec.MsgspecError as error:
                        log.warning("a letter that makes no sense: %s; do all servers run one version?", error)
                case Missed():
                    core.following.missed()
                    self._spawn(self.health.persist(core.sessions.tenure.check_leases), "check leases")

    # --- health -------------------------------------------------------------------------------------------------------

    def _store_health(self, component: str, since: float | None) -> None:
        self._given.publish_health(component, since)
        if since is None:
            self._spawn(self.health.persist(self.core.sessions.settle), "settle uncertain writes")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._settling.add(task)
        task.add_done_callback(self._settling.discard)
        task.add_done_callback(self._watch)

    def _engine_up(self) -> None:
        self.core.forgetting.engine_came()
        info, least = self.core.link.engine.info, self.core.encoder.min_prompt_tokens
        if info is not None and info.context_tokens <= least:
            # The model's own context, or what the KV cache has room for; --context-tokens was held against it already.
            log.warning(
                "no conversation fits: the engine's context is %d tokens, and the chat template alone takes %d; "
                "is --kv-cache-memory too small?",
                *(info.context_tokens, least),
            )
        if self._engine_down_since is not None:
            self._engine_down_since = None
            assert self._patience is not None
            self._patience.cancel()
            self._tell_engine()

    def _engine_down(self) -> None:
        if self._engine_down_since is None:
            self._engine_down_since = self._given.clock()
            self._patience = asyncio.get_running_loop().call_later(self._given.engine_patience_s, self._engine_lost)
            log.warning("the engine is away; what it was generating goes on when it is back")
            self._tell_engine()

    def _tell_engine(self) -> None:
        """Tell everyone when the engine has gone, or gone silent, or is back."""
        away = self._engine_down_since is not None or self.engine_watch.is_silent
        if away != self._engine_told_away:
            self._engine_told_away = away
            self._given.publish_health("engine", self._given.clock() if away else None)

    def _engine_lost(self) -> None:
        log.error(
            "the engine did not come back in %.0f s; what waited for it is interrupted", self._given.engine_patience_s
        )
        self.core.link.abandon_stranded()

    def _watch(self, task: asyncio.Task[None]) -> None:
        """A task that nothing goes on without must not die in silence."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("%s has crashed", task.get_name(), exc_info=error)
            self._on_crash()


def _end_process() -> None:
    """Half a service would leave answers spinning; after a restart they are marked, and everything works."""
    signal.raise_signal(signal.SIGTERM)
