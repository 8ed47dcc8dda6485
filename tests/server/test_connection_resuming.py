"""Connections that are cut: whoever comes back misses nothing, and sees nothing of others."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from typing import Any

import pytest
import websockets

from chatserve.errors import NotFoundError
from chatserve.types import UserId
from tests.blackbox.client import ChatClient, Frame, Mirror, RequestFailedError
from tests.fakes.memory_store import MemoryStore
from tests.server.bare import HELLO, raw
from tests.server.harness import Server, embedded_store, running_server


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
    left, hub = asyncio.Event(), server.context.hub
    told = hub.on_user_left

    def on_user_left(user: UserId) -> None:
        told(user)
        left.set()

    monkeypatch.setattr(hub, "on_user_left", on_user_left)
    socket.transport.abort()
    await asyncio.wait_for(left.wait(), 10)
    go_on.set()
    await server.context.background.finish(10)
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
