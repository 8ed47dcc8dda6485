"""The engine as asyncio sees it: commands over a Unix socket, events as one stream.

Connects again by itself, with back-off, for as long as it is open. What was asked of an engine that is gone is gone
with it: the stream says `EngineDown`, and every request submitted before it and not finished is lost. From the moment a
connection breaks until the *consumer* has been told of the next one (its `Hello`), commands raise; so nobody can submit
to the new engine while believing in the old one, and nothing is lost or doubled unnoticed. Imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from typing import TYPE_CHECKING, Final

from chatserve.engine.framing import MalformedFrameError, encode, event_reader
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
    StepOutput,
    Submit,
)
from chatserve.errors import EngineUnavailableError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

    from chatserve.types import RequestId, UserId

_log: Final = logging.getLogger(__name__)

_MAX_EVENTS: Final = 4096
"""Events that wait for the consumer before reading stops; the engine then drops us in the end."""
_FIRST_BACKOFF_S: Final = 0.05
_MOST_BACKOFF_S: Final = 1.0
_READ_BYTES: Final = 256 * 1024


class _Link:
    """One connection, from its `Hello` on."""

    def __init__(self, writer: asyncio.StreamWriter, info: EngineInfo) -> None:
        self.writer = writer
        self.info = info
        self.broken = False


class EngineClient:
    """`connect`, then commands at any time and one consumer of `events`."""

    def __init__(self, socket_path: Path) -> None:
        self._socket_path = socket_path
        self._events: asyncio.Queue[tuple[EngineEvent, _Link] | None] = asyncio.Queue(_MAX_EVENTS)
        self._link: _Link | None = None
        """What commands go to; None while down, and until the consumer knows of the next one."""
        self._greeted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._tags = itertools.count(1)
        self._inspections: dict[int, asyncio.Future[CacheReport]] = {}
        self._drains: list[asyncio.Future[None]] = []
        self._closed = False

    @property
    def info(self) -> EngineInfo | None:
        """The engine that commands go to; None while there is none."""
        return None if self._link is None or self._link.broken else self._link.info

    async def connect(self, timeout_s: float) -> None:
        """Start, and wait for the first engine. After a time-out it goes on trying behind the caller's back.

        Raises:
            EngineUnavailableError: no engine within `timeout_s`.
        """
        assert not self._closed, "a closed client is not opened again"
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="engine-client")
        try:
            async with asyncio.timeout(timeout_s):
                await self._greeted.wait()
        except TimeoutError:
            raise EngineUnavailableError(f"no engine answers on {self._socket_path} within {timeout_s:g} s") from None

    async def close(self) -> None:
        """Leave. The engine cancels what this client had running; `events` ends."""
        if self._closed:
            return
        self._closed = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._break_link()
        while self._events.full():
            self._events.get_nowait()
        self._events.put_nowait(None)

    # --- commands -----------------------------------------------------------------------------------------------------

    def submit(self, submit: Submit) -> None:
        """See `Submit`. Raises `EngineUnavailableError` while down, as all commands do."""
        self._send(submit)

    def cancel(self, request_id: RequestId, keep: int | None = None) -> None:
        """See `Cancel`."""
        self._send(Cancel(request_id, keep))

    def hint(self, hint: Hint) -> None:
        """See `Hint`."""
        self._send(hint)

    def release(
        self, user: UserId, paths: Sequence[PathRef], num_kept_tokens: int = 0, token_ids: tuple[int, ...] = ()
    ) -> None:
        """See `Release`."""
        self._send(Release(user, tuple(paths), num_kept_tokens, token_ids))

    async def inspect(self, *, with_map: bool = False) -> CacheReport:
        """The state of the engine's cache now."""
        tag = next(self._tags)
        future: asyncio.Future[CacheReport] = asyncio.get_running_loop().create_future()
        self._send(Inspect(tag, with_map))
        self._inspections[tag] = future
        try:
            return await future
        finally:
            self._inspections.pop(tag, None)

    async def drain(self) -> None:
        """Have the engine take no new requests, and wait until nothing runs and nothing waits."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._send(Drain())
        self._drains.append(future)
        await future

    def _send(self, command: AnyCommand) -> None:
        link = self._link
        if link is None or link.broken:
            raise EngineUnavailableError("the model's engine is not running; it is being started again")
        link.writer.write(encode(command))

    # --- events -------------------------------------------------------------------------------------------------------

    async def events(self) -> AsyncIterator[EngineEvent]:
        """Everything the engine says, in order, for one consumer. Ends after `close`.

        An `EngineDown` follows the last event of a broken connection, and a `Hello` precedes the first of the next.
        """
        while (item := await self._events.get()) is not None:
            event, link = item
            if isinstance(event, Hello) and not link.broken:
                self._link = link
            yield event

    # --- the connection -----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while True:
            try:
                reader, writer = await asyncio.open_unix_connection(self._socket_path)
            except OSError:
                reader = None
            if reader is not None:
                try:
                    greeted = await self._listen(reader, writer)
                finally:
                    writer.close()
                if greeted:
                    backoff_s = _FIRST_BACKOFF_S
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MOST_BACKOFF_S)

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Read one connection to its end. Returns whether there was an engine behind it."""
        frames = event_reader()
        link: _Link | None = None
        try:
            while data := await reader.read(_READ_BYTES):
                for event in frames.feed(data):
                    if link is None:
                        if not isinstance(event, Hello):
                            raise MalformedFrameError(f"expected Hello first, got {type(event).__name__}")
                        link = _Link(writer, event.info)
                        self._greet(link)
                    self._answer(event)
                    await self._events.put((event, link))
        except OSError as error:
            # One that ends while it loads its model was never there, and says itself why.
            _log.log(logging.DEBUG if link is None else logging.INFO, "the connection to the engine broke: %s", error)
        except MalformedFrameError as error:
            _log.error("what listens on %s is no engine of ours: %s", self._socket_path, error)
        finally:
            if link is not None:
                link.broken = True
                self._break_link()
        if link is None:
            return False
        await self._events.put((EngineDown(), link))
        return True

    def _greet(self, link: _Link) -> None:
        """The first engine is usable at once: nobody can hold an older belief."""
        if not self._greeted.is_set():
            self._greeted.set()
            self._link = link

    def _answer(self, event: EngineEvent) -> None:
        """Resolve what is awaited, here and not in `events`: the consumer itself may be the one who waits."""
        match event:
            case StepOutput(reports=reports):
                for report in reports:
                    future = self._inspections.get(report.inspect_tag)
                    if future is not None and not future.done():
                        future.set_result(report)
            case Drained():
                drains, self._drains = self._drains, []
                for drain in drains:
                    if not drain.done():
                        drain.set_result(None)
            case _:
                pass

    def _break_link(self) -> None:
        """Fail what is awaited of an engine that will not answer any more."""
        self._link = None
        gone = EngineUnavailableError("the model's engine went away before it answered")
        for inspection in self._inspections.values():
            if not inspection.done():
                inspection.set_exception(gone)
        for drain in self._drains:
            if not drain.done():
                drain.set_exception(gone)
        self._inspections.clear()
        self._drains.clear()
