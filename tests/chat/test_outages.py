"""The store goes away, or the process does: what was answered stays, and the rest is refused or goes on."""

from __future__ import annotations

import asyncio

import pytest

from chatserve.chat import runtime, service
from chatserve.errors import StoreUnavailableError
from chatserve.types import SessionId
from tests.chat.bad_stores import SlowStore
from tests.chat.harness import ANN, Encoders, Harness, refused
from tests.fakes.memory_store import MemoryStore


async def test_while_the_store_is_away_generation_goes_on_and_is_shown_afterwards(encoders: Encoders) -> None:
    store = MemoryStore()
    async with Harness(encoders["chatml"], store=store) as harness:
        session = await harness.create(params={"temperature": 1.0, "seed": 3, "max_tokens": 150})
        message, reply = await harness.say(session, "on")
        await harness.writing(session, reply, 10)
        store.fail()
        await harness.until(lambda: ("store", False) in harness.health)
        shown = harness.text(session, reply)
        for name, fields in (
            ("send_message", {"session": session, "parent": None, "text": "x"}),
            ("create_session", {}),
            ("delete_session", {"session": session}),
        ):
            error = await refused(harness.call(name, **fields))
            assert isinstance(error, StoreUnavailableError)
            assert error.retryable
        engine = harness.client.engine
        await harness.until(lambda: not engine.has_work)
        assert harness.text(session, reply) == shown
        assert reply not in harness.mirrors[session].ends
        store.heal()
        end = await harness.ended(session, reply)
        assert harness.health[-1] == ("store", True)
        assert end.status == "done"
        again = await harness.regenerate(session, message)
        await harness.ended(session, again)
        assert harness.text(session, again) == harness.text(session, reply)
        await harness.check()


async def test_a_session_is_in_memory_once_whichever_reads_fail(encoders: Encoders) -> None:
    store = SlowStore()
    async with Harness(encoders["chatml"], store=store) as harness:
        held = harness.service._core.sessions
        session = SessionId((await harness.call("create_session"))["session"])
        del held._live[session]  # as if it had rested
        one, two = (asyncio.ensure_future(held.get(ANN, session)) for _ in range(2))
        await harness.until(lambda: len(store.reads) == 1)
        store.reads[0].set_exception(StoreUnavailableError("no answer"))
        assert isinstance(await refused(one), StoreUnavailableError)
        three = asyncio.ensure_future(held.get(ANN, session))
        await harness.until(lambda: len(store.reads) == 3)
        for read in store.reads[1:]:
            read.set_result(None)
        assert await two is await three


async def test_an_outage_that_is_over_at_once_is_no_answer_to_who_waits(encoders: Encoders) -> None:
    store = MemoryStore()
    async with Harness(encoders["chatml"], store=store) as harness:
        health = harness.service._runtime.health
        waiting = asyncio.ensure_future(health.while_up(asyncio.Event().wait()))
        await asyncio.sleep(0)
        health._down.set()  # and the store is up again before the one who waits has its turn
        assert isinstance(await refused(waiting), StoreUnavailableError)
        health._down.clear()


async def test_a_prober_that_dies_of_a_bug_is_noticed(encoders: Encoders, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(MemoryStore):
        async def ping(self) -> None:
            raise RuntimeError("a bug")

    harness = Harness(encoders["chatml"], store=Broken())
    await harness.client.connect()
    await harness.service.start()
    harness.service._runtime.health.report_down(StoreUnavailableError("its disk is full"))
    assert "its disk is full" in caplog.text, "whoever runs the server learns what to do"
    await harness.until(lambda: harness.crashes)
    await harness.service.close()
    await harness.client.close()


async def test_stop_is_refused_as_retryable_when_its_end_cannot_be_stored(encoders: Encoders) -> None:
    store = MemoryStore()
    async with Harness(encoders["chatml"], store=store) as harness:
        session = await harness.create()
        _, reply = await harness.say(session, "on", max_tokens=3000)
        await harness.writing(session, reply)
        stopping = asyncio.ensure_future(harness.call("stop_generation", session=session, message=reply))
        await asyncio.sleep(0)
        store.fail()
        assert isinstance(await refused(stopping), StoreUnavailableError)
        store.heal()
        assert (await harness.ended(session, reply)).reason in {"cancelled", "stop"}


async def test_after_a_crash_unfinished_answers_are_interrupted_if_so_wished(encoders: Encoders) -> None:
    store = MemoryStore()
    before = Harness(encoders["chatml"], store=store, place="here")
    await before.__aenter__()
    session = await before.create()
    _, kept = await before.turn(session, "kept", max_tokens=5)
    _, reply = await before.say(session, "cut short", kept, max_tokens=3000)
    await before.writing(session, reply, 20)
    await before.crash()
    shown = before.text(session, reply)
    async with Harness(encoders["chatml"], store=store, place="here", resumes=False) as after:
        await after.until(lambda: after.service.num_generations == 0)
        replayed = await after.service.replay(ANN, session, before.mirrors[session].seq)
        mirror = before.mirrors[session]
        for event in replayed:
            mirror.take(event)
        after.mirrors[session] = mirror
        after.service.set_subscribers(session, 1)
        assert [end.reason for end in mirror.ends[reply]] == ["interrupted"]
        assert mirror.messages[reply]["text"].startswith(shown)
        assert mirror.messages[reply]["status"] == "interrupted"
        await after.check()
        await after.call("continue_message", session=session, message=reply, params={"max_tokens": 3})
        await after.ended(session, reply, times=2)
        await after.turn(session, "sending works", reply, max_tokens=2)
        await after.idle()
        await after.check()


async def test_closing_does_not_wait_for_a_request_that_hangs(
    encoders: Encoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (service, runtime):
        monkeypatch.setattr(module, "CLOSE_TIMEOUT_S", 0.01)
    store = MemoryStore()
    async with Harness(encoders["chatml"], store=store) as harness:
        session = await harness.create()
        store.gate = asyncio.Event()
        hanging = asyncio.ensure_future(harness.call("update_session", session=session, title="never stored"))
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await hanging


async def test_start_says_that_the_store_is_away(encoders: Encoders) -> None:
    store = MemoryStore()
    store.fail()
    harness = Harness(encoders["chatml"], store=store)
    with pytest.raises(StoreUnavailableError):
        await harness.service.start()
    await harness.service.close()
