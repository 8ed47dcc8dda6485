"""Real sockets: order, resuming, slow and silent clients, limits, going away."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import websockets
from websockets.asyncio.client import connect

from chatserve.config import Limits
from chatserve.errors import NotFoundError
from chatserve.server import connection, protocol
from chatserve.types import SessionId, UserId
from tests.blackbox.client import ChatClient, Frame, Mirror, RequestFailedError
from tests.fakes.memory_store import MemoryStore
from tests.server.harness import Server, embedded_store, running_server


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with running_server() as running:
        yield running


async def raw(server: Server, *frames: object) -> Any:
    """A bare socket, for what the strict client would not do."""
    socket = await connect(server.ws_url, max_size=None, ping_interval=None)
    for frame in frames:
        await socket.send(json.dumps(frame))
    return socket


async def close_code(socket: Any) -> int | None:
    """Read to the end, and what the server said there."""
    async with asyncio.timeout(30):
        with contextlib.suppress(websockets.ConnectionClosed):
            while True:
                await socket.recv()
    code: int | None = socket.close_code
    return code


UPGRADE = (
    b"GET /ws HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
HELLO = {"type": "hello", "protocol": "chat.v1"}


async def test_the_subprotocol_is_agreed_on(server: Server) -> None:
    async with ChatClient(server.ws_url) as client:
        assert client.socket.subprotocol == "chat.v1"


async def test_every_request_is_answered_once_and_by_its_id_however_many_are_under_way(server: Server) -> None:
    async with ChatClient(server.ws_url) as client:
        answers = [await client.begin("session.create", title=str(index)) for index in range(600)]
        sessions = {(await answer)["session"] for answer in answers}
        assert len(sessions) == 600
        assert not client._answers


async def test_an_error_names_its_request_and_the_socket_goes_on(server: Server) -> None:
    async with ChatClient(server.ws_url) as client:
        session, _ = await client.started_session()
        for kind, fields, code in (
            ("session.open", {"session": "none"}, "not_found"),
            ("message.send", {"session": session, "parent": "none", "text": "x"}, "not_found"),
            ("message.send", {"session": session, "parent": None, "text": "x", "params": {"top_p": 7}}, "bad_params"),
            ("message.send", {"session": session, "parent": None, "text": "x" * 300_000}, "too_large"),
        ):
            with pytest.raises(RequestFailedError, match=code) as failed:
                await client.request(kind, **fields)
            assert failed.value.frame["session"] == fields["session"]
            assert failed.value.frame["retryable"] is False
        await client.turn(session, "still here", max_tokens=2)


async def test_all_tabs_of_a_user_see_the_same_session(server: Server) -> None:
    async with ChatClient(server.ws_url) as one, ChatClient(server.ws_url) as two:
        session, mirror = await one.started_session(title="shared")
        other = await two.watch(session)
        message, reply = await one.turn(session, "hello", max_tokens=20)
        await two.ended(session, reply)
        assert other.tree() == mirror.tree()
        await two.request("session.update", session=session, title="renamed")
        await one.until(lambda: mirror.title == "renamed")
        await one.until(
            lambda: any(f["type"] == "sessions.changed" and f.get("title") == "renamed" for f in one.frames)
        )
        await one.request("message.delete", session=session, message=message)
        await two.until(lambda: not other.messages)


async def test_after_the_ack_of_a_close_no_event_of_the_session_follows(server: Server) -> None:
    async with ChatClient(server.ws_url) as one, ChatClient(server.ws_url) as two:
        session, _ = await one.started_session()
        await two.watch(session)
        _, reply = await one.say(session, "hello", max_tokens=200)
        await one.until(lambda: any(f["type"] == "generation.delta" for f in one.frames))
        await one.request("session.close", session=session)
        closed_at = len(one.frames)
        await two.ended(session, reply)
        await one.request("session.list")
        assert not [f for f in one.frames[closed_at:] if f.get("session") == session and "seq" in f]


# --- resuming ---------------------------------------------------------------------------------------------------------


class Cut(ChatClient):
    """Drops its connection after so many frames."""

    def __init__(self, url: str, after: int, known: Mirror | None, session: str) -> None:
        super().__init__(url)
        self.left = after
        if known is not None:
            self.sessions[session] = known
            self.snapshots[session] = 1
            self.resume = [{"session": session, "after": known.seq}]

    async def _take(self, frame: Frame) -> None:
        if self.left == 0:
            return
        self.left -= 1
        await super()._take(frame)
        if self.left == 0:
            self.cut()


@pytest.mark.parametrize("event_history", [4096, 6])
@pytest.mark.parametrize("kind", ["memory", "valkey"])
async def test_a_client_cut_at_any_frame_any_number_of_times_ends_with_the_same_tree(
    kind: str, event_history: int
) -> None:
    async with contextlib.AsyncExitStack() as stack:
        store: Any = MemoryStore(event_history=event_history)
        if kind == "valkey":
            store = await stack.enter_async_context(embedded_store(event_history=event_history))
        server = await stack.enter_async_context(running_server(store=store, token_delay_s=0.002))
        driver = await stack.enter_async_context(ChatClient(server.ws_url))
        for frames_a_life in range(1, 10):
            session, mirror = await driver.started_session(title="t")
            _, reply = await driver.say(session, "hello", max_tokens=24)
            # Lives of one frame get nowhere, so each is followed by a longer one.
            sizes = itertools.cycle((frames_a_life, 1, 3 + frames_a_life))
            known: Mirror | None = None
            while known is None or not is_done(known, reply):
                known = await live_and_die(server, session, reply, next(sizes), known)
            await driver.ended(session, reply)
            assert known.tree() == mirror.tree()
            assert len(mirror.messages[reply]["text"].split()) == 24


def is_done(mirror: Mirror, message: str) -> bool:
    return message in mirror.messages and mirror.messages[message]["status"] == "done"


async def live_and_die(
    server: Server, session: str, reply: str, num_frames: int, known: Mirror | None
) -> Mirror | None:
    client = Cut(server.ws_url, num_frames, known, session)
    try:
        await client.open()
        await client.hello()
        if known is None:
            await client.watch(session)
        # A snapshot may stand for the event of its end.
        await client.until(lambda: is_done(client.sessions[session], reply), 5)
        await client.close()
    except (AssertionError, ConnectionError, websockets.ConnectionClosed):
        assert client.fault is None, client.fault
    finally:
        client.cut()
    return client.sessions[session] if client.snapshots[session] else None


async def test_resuming_replays_what_was_missed_and_goes_on_live(server: Server) -> None:
    async with ChatClient(server.ws_url) as driver:
        session, mirror = await driver.started_session()
        server.engine.pace.allow(5)
        _, reply = await driver.say(session, "hello", max_tokens=30)
        late = ChatClient(server.ws_url, resume=[{"session": session, "after": 0}])
        async with late:
            late.sessions[session].title = mirror.title
            server.engine.pace.release()
            await late.ended(session, reply)
            await driver.ended(session, reply)
            assert late.snapshots[session] == 0
            assert late.sessions[session].tree() == mirror.tree()


async def test_a_client_that_is_gone_has_nothing_more_read_for_it(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on, reads = asyncio.Event(), asyncio.Event(), 0

    async def replay(*_args: object) -> None:
        nonlocal reads
        reads += 1
        reading.set()
        await go_on.wait()
        raise NotFoundError("no such session")

    monkeypatch.setattr(server.context.service, "replay", replay)
    socket = await raw(server, {**HELLO, "resume": [{"session": str(index), "after": 0} for index in range(1000)]})
    await asyncio.wait_for(reading.wait(), 10)
    socket.transport.abort()
    await until(lambda: not list(server.context.hub.sockets()))
    go_on.set()
    await until(lambda: not len(server.context.background))
    assert reads == 1


async def test_another_users_session_cannot_be_resumed() -> None:
    async with (
        running_server(tokens={"a": "ada", "b": "bob"}) as server,
        ChatClient(server.ws_url, token="a") as ada,
    ):
        session, _ = await ada.started_session(title="private")
        await ada.turn(session, "secret", max_tokens=3)
        async with ChatClient(server.ws_url, token="b", resume=[{"session": session, "after": 0}]) as bob:
            with pytest.raises(RequestFailedError, match="not_found"):
                await bob.request("session.open", session=session)
            await ada.turn(session, "more secret", max_tokens=3)
            await bob.request("session.list")
            assert [f["code"] for f in bob.frames if f["type"] == "error"] == ["not_found"] * 2
            assert "secret" not in json.dumps(bob.frames)
            assert "private" not in json.dumps(bob.frames)


# --- slow, silent, too large, too many --------------------------------------------------------------------------------


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
        await until(lambda: sum(len(s.subscriptions) for s in hub.sockets()) == 2)
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
        time.sleep(0.6)  # noqa: ASYNC251 - blocking the loop is the point
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
        tasks = len(asyncio.all_tasks())
        for index in range(120):
            socket = await raw(server, HELLO, {"type": "session.open", "id": "1", "session": session})
            if index % 3:
                await socket.recv()
            if index % 2:
                socket.transport.abort()
            else:
                await socket.close()
        hub = server.context.hub
        await until(lambda: len(list(hub.sockets())) == 1 and len(asyncio.all_tasks()) <= tasks)
        hub.check()


# --- who may come in --------------------------------------------------------------------------------------------------


async def test_tokens_decide_who_it_is() -> None:
    async with running_server(tokens={"secret": "ada"}) as server:
        async with ChatClient(server.ws_url, token="secret") as ada:
            assert ada.welcome["user"] == "ada"
        in_hello = ChatClient(server.ws_url)
        await in_hello.open()
        assert (await in_hello.hello(token="secret"))["user"] == "ada"
        await in_hello.close()
        for client, hello in ((ChatClient(server.ws_url), HELLO), (ChatClient(server.ws_url, token="no"), HELLO)):
            await client.open()
            await client.send(hello)
            assert await client.closed() == 4001
        in_url = ChatClient(server.ws_url + "?token=secret")
        await in_url.open()
        await in_url.send(HELLO)
        assert await in_url.closed() == 4001


@pytest.mark.parametrize(
    ("headers", "refused"),
    [
        ({"Origin": "http://evil.example"}, True),
        ({"Origin": "null"}, True),
        ({"Host": "rebound.example"}, True),
        ({"Host": "chat.example.org", "Origin": "https://chat.example.org"}, False),
        ({"Origin": "https://app.example.org"}, False),
    ],
)
async def test_foreign_origins_and_hosts_are_refused_before_the_upgrade(headers: dict[str, str], refused: bool) -> None:
    async with running_server(
        allowed_hosts=["chat.example.org"], allowed_origins=["https://app.example.org"]
    ) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        sent = {"Host": f"127.0.0.1:{server.port}", **headers}
        lines = [f"{name}: {value}" for name, value in sent.items()]
        writer.write(
            "\r\n".join(
                [
                    "GET /ws HTTP/1.1",
                    *lines,
                    "Upgrade: websocket",
                    "Connection: Upgrade",
                    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
                    "Sec-WebSocket-Version: 13",
                    "",
                    "",
                ]
            ).encode()
        )
        status = (await reader.readline()).split()[1]
        assert status == (b"403" if refused else b"101")
        writer.close()


# --- the store, the engine and the server go away ---------------------------------------------------------------------


async def test_what_is_degraded_is_said_to_those_who_are_there_and_those_who_come(server: Server) -> None:
    async with ChatClient(server.ws_url) as client:
        session, mirror = await client.started_session()
        server.engine.pace.allow(3)
        _, reply = await client.say(session, "hello", max_tokens=20)
        await client.until(lambda: mirror.messages.get(reply, {}).get("text"))
        server.store.fail()
        server.engine.pace.release()
        await client.until(lambda: any(f["type"] == "degraded" for f in client.frames))
        with pytest.raises(RequestFailedError, match="store_unavailable") as failed:
            await client.say(session, "hello")
        assert failed.value.frame["retryable"] is True
        degraded = next(f for f in client.frames if f["type"] == "degraded")
        assert degraded["component"] == "store"
        assert degraded["since"] > 1e9
        async with ChatClient(server.ws_url) as late:
            await late.until(lambda: any(f["type"] == "degraded" for f in late.frames))
            server.store.heal()
            await late.until(lambda: any(f["type"] == "recovered" for f in late.frames))
        await client.until(lambda: any(f["type"] == "recovered" for f in client.frames))
        await client.ended(session, reply)
        assert len(mirror.messages[reply]["text"].split()) == 20
        await client.turn(session, "hello", max_tokens=2)


async def test_a_stopping_server_says_1001_and_its_successor_goes_on() -> None:
    async with running_server() as server:
        client = ChatClient(server.ws_url)
        await client.open()
        await client.hello()
        session, mirror = await client.started_session(title="kept")
        await client.turn(session, "hello", max_tokens=4)
        server.engine.pace.allow(3)
        _, reply = await client.say(session, "again", max_tokens=400)
        await client.until(lambda: mirror.messages.get(reply, {}).get("text"))
        await server.restart()
        assert await client.closed() == 1001
        again = ChatClient(server.ws_url, resume=[{"session": session, "after": mirror.seq}])
        again.sessions[session] = mirror
        async with again:
            await again.ended(session, reply)
            assert mirror.messages[reply]["status"] == "done", "its successor went on with it"
            _, reply = await again.turn(session, "and on", parent=reply, max_tokens=3)
            assert mirror.messages[reply]["status"] == "done"


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the server shares this loop and tells nobody
            await asyncio.sleep(0.005)
