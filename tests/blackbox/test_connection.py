"""The connection's rules: hello, bad frames, heartbeats, origins."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import websockets
from websockets.asyncio.client import connect as ws_connect

from tests.blackbox.client import ChatClient, RequestFailedError
from tests.blackbox.server import ON_EITHER_STORE, Server

Connect = Callable[..., ChatClient]


async def test_welcome_says_what_the_server_is(connect: Connect) -> None:
    async with connect() as client:
        welcome = client.welcome
        assert welcome["protocol"] == "chat.v1"
        assert welcome["user"] == "local"
        assert welcome["context_tokens"] == 4096
        assert welcome["limits"]["max_frame_bytes"] >= 1024 * 1024
        assert welcome["limits"]["max_text_bytes"] == 256 * 1024
        assert {"server", "model"} <= set(welcome)


@pytest.mark.parametrize(
    "first",
    [
        {"type": "session.list", "id": "1"},
        {"type": "hello", "protocol": "chat.v2"},
        {"type": "ping"},
    ],
)
async def test_a_wrong_first_frame_closes_with_4000(connect: Connect, first: dict[str, str]) -> None:
    client = connect()
    await client.open()
    await client.send(first)
    assert await client.closed() == 4000


async def test_a_hello_with_a_wrong_field_is_told_why_and_closed_at_once(connect: Connect) -> None:
    client = connect()
    await client.open()
    resume = [{"session": "s", "after": -1}]
    await client.send({"type": "hello", "protocol": "chat.v1", "resume": resume})
    assert await client.closed(timeout_s=4) == 4000
    assert [(frame["type"], frame.get("code")) for frame in client.frames] == [("error", "bad_params")]


async def test_a_silent_start_closes_with_4000_after_five_seconds(connect: Connect) -> None:
    client = connect()
    await client.open()
    assert await client.closed(timeout_s=8) == 4000


async def test_a_wrong_token_closes_with_4001(start_server: Callable[..., Server], tmp_path: object) -> None:
    tokens = tmp_path / "tokens"  # type: ignore[operator]
    tokens.write_text("")
    from chatserve.server.auth import add_token

    secret = add_token(tokens, "ada")
    server = start_server(tokens_file=tokens)
    client = ChatClient(server.ws_url)
    await client.open()
    await client.send({"type": "hello", "protocol": "chat.v1", "token": "wrong"})
    assert await client.closed() == 4001
    async with ChatClient(server.ws_url, token=secret) as ada:
        assert ada.welcome["user"] == "ada"
    in_hello = ChatClient(server.ws_url)
    await in_hello.open()
    assert (await in_hello.hello(token=secret))["user"] == "ada"
    await in_hello.close()


@pytest.mark.parametrize(
    "raw",
    [
        "{",
        "[]",
        '"hello"',
        '{"type": "session.list", "id": "x", "limit": NaN}',
        '{"type": "session.list", "id": "x", "query": "\\ud800"}',
        '{"type": "session.list"}',
        '{"id": "x"}',
        '{"type": 7, "id": "x"}',
        '{"type": "session.open", "id": "x"}',
        json.dumps({"type": "session.list", "id": "x" * 65}),
        json.dumps({"type": "session.list", "id": 7}),
        b"\x00\x01",
    ],
)
async def test_a_bad_frame_is_answered_and_the_socket_stays(connect: Connect, raw: str | bytes) -> None:
    async with connect() as client:
        await client.send(raw)
        await client.until(lambda: any(f["type"] == "error" for f in client.frames))
        error = next(f for f in client.frames if f["type"] == "error")
        assert error["code"] == "bad_frame"
        assert error["detail"]
        assert await client.request("session.list", limit=1)


async def test_an_unknown_type_is_answered_and_the_socket_stays(connect: Connect) -> None:
    async with connect() as client:
        with pytest.raises(RequestFailedError, match="unknown_type"):
            await client.request("session.explode")
        assert await client.request("session.list", limit=1, surprise="ignored")


async def test_ping_is_answered_with_pong(connect: Connect) -> None:
    async with connect() as client:
        await client.send({"type": "ping"})
        await client.until(lambda: any(f["type"] == "pong" for f in client.frames))


async def test_a_frame_over_the_limit_closes_with_1009(connect: Connect) -> None:
    async with connect() as client:
        await client.send(json.dumps({"type": "ping", "pad": "x" * client.welcome["limits"]["max_frame_bytes"]}))
        assert await client.closed() == 1009


@ON_EITHER_STORE
async def test_a_text_over_its_limit_is_an_error_on_a_socket_that_survives(connect: Connect) -> None:
    async with connect() as client:
        session, mirror = await client.started_session()
        with pytest.raises(RequestFailedError, match="too_large") as failed:
            await client.say(session, "é" * 150 * 1024)
        assert str(300 * 1024) in failed.value.frame["detail"]
        assert str(256 * 1024) in failed.value.frame["detail"]
        assert not mirror.messages
        await client.turn(session, "still here", max_tokens=2)


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1.evil.example"])
async def test_a_foreign_origin_is_refused(connect: Connect, origin: str) -> None:
    client = connect(origin=origin)
    with pytest.raises(websockets.InvalidStatus) as refused:
        await client.open()
    assert refused.value.response.status_code == 403


async def test_the_own_origin_is_welcome(server: Server, connect: Connect) -> None:
    async with connect(origin=server.url) as client:
        assert client.welcome["protocol"] == "chat.v1"


async def test_an_unknown_host_is_refused(server: Server) -> None:
    with pytest.raises(websockets.InvalidStatus) as refused:
        async with ws_connect(
            server.ws_url.replace("127.0.0.1", "rebound.example"), host="127.0.0.1", port=server.port
        ):
            pass
    assert refused.value.response.status_code in {400, 403, 421}


async def test_a_deleted_or_foreign_session_in_resume_is_not_found_and_the_others_go_on(connect: Connect) -> None:
    async with connect() as client:
        session, _ = await client.started_session(title="kept")
        doomed = await client.create()
        await client.request("session.delete", session=doomed)
    resume = [{"session": doomed, "after": 0}, {"session": "nobody", "after": 3}, {"session": session, "after": 0}]
    async with connect(resume=resume) as client:
        await client.until(lambda: sum(f["type"] == "error" for f in client.frames) == 2)
        errors = {f["session"]: f["code"] for f in client.frames if f["type"] == "error"}
        assert errors == {doomed: "not_found", "nobody": "not_found"}
        await client.turn(session, "hello", max_tokens=2)
