"""A server dies, stops or is taken for dead: others go on with the same text, and it writes nothing more."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from chatserve.chat.events import SessionUpdated
from chatserve.chat.letters import AnyLetter, LeaseTaken, encode_letter
from chatserve.chat.live_session import LiveSession
from chatserve.chat.store import LeaseLostError
from chatserve.errors import OverloadedError
from tests.chat.harness import ANN, Encoders, refused
from tests.chat.servers import SAMPLED, agree, is_held, server, undisturbed
from tests.fakes.memory_store import MemoryStore

pytestmark = pytest.mark.usefixtures("impatient")


@pytest.mark.parametrize("at", [0, 1, 25, 90])
async def test_the_heir_of_a_dead_server_goes_on_with_the_same_text(encoders: Encoders, at: int) -> None:
    wanted = await undisturbed(encoders, "a long answer please", **SAMPLED, max_tokens=120)
    store = MemoryStore()
    a = await server(encoders, store, "a").__aenter__()
    async with server(encoders, store, "b") as b:
        session = await a.create(params={**SAMPLED, "max_tokens": 120})
        await b.follow(session)
        _, reply = await a.say(session, "a long answer please")
        await b.until(lambda: reply in b.mirrors[session].messages)
        await b.writing(session, reply, at)
        await a.crash()
        store.workers.die(a.owner)
        end = await b.ended(session, reply)
        assert b.text(session, reply) == wanted
        assert (end.reason, end.usage.completion_tokens) == ("length", 120)
        assert len(b.mirrors[session].starts[reply]) == 1, "no second start"
        await b.turn(session, "goes on", reply, max_tokens=2)
        await agree(b)
        await b.idle()


async def test_a_session_that_cannot_be_taken_over_keeps_no_other_from_it(
    encoders: Encoders, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    a = await server(encoders, store, "a").__aenter__()
    async with server(encoders, store, "b") as b:
        made = [await a.create(params={"max_tokens": 3000}) for _ in range(4)]
        replies = [(await a.say(session, "on"))[1] for session in made]
        for session, reply in zip(made, replies, strict=True):
            await a.writing(session, reply)
        damaged = made[0]
        stored = store._sessions[ANN, damaged]
        whole, stored.record = stored.record, None  # type: ignore[assignment]
        await a.crash()
        store.workers.die(a.owner)
        await b.until(lambda: all(is_held(b, session) for session in made[1:]))
        await b.until(lambda: a.owner not in store.workers._known)
        assert damaged in caplog.text
        stored.record = whole
        for session, reply in zip(made[1:], replies[1:], strict=True):
            await b.call("stop_generation", session=session, message=reply)
        await b.idle()


async def test_a_server_that_starts_in_a_dead_ones_place_goes_on_at_once(encoders: Encoders) -> None:
    """Also with a message that was being continued, whose older tokens are part of the prompt."""
    store = MemoryStore()
    wanted = await undisturbed(encoders, "go", temperature=0, max_tokens=60)
    a = await server(encoders, store, "a").__aenter__()
    session = await a.create(params={"temperature": 0})
    _, reply = await a.turn(session, "go", max_tokens=20)
    await a.call("continue_message", session=session, message=reply, params={"max_tokens": 40})
    await a.writing(session, reply, len(a.text(session, reply)) + 10)
    await a.crash()
    async with server(encoders, store, "a", beat_s=1000) as again:
        assert is_held(again, session), "before it serves anyone"
        await again.follow(session)
        end = await again.ended(session, reply)
        assert end.usage.completion_tokens == 40
        assert again.text(session, reply) == wanted
        assert await store.workers.known() == [again.owner]
        await again.turn(session, "goes on", reply, max_tokens=2)
        await again.idle()


async def test_a_server_that_was_taken_for_dead_writes_nothing_more_and_follows(encoders: Encoders) -> None:
    wanted = await undisturbed(encoders, "on", **SAMPLED, max_tokens=400)
    store = MemoryStore()
    async with server(encoders, store, "a", beat_s=1000) as a, server(encoders, store, "b") as b:
        session = await a.create(params={**SAMPLED, "max_tokens": 400})
        await b.follow(session)
        _, reply = await a.say(session, "on")
        await b.writing(session, reply, 20)
        a.client.pause()  # it stands still: no step, no heartbeat
        store.workers.die(a.owner)
        await b.until(lambda: is_held(b, session))
        a.client.resume()
        await b.ended(session, reply)
        await a.ended(session, reply)
        assert not is_held(a, session)
        assert a.text(session, reply) == b.text(session, reply) == wanted
        await a.turn(session, "from a", reply, max_tokens=3)
        await agree(a, b)
        await a.idle()
        await b.idle()


async def test_a_server_whose_leases_are_gone_and_that_was_not_told_finds_out(encoders: Encoders) -> None:
    store = MemoryStore()
    async with server(encoders, store, "a", beat_s=1000) as a, server(encoders, store, "b") as b:
        session = await a.create(params={"max_tokens": 3000})
        await b.follow(session)
        _, reply = await a.say(session, "on")
        await b.writing(session, reply, 20)
        deaf = a.service._runtime.feed
        deaf.is_deaf = True
        store.workers.die(a.owner)
        await b.until(lambda: is_held(b, session))
        await a.until(lambda: not is_held(a, session))  # its next text was refused
        deaf.recover()
        await a.call("stop_generation", session=session, message=reply)
        assert a.mirrors[session].ends[reply][0].reason == "cancelled"
        await b.turn(session, "on", reply, max_tokens=2)
        await agree(a, b)


async def test_a_lease_that_is_good_again_is_not_dropped_for_a_letter_that_is_late(encoders: Encoders) -> None:
    store = MemoryStore()
    async with server(encoders, store, "a") as a, server(encoders, store, "b") as b:
        session = await a.create(params={"max_tokens": 3000})
        await b.follow(session)
        _, reply = await a.say(session, "on")
        await a.writing(session, reply, 20)
        held = a.service._core.sessions
        live = held.peek(ANN, session)
        told: list[AnyLetter] = []
        take = a.service._runtime.forwarding.take
        a.service._runtime.forwarding.take = lambda letter: (told.append(letter), take(letter))
        assert store.feeds.send(a.owner, encode_letter(LeaseTaken(ANN, session)))
        await a.until(lambda: told and not held.tenure._tasks)
        assert held.peek(ANN, session) is live
        await a.call("stop_generation", session=session, message=reply)
        assert a.mirrors[session].ends[reply][0].reason == "cancelled"
        await agree(a, b)


async def test_a_server_that_is_stopped_hands_over(encoders: Encoders) -> None:
    wanted = await undisturbed(encoders, "on", **SAMPLED, max_tokens=300)
    store = MemoryStore()
    a = await server(encoders, store, "a").__aenter__()
    async with server(encoders, store, "b") as b:
        session = await a.create(params={**SAMPLED, "max_tokens": 300})
        await b.follow(session)
        _, reply = await a.say(session, "on")
        await b.writing(session, reply, 20)
        a.client.pause()
        await a.service.drain(0.0)
        error = await refused(a.say(session, "no more"))
        assert isinstance(error, OverloadedError)
        assert error.retryable
        assert isinstance(await refused(b.say(session, "nor from there, while it has it")), OverloadedError)
        await a.__aexit__()
        assert (await b.ended(session, reply)).reason == "length"
        assert b.text(session, reply) == wanted
        await b.until(lambda: len(store.workers._known) == 1)
        await b.turn(session, "goes on", reply, max_tokens=2)
        await agree(b)
        await b.idle()


async def test_a_draining_server_lets_answers_end(encoders: Encoders) -> None:
    store = MemoryStore()
    async with server(encoders, store, "a") as a:
        session = await a.create(params={"max_tokens": 50})
        _, reply = await a.say(session, "on")
        await a.service.drain(10.0)
        assert (await a.ended(session, reply)).reason == "length"
        assert isinstance(await refused(a.say(session, "more", reply)), OverloadedError)
    assert await store.workers.known() == [], "nothing is left to inherit"


async def test_what_nobody_took_over_from_a_server_that_was_taken_for_dead_goes_on_there(encoders: Encoders) -> None:
    wanted = await undisturbed(encoders, "on", **SAMPLED, max_tokens=200)
    store = MemoryStore()
    async with server(encoders, store, "a") as a:
        session = await a.create(params={**SAMPLED, "max_tokens": 200})
        _, reply = await a.say(session, "on")
        await a.writing(session, reply, 20)
        a.client.pause()
        fence = (await store.acquire(ANN, session, a.owner)).fence
        await store.workers.forget(a.owner)  # by an heir that had looked before the session was noted
        await a.until(lambda: is_held(a, session) and a.service._core.sessions.peek(ANN, session).fence > fence)
        a.client.resume()
        await a.ended(session, reply)
        assert a.text(session, reply) == wanted
        assert (ANN, session) in await store.workers.noted(a.owner)
        await a.idle()


async def test_a_write_whose_answer_comes_after_its_lease_was_lost_is_not_waited_for(encoders: Encoders) -> None:
    store = MemoryStore()
    async with server(encoders, store, "a") as a:
        session = await a.create()
        state = await store.load(ANN, session)
        assert state is not None
        told: list[Any] = []
        live = LiveSession(state, lambda *event: told.append(event))
        live.lose()
        event = SessionUpdated(session=session, title="late")
        with pytest.raises(LeaseLostError):
            async with asyncio.timeout(5):
                await live.delivered(live.seq + 2, [event], lambda: told.append("applied"))
        live.deliver(live.seq + 1, [event], lambda: told.append("applied"))
        assert told == [], "whoever follows is told by what the store has"
