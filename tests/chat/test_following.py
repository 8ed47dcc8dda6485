"""Following a session: snapshots and replays at any moment, hints while typing, sessions that come and go in memory."""

from __future__ import annotations

import asyncio
import threading

import pytest

from chatserve.chat import sessions
from chatserve.chat.prompt import PromptEncoder
from chatserve.errors import BadParamsError
from tests.chat.harness import ANN, Encoders, Harness, Mirror, refused, view_of
from tests.fakes.memory_store import MemoryStore


async def test_a_snapshot_at_any_moment_is_what_the_events_up_to_it_tell(encoders: Encoders) -> None:
    async with Harness(encoders["chatml"]) as harness:
        session = await harness.create()
        message, reply = await harness.say(session, "on", max_tokens=120)
        other = await harness.regenerate(session, message, max_tokens=60)
        generating = 0
        while reply not in harness.mirrors[session].ends or other not in harness.mirrors[session].ends:
            state = await harness.service.snapshot(ANN, session)
            assert view_of(state) == harness.mirrors[session].view()
            generating += any(m.status == "generating" and m.text for m in state.messages)
            await asyncio.sleep(0)
        assert generating > 20


async def test_a_replay_from_anywhere_followed_by_live_events_is_the_whole_stream(encoders: Encoders) -> None:
    async with Harness(encoders["chatml"]) as harness:
        session = await harness.create()
        _, reply = await harness.say(session, "on", max_tokens=60)
        mirror = harness.mirrors[session]
        while reply not in mirror.ends:
            for after in range(0, mirror.seq + 1, 7):
                replayed = await harness.service.replay(ANN, session, after)
                assert replayed is not None
                assert [e.seq for e in replayed] == list(range(after + 1, after + 1 + len(replayed)))
                # Whatever was published while it was read comes live; between the two there is no gap.
                assert len(replayed) + after <= mirror.seq
            await asyncio.sleep(0)
        assert await harness.service.replay(ANN, session, 0) == mirror.log
        assert await harness.service.replay(ANN, session, mirror.seq) == []
        assert await harness.service.replay(ANN, session, mirror.seq + 1) is None


async def test_a_trimmed_history_asks_for_a_snapshot(encoders: Encoders) -> None:
    async with Harness(encoders["chatml"], store=MemoryStore(event_history=10)) as harness:
        session = await harness.create()
        await harness.turn(session, "on", max_tokens=50)
        assert await harness.service.replay(ANN, session, 0) is None
        seq = harness.mirrors[session].seq
        assert len(await harness.service.replay(ANN, session, seq - 5) or ()) == 5


async def test_sessions_that_rest_leave_memory_and_come_back(
    encoders: Encoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_IDLE_SESSIONS", 2)
    async with Harness(encoders["chatml"]) as harness:
        made = []
        for n in range(6):
            session = await harness.create(params={"temperature": 0})
            _, reply = await harness.turn(session, f"session {n}", max_tokens=5)
            harness.service.set_subscribers(session, 0)
            made.append((session, reply))
        running = await harness.create()
        _, endless = await harness.say(running, "on", max_tokens=2000)
        assert len(list(harness.service._core.sessions)) <= 3
        for session, reply in made:
            harness.service.set_subscribers(session, 1)
            _, two = await harness.turn(session, "again", reply, max_tokens=5)
            assert harness.started(session, two).cached_tokens > 0, "matched by tokens, without a path"
            harness.service.set_subscribers(session, 0)
        await harness.call("stop_generation", session=running, message=endless)
        await harness.idle()
        await harness.check()


async def test_long_texts_are_tokenised_in_a_thread(encoders: Encoders) -> None:
    encoder = encoders["chatml"]

    class Noting(PromptEncoder):
        def __init__(self) -> None:
            self.__dict__.update(encoder.__dict__)
            self.threads: list[str] = []

        def encode_root(self, system: str | None, text: str) -> tuple[int, ...]:
            self.threads.append(threading.current_thread().name)
            return super().encode_root(system, text)

    noting = Noting()
    async with Harness(noting) as harness:
        session = await harness.create()
        await refused(harness.say(session, "word " * 20_000))
        assert noting.threads
        assert all(name.startswith("tokenizer") for name in noting.threads)


@pytest.mark.parametrize("limit", [0, 101, "5", True, 1.5, None])
async def test_a_bad_limit_is_named(encoders: Encoders, limit: object) -> None:
    async with Harness(encoders["chatml"]) as harness:
        error = await refused(harness.service.list_sessions(ANN, limit=limit))
        assert isinstance(error, BadParamsError)
        assert "limit" in error.detail


async def test_another_mirror_built_from_a_replay_equals_the_first(encoders: Encoders) -> None:
    async with Harness(encoders["chatml"]) as harness:
        session = await harness.create(params={"max_tokens": 5})
        _, one = await harness.turn(session, "a")
        await harness.turn(session, "b", one)
        await harness.call("delete_message", session=session, message=one)
        other = Mirror()
        for event in await harness.service.replay(ANN, session, 0) or ():
            other.take(event)
        assert other.view() == harness.mirrors[session].view()
