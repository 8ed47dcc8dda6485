"""Clients that are slow, silent, too large or too many: closed with a code, and nobody else notices."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
import websockets
from websockets.asyncio.client import connect

from chatserve.config import Limits
from chatserve.server import connection, protocol
from chatserve.types import SessionId, UserId
from tests.blackbox.client import ChatClient
from tests.server.bare import HELLO, UPGRADE, close_code, raw
from tests.server.harness import Server, running_server


async def test_a_client_that_never_reads_is_closed_with_4008_and_nobody_else_notices() -> None:
    async with (
        running_server(max_socket_queue_bytes=100_000) as server,
        ChatClient(server.ws_url) as client,
    ):
        session, _ = await client.started_session()
        slow = await connect(server.ws_url, max_size=None, max_queue=1, ping_interval=None)
        await slow.send(json.dumps(HELLO))
        await slow.send(json.dumps({"type": "session.open", "id": "1", "session": session}))
        hub = server.context.hub
        while json.loads(await slow.recv())["type"] != "ack":
            pass
        # Its kernel buffers are filled by frames that cannot melt into each other.
        index = 0
        while hub.count_sockets(UserId("local")) == 2:
            index += 1
            assert index < 1000, "the slow client was never closed"
            hub.publish_changed(UserId("local"), SessionId("x"), "t" * 60_000, deleted=False)
            assert all(socket.outbox.num_bytes <= 100_000 for socket in hub.sockets())
            await client.request("session.list")
        assert client.close_code is None
        assert sum(f["type"] == "sessions.changed" for f in client.frames) >= index
        await client.turn(session, "hello", max_tokens=5)
        assert await close_code(slow) == 4008


async def test_a_client_that_never_hangs_up_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chatserve.server.sockets.GOODBYE_TIMEOUT_S", 0.1)
    async with running_server() as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(UPGRADE)
        assert b"101" in await reader.readuntil(b"\r\n\r\n")
        writer.write(b"\x81\x8f\x00\x00\x00\x00" + b'{"type":"ping"}')
        close = await reader.readexactly(4)
        assert (close[0], int.from_bytes(close[2:4])) == (0x88, 4000)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await asyncio.wait_for(reader.readexactly(1 << 20), 5)
        writer.close()


async def test_a_silent_client_is_closed_with_4008(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "PING_INTERVAL_S", 0.05)
    monkeypatch.setattr(protocol, "PONG_TIMEOUT_S", 0.1)
    monkeypatch.setattr(protocol, "HELLO_TIMEOUT_S", 0.05)
    async with running_server() as server, ChatClient(server.ws_url) as lively:
        silent = await raw(server, HELLO)
        assert await close_code(silent) == 4008
        await lively.until(lambda: sum(f["type"] == "ping" for f in lively.frames) >= 4)
        mute = await raw(server)
        await asyncio.wait_for(mute.wait_closed(), 5)
        assert mute.close_code == 4000


async def test_a_server_that_was_busy_itself_blames_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "PING_INTERVAL_S", 0.05)
    monkeypatch.setattr(protocol, "PONG_TIMEOUT_S", 0.2)
    monkeypatch.setattr(connection, "STALL_S", 0.2)
    async with running_server() as server:
        client = await raw(server, HELLO)
        while json.loads(await client.recv())["type"] != "ping":
            pass
        await client.send('{"type":"pong"}')
        loop = asyncio.get_running_loop()
        time = loop.time
        monkeypatch.setattr(loop, "time", lambda: time() + 5)  # seconds in which it came to nothing
        assert json.loads(await client.recv())["type"] == "ping"
        await client.close()


@pytest.mark.parametrize("factor", [1, 8])
async def test_a_frame_over_the_limit_closes_with_1009_that_the_client_gets_to_see(server: Server, factor: int) -> None:
    socket = await raw(server, HELLO)
    limit = server.settings.serve.limits.max_frame_bytes
    with contextlib.suppress(websockets.ConnectionClosed):
        await socket.send("x" * (limit * factor + 1))
    assert await close_code(socket) == 1009


async def test_a_frame_at_the_limit_and_one_in_pieces_are_taken(server: Server) -> None:
    socket = await raw(server, HELLO)
    assert json.loads(await socket.recv())["type"] == "welcome"
    limit = server.settings.serve.limits.max_frame_bytes
    ping = '{"type":"ping","pad":"%s"}'
    await socket.send(ping % ("x" * (limit - len(ping) + 2)))
    assert json.loads(await socket.recv()) == {"type": "pong"}
    await socket.send(["{", '"type":', '"ping"}'])
    assert json.loads(await socket.recv()) == {"type": "pong"}
    await socket.send(b'{"type":"ping"}')
    assert json.loads(await socket.recv())["code"] == "bad_frame"
    await socket.close()


async def test_text_that_is_no_utf8_closes_with_1007_as_websockets_demand(server: Server) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(UPGRADE)
    assert b"101" in await reader.readuntil(b"\r\n\r\n")
    writer.write(b"\x81\x81\x00\x00\x00\x00\xff")
    close = await asyncio.wait_for(reader.readexactly(4), 5)
    assert (close[0], int.from_bytes(close[2:4])) == (0x88, 1007)
    writer.close()
    async with ChatClient(server.ws_url) as client:
        assert await client.create()


async def test_too_many_connections_of_one_user_are_closed_with_4029() -> None:
    async with (
        running_server(limits=Limits(max_connections_per_user=2), tokens={"a": "ada", "b": "bob"}) as server,
        ChatClient(server.ws_url, token="a"),
        ChatClient(server.ws_url, token="a") as second,
    ):
        third = ChatClient(server.ws_url, token="a")
        await third.open()
        await third.send(HELLO)
        assert await third.closed() == 4029
        async with ChatClient(server.ws_url, token="b"):
            pass
        await second.close()
        async with ChatClient(server.ws_url, token="a"):
            pass


async def test_nothing_is_left_of_connections_that_came_and_went(server: Server) -> None:
    async with ChatClient(server.ws_url) as client:
        session, _ = await client.started_session()
        before = asyncio.all_tasks()
        for index in range(120):
            socket = await raw(server, HELLO, {"type": "session.open", "id": "1", "session": session})
            if index % 3:
                await socket.recv()
            if index % 2:
                socket.transport.abort()
            else:
                await socket.close()
        while theirs := asyncio.all_tasks() - before:
            _, left = await asyncio.wait(theirs, timeout=10)
            assert not left
        hub = server.context.hub
        assert len(list(hub.sockets())) == 1
        hub.check()
