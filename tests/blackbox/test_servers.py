"""Two servers on one Redis, one of them with two web workers: whichever is asked, and whichever dies."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import psutil
import pytest
import redis

from chatserve.supervisor.embedded_store import EmbeddedStore, find_server
from tests.blackbox.client import ChatClient
from tests.blackbox.server import Server
from tests.blackbox.test_stop import idle

SAMPLED = {"temperature": 1.0, "seed": 11}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EmbeddedStore]:
    """A Redis of its own, where there is one; else a Valkey."""
    found = shutil.which("redis-server")
    store = EmbeddedStore(tmp_path / "redis", tmp_path / "redis.sock", binary=Path(found) if found else find_server())
    store.start()
    yield store
    store.stop()


def web_workers(server: Server) -> list[int]:
    assert server.process is not None
    children = psutil.Process(server.process.pid).children()
    return [child.pid for child in children if "chatserve.server.worker" in child.cmdline()]


async def test_one_conversation_on_two_servers_whichever_dies(
    start_server: Callable[..., Server], store: EmbeddedStore
) -> None:
    a, b = await asyncio.gather(
        asyncio.to_thread(start_server, redis_url=store.url, web_workers=2),
        asyncio.to_thread(start_server, redis_url=store.url),
    )
    async with AsyncExitStack() as stack:
        # Enough sockets that both of the first server's workers have some.
        at_a = [await stack.enter_async_context(ChatClient(a.ws_url)) for _ in range(6)]
        at_b = [await stack.enter_async_context(ChatClient(b.ws_url)) for _ in range(2)]
        clients = [*at_a, *at_b]
        session = await at_a[0].create(params={**SAMPLED, "max_tokens": 3000})
        mirrors = [await client.watch(session) for client in clients]

        # Stream and branch from everywhere while the first answer goes on; stop it from somewhere else.
        message, running = await at_b[0].say(session, "go on for ever")
        for client, mirror in zip(clients, mirrors, strict=True):
            await client.until(lambda mirror=mirror: bool(mirror.messages.get(running, {}).get("text")))
        for client in (*at_a[:3], at_b[1]):
            ack = await client.request("message.regenerate", session=session, message=message, params={"max_tokens": 5})
            await client.ended(session, ack["reply"])
        # Whatever listens for the stops of others loses its connection.
        with redis.Redis.from_url(store.url) as blip:
            for kind in ("normal", "pubsub"):
                assert blip.client_kill_filter(_type=kind, skipme=True) > 0
        await at_a[3].request("generation.stop", session=session, message=running)
        assert mirrors[3].ended[running], "the answer to a stop comes after the end"
        for client in clients:
            await client.ended(session, running)

        # A worker dies in mid-answer, then a whole server: the text is the one that an undisturbed run gives.
        _, wanted = await at_b[0].turn(session, "again and again", max_tokens=700)
        _, reply = await at_a[0].say(session, "again and again", max_tokens=700)
        await at_b[0].until(lambda: len(mirrors[-2].messages.get(reply, {}).get("text", "")) > 30)
        for pid in web_workers(a)[:1]:
            os.kill(pid, signal.SIGKILL)
        shown = len(at_b[0].text(session, reply))
        await at_b[0].until(lambda: len(at_b[0].text(session, reply)) > shown)
        await asyncio.to_thread(a.kill_all)
        end = await at_b[0].ended(session, reply)
        assert end["reason"] == "length"
        assert at_b[0].text(session, reply) == at_b[0].text(session, wanted)
        assert mirrors[-2].started_times[reply] == 1
        await at_b[1].turn(session, "goes on", reply, max_tokens=2)
        late = await stack.enter_async_context(ChatClient(b.ws_url))
        fresh = await late.watch(session)
        for client, mirror in zip(at_b, mirrors[-2:], strict=True):
            await client.settle()
            assert mirror.tree() == fresh.tree()
    await idle(b)
