"""Stopping: at any moment, from anywhere, once; and the blocks come back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.blackbox.client import ChatClient
from tests.blackbox.server import ON_EITHER_STORE, Server

Connect = Callable[..., ChatClient]


async def idle(server: Server, timeout_s: float = 20.0) -> dict[str, dict[str, int]]:
    """Wait until nothing runs and no block is pinned, and check that the blocks add up."""
    async with asyncio.timeout(timeout_s):
        while True:
            cache = await asyncio.to_thread(server.json, "/api/cache")
            busy = [cache[tier][state] for tier in ("device", "host") for state in ("pinned", "transit", "private")]
            running = await asyncio.to_thread(server.metric, "chatserve_running_requests")
            if not any(busy) and running == 0:
                break
            await asyncio.sleep(0)
    for tier in ("device", "host"):
        counts = cache[tier]
        assert counts["free"] + counts["cached"] + counts["private"] + counts["transit"] == counts["total"]
    return cache


async def test_a_dropped_socket_with_no_grace_stops_its_generation(start_server: Callable[..., Server]) -> None:
    server = start_server(orphan_grace_s=0)
    client = ChatClient(server.ws_url)
    async with client:
        session, mirror = await client.started_session()
        _, reply = await client.say(session, "endless", max_tokens=3900)
        await client.until(lambda: bool(mirror.messages.get(reply, {}).get("text")))
        client.cut()
        await client.closed()
    await idle(server, timeout_s=3)
    async with ChatClient(server.ws_url) as late:
        record = (await late.watch(session)).messages[reply]
        assert record["status"] == "stopped"
        assert record["text"]


async def test_within_the_grace_a_dropped_socket_stops_nothing(connect: Connect) -> None:
    client = connect()
    async with client:
        session, _ = await client.started_session()
        _, reply = await client.say(session, "on", max_tokens=150)
        client.cut()
        await client.closed()
    async with connect(resume=[{"session": session, "after": 0}]) as late:
        assert (await late.ended(session, reply))["reason"] == "length"


@pytest.mark.timeout(400)
async def test_stops_around_the_last_token_end_each_generation_once(server: Server, connect: Connect) -> None:
    async with connect() as client:
        session, mirror = await client.started_session(params={"max_tokens": 3})
        message, first = await client.turn(session, "short")
        for n in range(500):
            ack = await client.request("message.regenerate", session=session, message=message)
            reply = ack["reply"]
            # The stop lands before, at or after the last token, as n goes on.
            wanted = n % 4
            await client.until(
                lambda reply=reply, wanted=wanted: (
                    sum(e["type"] == "generation.delta" and e["message"] == reply for e in mirror.log[-12:])
                    >= min(wanted, 1)
                    or bool(mirror.ended[reply])
                )
            )
            await client.request("generation.stop", session=session, message=reply)
            assert len(mirror.ended[reply]) == 1
        assert all(len(ends) == 1 for ends in mirror.ended.values())
        assert mirror.messages[first]["status"] == "done"
    await idle(server)


async def test_stop_before_the_first_token_of_a_long_prompt(server: Server, connect: Connect) -> None:
    async with connect() as client:
        session, mirror = await client.started_session()
        _, reply = await client.say(session, "word " * 3500, max_tokens=500)
        await client.request("generation.stop", session=session, message=reply)
        end = mirror.ended[reply][0]
        assert (end["reason"], end["status"]) == ("cancelled", "stopped")
        assert mirror.messages[reply]["text"] == ""
    await idle(server)


@ON_EITHER_STORE
async def test_a_resumed_stream_can_be_stopped(connect: Connect) -> None:
    first = connect()
    async with first:
        session, mirror = await first.started_session()
        _, reply = await first.say(session, "on and on", max_tokens=3900)
        await first.until(lambda: bool(mirror.messages.get(reply, {}).get("text")))
        seq = mirror.seq
        first.cut()
        await first.closed()
    second = connect(resume=[{"session": session, "after": seq}])
    second.sessions[session] = mirror
    async with second:
        await second.request("generation.stop", session=session, message=reply)
        count = len(mirror.log)
        await second.settle()
        assert [e["type"] for e in mirror.log[count:] if e["type"] == "generation.delta"] == []
        assert mirror.ended[reply][0]["reason"] == "cancelled"


async def test_stops_while_blocks_are_swapped_leak_nothing(start_server: Callable[..., Server]) -> None:
    server = start_server(kv_cache_memory="24blocks", host_cache_memory="40blocks")
    async with ChatClient(server.ws_url) as client:
        made = []
        for n in range(6):
            session, _ = await client.started_session(params={"max_tokens": 10})
            _, reply = await client.turn(session, f"{n} " + "words of some length " * 8)
            made.append((session, reply))
        for turn in range(4):
            for n, (session, reply) in enumerate(made):
                _, answer = await client.say(session, f"again {turn}", reply, max_tokens=40)
                if (n + turn) % 2:
                    await client.until(lambda s=session, a=answer: bool(client.sessions[s].messages.get(a)))
                await client.request("generation.stop", session=session, message=answer)
    cache = await idle(server)
    assert cache["host"]["cached"] > 0, "the test is about swapping"


async def test_stop_still_works_after_the_store_lost_its_connections(start_server: Callable[..., Server]) -> None:
    import redis

    server = start_server()
    async with ChatClient(server.ws_url) as client:
        session, mirror = await client.started_session()
        _, reply = await client.say(session, "talk", max_tokens=3900)
        await client.until(lambda: bool(mirror.messages.get(reply, {}).get("text")))
        with redis.Redis(unix_socket_path=str(server.data_dir / "run" / "store.sock")) as store:
            for kind in ("normal", "pubsub"):
                assert store.client_kill_filter(_type=kind, skipme=True) > 0
        await client.request("generation.stop", session=session, message=reply)
        assert [e["reason"] for e in mirror.ended[reply]] == ["cancelled"]
        await client.turn(session, "goes on", reply, max_tokens=2)
