"""What every connection and route of one server shares, passed down rather than fetched."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from chatserve import __version__
from chatserve.config import ServeSettings
from chatserve.engine.messages import EngineInfo
from chatserve.server.auth import Authenticator
from chatserve.server.hub import Hub
from chatserve.server.metrics import Metrics

if TYPE_CHECKING:
    from chatserve.chat.service import ChatService
    from chatserve.chat.store import Store
    from chatserve.engine.client import EngineClient

_log = logging.getLogger(__name__)

SERVER_NAME: Final = f"chatserve/{__version__}"


class Background:
    """Tasks that outlive the connection that began them: a request, once taken, is carried out.

    A cancelled command could leave its reply on a shared connection to the store, for somebody else to read.
    """

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    async def finish(self, timeout_s: float) -> None:
        """Wait for all, then give up on those that are left."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=timeout_s)
            for task in late:
                task.cancel()

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("%s failed", task.get_name(), exc_info=error)


@dataclass(slots=True)
class Context:
    settings: ServeSettings
    authenticator: Authenticator
    hub: Hub
    metrics: Metrics
    store: Store
    engine: EngineClient
    service: ChatService
    background: Background = field(default_factory=Background)
    last_info: EngineInfo | None = None
    started_at: int = field(default_factory=lambda: int(time.time()))

    def engine_info(self) -> EngineInfo | None:
        """What the engine says of itself, or what it last said."""
        if self.engine.info is not None:
            self.last_info = self.engine.info
        return self.last_info
