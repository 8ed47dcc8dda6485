"""The web worker ends, whatever is still being sent."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import pytest
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import connect

from chatserve.server import worker

TIMEOUT_S = 20


async def test_an_answer_that_outlives_its_grace_is_cut_off_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(worker, "SHUTDOWN_S", 0)

    async def endless() -> AsyncIterator[bytes]:
        yield b"first"
        await asyncio.Event().wait()

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield

    async def answer(_: object) -> StreamingResponse:
        return StreamingResponse(endless())

    app = Starlette(routes=[Route("/", answer)], lifespan=lifespan)
    stop = asyncio.Event()
    async with asyncio.timeout(TIMEOUT_S):
        with caplog.at_level(logging.INFO), worker.bind("127.0.0.1", 0) as listener:
            port = listener.getsockname()[1]
            serving = asyncio.create_task(worker.serve(app, listener, 65536, stop))
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            await reader.readuntil(b"first")
            stop.set()
            await serving
            assert await reader.read() != b"0\r\n\r\n", "a cut answer must not look whole"
            writer.close()
    assert "/ was cut off by the end of the server" in caplog.text
    assert [record for record in caplog.records if record.exc_info] == []


async def test_a_socket_that_still_sends_after_the_goodbye_finds_its_peer_gone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stop, failures = asyncio.Event(), []

    async def talk(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.send_text("first")
        assert (await websocket.receive())["type"] == "websocket.disconnect", "the server has said goodbye"
        try:
            await websocket.send_text("one more")
        except Exception as error:
            failures.append(type(error))

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield

    app = Starlette(routes=[WebSocketRoute("/ws", talk)], lifespan=lifespan)
    async with asyncio.timeout(TIMEOUT_S):
        with worker.bind("127.0.0.1", 0) as listener:
            serving = asyncio.create_task(worker.serve(app, listener, 65536, stop))
            async with connect(f"ws://127.0.0.1:{listener.getsockname()[1]}/ws", ping_interval=None) as socket:
                assert await socket.recv() == "first"
                stop.set()
                await socket.wait_closed()
                assert socket.close_code == 1001
            await serving
    assert failures == [WebSocketDisconnect]
    assert [record for record in caplog.records if record.exc_info] == []
