"""Processes die; conversations do not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.blackbox.client import ChatClient
from tests.blackbox.server import Server
from tests.blackbox.test_stop import idle


async def test_a_killed_engine_comes_back_and_the_answer_is_the_undisturbed_one(
    start_server: Callable[..., Server],
) -> None:
    server = start_server()
    async with ChatClient(server.ws_url) as client:
        session, mirror = await client.started_session(params={"temperature": 1.0, "seed": 5})
        message, reply = await client.say(session, "a long answer please", max_tokens=400)
        await client.until(lambda: len(mirror.messages.get(reply, {}).get("text", "")) > 20)
        await asyncio.to_thread(server.kill, "engine")
        end = await client.ended(session, reply)
        assert end["reason"] in {"stop", "length"}
        assert mirror.started_times[reply] == 1
        ack = await client.request(
            "message.regenerate", session=session, message=message, params={"max_tokens": 400, "seed": 5}
        )
        await client.ended(session, ack["reply"])
        assert client.text(session, ack["reply"]) == client.text(session, reply)
    await idle(server)


async def test_after_everything_was_killed_its_answer_goes_on_and_sending_works(
    start_server: Callable[..., Server], store_options: dict[str, str]
) -> None:
    server = start_server(**store_options)
    async with ChatClient(server.ws_url) as client:
        session, mirror = await client.started_session(params={"temperature": 1.0, "seed": 8})
        _, done = await client.turn(session, "kept", max_tokens=5)
        kept = client.text(session, done)
        message, reply = await client.say(session, "cut short", done, max_tokens=400)
        await client.until(lambda: len(mirror.messages.get(reply, {}).get("text", "")) > 20)
        await asyncio.to_thread(server.kill_all)
        await client.closed()
        shown = client.text(session, reply)
        seq = mirror.seq
    assert not mirror.ended[reply], "it was killed in mid-answer"
    await asyncio.to_thread(server.start)
    late = ChatClient(server.ws_url, resume=[{"session": session, "after": seq}])
    late.sessions[session] = mirror
    async with late:
        end = await late.ended(session, reply)
        assert end["reason"] in {"stop", "length"}
        assert late.text(session, reply).startswith(shown)
        assert late.text(session, done) == kept
        assert late.snapshots[session] == 0
        ack = await late.request("message.regenerate", session=session, message=message, params={"max_tokens": 400})
        await late.ended(session, ack["reply"])
        assert late.text(session, ack["reply"]) == late.text(session, reply), "what an undisturbed run says"
        await late.turn(session, "sending works", reply, max_tokens=2)


async def test_a_killed_web_worker_comes_back_and_clients_resume(start_server: Callable[..., Server]) -> None:
    server = start_server()
    client = ChatClient(server.ws_url)
    async with client:
        session, mirror = await client.started_session()
        await client.turn(session, "kept", max_tokens=5)
        await asyncio.to_thread(server.kill, "web")
        await client.closed()
        seq = mirror.seq
    await asyncio.to_thread(server.wait_ready)
    late = ChatClient(server.ws_url, resume=[{"session": session, "after": seq}])
    late.sessions[session] = mirror
    async with late:
        await late.turn(session, "goes on", mirror.leaf, max_tokens=2)
        assert len(mirror.messages) == 4


@pytest.mark.parametrize("signal_name", ["TERM"])
async def test_a_stopped_server_leaves_no_process_behind(start_server: Callable[..., Server], signal_name: str) -> None:
    server = start_server()
    children = await asyncio.to_thread(server.children)
    assert set(children) == {"engine", "web", "store"}
    assert await asyncio.to_thread(server.stop) == 0
    import psutil

    assert not [pid for pid in children.values() if psutil.pid_exists(pid)], signal_name
