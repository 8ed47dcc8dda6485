"""A Unix-socket proxy in front of a store, for what goes wrong between a client and a server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote


class Proxy:
    """`async with Proxy(upstream, path) as proxy:`; then set what it does to the bytes that pass.

    `delay_s`: every reply comes this much later. `lose_replies`: so many next replies are thrown away with their
    connection, after the server has done the work. `say_instead`: answers to give without asking the server. While
    `requests_pass` or `replies_pass` is not set, what goes that way waits.
    """

    def __init__(self, upstream: Path, path: Path) -> None:
        self._upstream = upstream
        self._path = path
        self._server: asyncio.Server | None = None
        self._pairs: set[asyncio.Task[None]] = set()
        self._handlers: set[asyncio.Task[None]] = set()
        self.delay_s = 0.0
        self.lose_replies = 0
        self.say_instead: list[bytes] = []
        self.requests_pass = asyncio.Event()
        self.requests_pass.set()
        self.replies_pass = asyncio.Event()
        self.replies_pass.set()
        self.num_connections = 0
        self.num_ignored = 0
        self._era = 0

    @property
    def url(self) -> str:
        return f"unix://{quote(str(self._path))}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, self._path)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        if self._handlers:
            await asyncio.wait(self._handlers)
        await self._server.wait_closed()

    def cut(self) -> None:
        """Break every connection."""
        for task in self._pairs:
            task.cancel()

    def stall(self) -> None:
        """Let the connections that there are now fall silent, without an end."""
        self._era += 1

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handler = asyncio.current_task()
        assert handler is not None
        self._handlers.add(handler)
        handler.add_done_callback(self._handlers.discard)
        self.num_connections += 1
        era = self._era
        up_reader, up_writer = await asyncio.open_unix_connection(self._upstream)

        async def request(data: bytes) -> None:
            await self.requests_pass.wait()
            if era < self._era:
                self.num_ignored += 1
                return
            if self.say_instead:
                writer.write(self.say_instead.pop(0))
            else:
                up_writer.write(data)
                await up_writer.drain()

        async def reply(data: bytes) -> None:
            if self.lose_replies:
                self.lose_replies -= 1
                raise ConnectionResetError
            await self.replies_pass.wait()
            await asyncio.sleep(self.delay_s)
            writer.write(data)
            await writer.drain()

        tasks = {asyncio.create_task(_copy(reader, request)), asyncio.create_task(_copy(up_reader, reply))}
        self._pairs |= tasks
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._pairs -= tasks
        for end in (writer, up_writer):
            end.close()
            with contextlib.suppress(OSError):
                await end.wait_closed()


async def _copy(reader: asyncio.StreamReader, write: Callable[[bytes], Awaitable[None]]) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            await write(data)
