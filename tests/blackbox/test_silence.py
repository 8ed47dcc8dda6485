"""Processes that stand still, their sockets open."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable

from tests.blackbox.client import ChatClient
from tests.blackbox.server import Server


async def readiness(server: Server, wanted: int) -> dict[str, object]:
    """Wait until `/readyz` has this status; its body."""
    async with asyncio.timeout(30):
        while True:
            status, body = await asyncio.to_thread(server.get, "/readyz")
            if status == wanted:
                return json.loads(body)  # type: ignore[no-any-return]


async def test_a_stopped_engine_is_told_and_so_is_its_coming_back(start_server: Callable[..., Server]) -> None:
    server = start_server(engine_silence_s=1)
    async with ChatClient(server.ws_url) as client:
        session, mirror = await client.started_session()
        _, reply = await client.say(session, "a long answer please", max_tokens=300)
        await client.until(lambda: bool(mirror.messages.get(reply, {}).get("text")))
        engine = server.children()["engine"]
        os.kill(engine, signal.SIGSTOP)
        try:
            problems = (await readiness(server, 503))["problems"]
            assert set(problems) == {"engine"}
            await client.until(lambda: any(f["type"] == "degraded" for f in client.frames))
            assert (await asyncio.to_thread(server.get, "/healthz"))[0] == 200
            listed = await client.request("session.list")
            assert [row["session"] for row in listed["sessions"]] == [session], "what needs no engine works"
        finally:
            os.kill(engine, signal.SIGCONT)
        assert (await client.ended(session, reply))["reason"] in {"stop", "length"}
        await client.until(lambda: any(f["type"] == "recovered" for f in client.frames))
        await readiness(server, 200)
        told = [(f["type"], f["component"]) for f in client.frames if f["type"] in {"degraded", "recovered"}]
        assert told == [("degraded", "engine"), ("recovered", "engine")]
