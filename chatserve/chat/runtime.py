"""The parts of the chat service and the tasks that keep them going.

Owns the endless tasks (one takes in what the engine says, one writes what it produced, one watches the engine) and what
the service knows of the health of store and engine. Requests are `service`'s business.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from chatserve.chat import recovery
from chatserve.chat.core import Core, PublishChanged
from chatserve.chat.engine_link import EngineClient, EngineLink
from chatserve.chat.engine_watch import EngineWatch
from chatserve.chat.generations import Generations
from chatserve.chat.health import StoreHealth
from chatserve.chat.prompt import PromptEncoder
from chatserve.chat.sessions import Sessions
from chatserve.chat.store import Store
from chatserve.chat.watched_store import WatchedStore
from chatserve.config import Limits

if TYPE_CHECKING:
    from collections.abc import Callable

    from chatserve.chat.sessions import Publish

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S: Final = 3.0
"""How long a stopping server waits for its requests, and then for the ends of its generations to be stored."""


class Runtime:
    """Builds the parts; `start` and `close` frame their life. For the arguments see `ChatService`."""

    def __init__(
        self,
        *,
        store: Store,
        engine: EngineClient,
        encoder: PromptEncoder,
        limits: Limits,
        publish: Publish,
        publish_changed: PublishChanged,
        publish_health: Callable[[str, float | None], None],
        orphan_grace_s: float,
        engine_patience_s: float,
        engine_silence_s: float,
        on_crash: Callable[[], None] | None,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
        new_id: Callable[[], str],
    ) -> None:
        self._publish_health = publish_health
        self._clock = clock
        self._engine_patience_s = engine_patience_s
        self._on_crash = on_crash or _end_process
        self._engine_down_since: float | None = None
        self._engine_told_away = False
        self._patience: asyncio.TimerHandle | None = None
        self.health = StoreHealth(store, publish=self._store_health, watch=self._watch, clock=clock)
        watched = WatchedStore(store, self.health.report_down)
        sessions = Sessions(watched, self.health, publish)
        link = EngineLink(engine, on_up=self._engine_up, on_down=self._engine_down)
        self.engine_watch = EngineWatch(link, silence_s=engine_silence_s, on_change=self._tell_engine)
        generations = Generations(
            store=watched,
            sessions=sessions,
            link=link,
            encoder=encoder,
            health=self.health,
            orphan_grace_s=orphan_grace_s,
            watch=self._watch,
            clock=clock,
            monotonic=monotonic,
        )
        sessions.on_reloaded = generations.adopt
        self.core = Core(
            store=watched,
            sessions=sessions,
            link=link,
            generations=generations,
            encoder=encoder,
            limits=limits,
            executor=ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenizer"),
            clock=clock,
            new_id=new_id,
            publish_changed=publish_changed,
        )
        self._tasks: list[asyncio.Task[None]] = []
        self._settling: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Recover, then run.

        Raises:
            StoreUnavailableError: the store is away.
        """
        await recovery.interrupt_unfinished(self.core.store)
        self._tasks = [
            asyncio.create_task(self.core.link.listen(), name="engine events"),
            asyncio.create_task(self.core.generations.write(), name="text writer"),
            asyncio.create_task(self.engine_watch.run(), name="engine watch"),
        ]
        for task in self._tasks:
            task.add_done_callback(self._watch)

    async def close(self) -> None:
        """Interrupt what is being generated, wait a little for that to be stored, and stop."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self.core.generations.close()
        self.core.generations.abandon()
        if self._patience is not None:
            self._patience.cancel()
        for task in (*self._tasks, *self._settling):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._settling, return_exceptions=True)
        await self.health.close()
        self.core.executor.shutdown(wait=False, cancel_futures=True)

    # --- health -------------------------------------------------------------------------------------------------------

    def _store_health(self, component: str, since: float | None) -> None:
        self._publish_health(component, since)
        if since is None:
            task = asyncio.create_task(self._settle(), name="settle uncertain writes")
            self._settling.add(task)
            task.add_done_callback(self._settling.discard)
            task.add_done_callback(self._watch)

    async def _settle(self) -> None:
        await self.health.persist(self.core.sessions.settle)

    def _engine_up(self) -> None:
        if self._engine_down_since is not None:
            self._engine_down_since = None
            assert self._patience is not None
            self._patience.cancel()
            self._tell_engine()

    def _engine_down(self) -> None:
        if self._engine_down_since is None:
            self._engine_down_since = self._clock()
            self._patience = asyncio.get_running_loop().call_later(self._engine_patience_s, self._engine_lost)
            log.warning("the engine is away; what it was generating goes on when it is back")
            self._tell_engine()

    def _tell_engine(self) -> None:
        """Tell everyone when the engine has gone, or gone silent, or is back."""
        away = self._engine_down_since is not None or self.engine_watch.is_silent
        if away != self._engine_told_away:
            self._engine_told_away = away
            self._publish_health("engine", self._clock() if away else None)

    def _engine_lost(self) -> None:
        log.error("the engine did not come back in %.0f s; what waited for it is interrupted", self._engine_patience_s)
        self.core.link.abandon_stranded()

    def _watch(self, task: asyncio.Task[None]) -> None:
        """A task that nothing goes on without must not die in silence."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.critical("%s has crashed", task.get_name(), exc_info=error)
            self._on_crash()


def _end_process() -> None:
    """Half a service would leave answers spinning; after a restart they are marked, and everything works."""
    signal.raise_signal(signal.SIGTERM)
