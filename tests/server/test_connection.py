"""Real sockets: order, who may come in, going away."""

from __future__ import annotations

import asyncio

import pytest

from tests.blackbox.client import ChatClient, RequestFailedError
from tests.server.bare import HELLO
from tests.server.harness import Server, running_server


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
