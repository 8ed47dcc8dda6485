"""`EngineClient`'s methods around an engine in the same process, stepped by the event loop.

For tests of the layers above: no process, no socket, no time. `kill` and `revive` play the death of an engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence

from chatserve.engine.engine import Engine
from chatserve.engine.messages import (
    AnyCommand,
    CacheReport,
    Cancel,
    Drain,
    Drained,
    EngineDown,
    EngineEvent,
    EngineInfo,
    Hello,
    Hint,
    Inspect,
    PathRef,
    Release,
    Submit,
)
from chatserve.errors import EngineUnavailableError
from chatserve.types import RequestId, UserId


class InlineEngineClient:
    """Steps `engine` whenever it has work; `pause` and `resume` hold it between steps."""

    def __init__(self, engine: Engine | None) -> None:
        self.engine = engine
        self._known = asyncio.Event()
        """Whether the consumer knows of this engine, as `EngineClient` wants it."""
        if engine is not None:
            self._known.set()
        self._events: asyncio.Queue[tuple[EngineEvent, Engine | None] | None] = asyncio.Queue()
        self._work = asyncio.Event()
        self._running = asyncio.Event()
        self._running.set()
        self._responding = asyncio.Event()
        self._responding.set()
        self._task: asyncio.Task[None] | None = None
        self._tags = itertools.count(1)
        self._drains: list[asyncio.Future[None]] = []

    @property
    def info(self) -> EngineInfo | None:
        return self.engine.info if self.engine is not None and self._known.is_set() else None

    async def connect(self, timeout_s: float = 1.0) -> None:
        if self.engine is None:
            raise EngineUnavailableError("no engine")
        if self._task is None:
            self._events.put_nowait((Hello(self.engine.info), self.engine))
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        self._events.put_nowait(None)

    def submit(self, submit: Submit) -> None:
        self._send(submit)

    def cancel(self, request_id: RequestId, keep: int | None = None) -> None:
        self._send(Cancel(request_id, keep))

    def hint(self, hint: Hint) -> None:
        self._send(hint)

    def release(
        self, user: UserId, paths: Sequence[PathRef], num_kept_tokens: int = 0, token_ids: tuple[int, ...] = ()
    ) -> None:
        self._send(Release(user, tuple(paths), num_kept_tokens, token_ids))

    async def inspect(self, *, with_map: bool = False) -> CacheReport:
        engine = self._up()
        await self._responding.wait()
        return engine.report(Inspect(next(self._tags), with_map))

    async def drain(self) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._send(Drain())
        self._drains.append(future)
        await future

    async def events(self) -> AsyncIterator[EngineEvent]:
        while (item := await self._events.get()) is not None:
            event, engine = item
            if isinstance(event, Hello) and engine is self.engine:
                self._known.set()
            yield event

    # --- what a test may do -------------------------------------------------------------------------------------------

    def pause(self) -> None:
        """No step begins until `resume`."""
        self._running.clear()

    def resume(self) -> None:
        self._running.set()

    def hang(self) -> None:
        """A step takes for ever: nobody is answered any more."""
        self.pause()
        self._responding.clear()

    def unhang(self) -> None:
        self._responding.set()
        self.resume()

    def kill(self) -> None:
        """The engine dies, and with it all that it had to say."""
        assert self.engine is not None
        self.engine = None
        self._known.clear()
        self._events.put_nowait((EngineDown(), None))
        for drain in self._drains:
            if not drain.done():
                drain.set_exception(EngineUnavailableError("killed"))
        self._drains.clear()

    async def taken(self) -> None:
        """Until the consumer has been told of the engine that is there, and may talk to it."""
        await self._known.wait()

    def revive(self, engine: Engine) -> None:
        """A new engine, of another epoch, takes its place."""
        assert self.engine is None
        self.engine = engine
        self._events.put_nowait((Hello(engine.info), engine))
        self._work.set()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _up(self) -> Engine:
        if self.engine is None or not self._known.is_set():
            raise EngineUnavailableError("down")
        return self.engine

    def _send(self, command: AnyCommand) -> None:
        self._up().handle(command)
        self._work.set()

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            await self._running.wait()
            engine = self.engine
            if engine is None or not engine.has_work:
                self._work.clear()
                if engine is not None and engine.is_drained and self._drains:
                    self._events.put_nowait((Drained(), engine))
                    for drain in self._drains:
                        if not drain.done():
                            drain.set_result(None)
                    self._drains.clear()
                continue
            output = engine.step()
            if output is not None:
                self._events.put_nowait((output, engine))
            await asyncio.sleep(0)
