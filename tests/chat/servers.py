"""Several servers on one store, and what must hold between them."""

from __future__ import annotations

from typing import Any

from chatserve.types import SessionId
from tests.chat.harness import ANN, Encoders, Harness, view_of
from tests.fakes.memory_store import MemoryStore

SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 5}


def server(encoders: Encoders, store: MemoryStore, place: str, **options: Any) -> Harness:
    return Harness(encoders["chatml"], store=store, place=place, **{"beat_s": 0.02, **options})


def is_held(harness: Harness, session: SessionId) -> bool:
    return harness.service._core.sessions.peek(ANN, session) is not None


async def agree(*servers: Harness) -> None:
    """Everyone who follows a session has the same of it, and it is what the store has."""
    for session in servers[0].mirrors:
        states = [await server.service.snapshot(ANN, SessionId(session)) for server in servers]
        stored = view_of(states[0])
        for one in servers:
            mirror, seq = one.mirrors[session], stored[0]
            await one.until(lambda mirror=mirror, seq=seq: mirror.seq >= seq)
            assert mirror.view() == stored
        assert all(view_of(state) == stored for state in states)
        assert sum(is_held(one, SessionId(session)) for one in servers) <= 1


async def undisturbed(encoders: Encoders, text: str, **params: Any) -> str:
    async with Harness(encoders["chatml"]) as alone:
        session = await alone.create(params=params)
        _, reply = await alone.turn(session, text)
        return alone.text(session, reply)
