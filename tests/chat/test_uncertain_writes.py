"""Writes of which nobody knows whether they were done: each is done once, and nothing waits for it in vain."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import msgspec
import pytest

from chatserve.chat import sessions
from chatserve.chat.store import Committed, Delta, SessionState, Transaction
from chatserve.errors import StoreUnavailableError
from chatserve.types import MessageId, SessionId
from tests.chat.bad_stores import FlakyStore, GatedStore, LosesAnEnd, LossyStore
from tests.chat.harness import ANN, Encoders, Harness, refused, view_of
from tests.fakes.memory_store import MemoryStore


async def test_a_turn_of_uncertain_fate_is_told_though_text_before_it_is_still_uncertain(encoders: Encoders) -> None:
    """The text's writer may ask again only after the session was read again: what follows its text waits for it."""
    store = LossyStore()
    async with Harness(encoders["chatml"], store=store) as harness:
        session = await harness.create()
        _, reply = await harness.say(session, "on", max_tokens=3000)
        await harness.writing(session, reply, 5)
        live = harness.service._core.sessions.peek(ANN, session)
        store.lossy = True
        await harness.until(lambda: store.num_kept["append"])
        fields = {"session": session, "parent": None, "text": "meanwhile", "params": {"max_tokens": 2}}
        sending = asyncio.ensure_future(harness.call("send_message", id_="same", **fields))
        await harness.until(lambda: store.num_kept["commit"])
        store.lossy = False
        store.may_append.clear()
        store.lost.set()
        assert isinstance(await refused(sending), StoreUnavailableError)
        await harness.until(lambda: harness.health[-1] == ("store", True) and not live.is_uncertain)
        store.may_append.set()
        ack = await harness.call("send_message", id_="same", **fields)
        await harness.ended(session, ack["reply"])
        await harness.call("stop_generation", session=session, message=reply)
        await harness.turn(session, "goes on", ack["reply"], max_tokens=2)
        await harness.idle()
        await harness.check()


async def begin_writing(harness: Harness) -> tuple[SessionId, MessageId, MessageId]:
    """A session in which a drawn answer is being written, the question, and the answer."""
    session = await harness.create(params={"temperature": 1.0, "seed": 3, "max_tokens": 100})
    message, reply = await harness.say(session, "on")
    await harness.writing(session, reply, 5)
    return session, message, reply


async def end_undisturbed(harness: Harness, session: SessionId, message: MessageId, reply: MessageId) -> None:
    """The answer ends with the text that it has when nothing happens."""
    await harness.ended(session, reply)
    again = await harness.regenerate(session, message)
    await harness.ended(session, again)
    assert harness.text(session, reply) == harness.text(session, again)
    await harness.idle()
    await harness.check()


async def test_an_answer_goes_on_after_a_late_write_of_the_same_lease(encoders: Encoders) -> None:
    """A session that is lost and asked for again is ours under the same fence: what was on its way then still lands."""
    store = GatedStore()
    async with Harness(encoders["chatml"], store=store) as harness:
        session, message, reply = await begin_writing(harness)
        held = harness.service._core.sessions
        before = await held.get(ANN, session)
        store.gate_of_text = gate = asyncio.Semaphore(0)
        await harness.until(lambda: store.waiting and before.generations[reply].num_unsent > 3)
        gate.release()  # the next write has all that has gathered, and will not be cut at the same place again
        await harness.until(lambda: store.waiting and len(store.waiting[0].token_ids) > 3)
        held.tenure.lose(ANN, session)
        after = await held.get(ANN, session)
        assert after.fence == before.fence
        store.gate_of_text = None
        gate.release()
        await end_undisturbed(harness, session, message, reply)


async def test_a_doubt_of_what_was_read_again_is_no_doubt_of_what_came_after_it(encoders: Encoders) -> None:
    store = MemoryStore()
    async with Harness(encoders["chatml"], store=store) as harness:
        session, message, reply = await begin_writing(harness)
        held = harness.service._core.sessions
        before = await held.get(ANN, session)
        held.tenure.read_again(before)
        after = await held.get(ANN, session)
        assert after.fence > before.fence
        await held.tenure.check_lease(before)
        assert held.peek(ANN, session) is after
        await end_undisturbed(harness, session, message, reply)


async def test_text_goes_on_while_the_reply_of_an_earlier_write_is_on_its_way(encoders: Encoders) -> None:
    class Overtaken(MemoryStore):
        """The reply to the next commit comes after those to some later appends."""

        is_next = False
        num_until = sys.maxsize
        overtaken = asyncio.Event()

        async def commit(self, change: Transaction) -> Committed:
            is_next, self.is_next = self.is_next, False
            committed = await super().commit(change)
            if is_next:
                self.num_until = self.num_appends + 4
                await self.overtaken.wait()
            return committed

        async def append(self, deltas: Sequence[Delta]) -> list[int | None]:
            seqs = await super().append(deltas)
            if self.num_appends >= self.num_until:
                self.overtaken.set()
            return seqs

    store = Overtaken()
    async with Harness(encoders["chatml"], store=store) as harness:
        session = await harness.create()
        _, reply = await harness.say(session, "on", max_tokens=400)
        await harness.writing(session, reply, 5)
        store.is_next = True
        _, two = await harness.say(session, "meanwhile", max_tokens=2)
        await harness.ended(session, reply)
        await harness.ended(session, two)
        stored = await store.load(ANN, session)
        assert view_of(stored) == harness.mirrors[session].view()
        assert next(m for m in stored.messages if m.message == reply).usage.completion_tokens == 400
        await harness.idle()
        await harness.check()


async def test_a_request_that_waits_behind_an_end_of_uncertain_fate_is_done(encoders: Encoders) -> None:
    """It comes to hold the session's lock while that end, which it follows, is still to be told."""
    store = LosesAnEnd()
    async with Harness(encoders["chatml"], store=store) as harness:
        session = await harness.create()
        _, reply = await harness.say(session, "on", max_tokens=20)
        store.victim = reply
        await harness.until(lambda: not store.victim)
        renaming = asyncio.ensure_future(harness.call("update_session", session=session, title="new"))
        live = harness.service._core.sessions.peek(ANN, session)
        await harness.until(lambda: live.lock._waiters)
        store.lost.set()
        async with asyncio.timeout(5):
            await renaming
        await harness.ended(session, reply)
        state = await harness.service.snapshot(ANN, session)
        assert [m.status for m in state.messages] == ["done", "done"]
        await harness.until(lambda: harness.health[-1] == ("store", True))
        await harness.turn(session, "goes on", reply, max_tokens=2)
        await harness.idle()
        await harness.check()


async def test_an_end_waits_for_its_text_though_another_end_is_of_uncertain_fate(encoders: Encoders) -> None:
    store = LosesAnEnd()
    async with Harness(encoders["chatml"], store=store) as harness:
        session = await harness.create()
        message, long = await harness.say(session, "on", max_tokens=60)
        await harness.writing(session, long, 5)
        ack = await harness.call("regenerate_message", session=session, message=message, params={"max_tokens": 5})
        store.victim = ack["reply"]
        engine = harness.client.engine
        await harness.until(lambda: not engine.has_work and not store.victim)
        for _ in range(50):
            await asyncio.sleep(0)  # the long one has all its text stored, and waits for the short one's end
        store.lost.set()
        assert (await harness.ended(session, long)).usage.completion_tokens == 60
        await harness.ended(session, ack["reply"])
        stored = await store.load(ANN, session)
        assert view_of(stored) == harness.mirrors[session].view()
        assert len(next(m for m in stored.messages if m.message == long).token_ids) == 60
        await harness.idle()
        await harness.check()


async def test_a_session_of_uncertain_fate_stays_in_memory_until_it_is_known(
    encoders: Encoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_IDLE_SESSIONS", 1)
    store = FlakyStore()
    async with Harness(encoders["chatml"], store=store) as harness:
        session = await harness.create()
        harness.service.set_subscribers(session, 0)
        store.plan = ["done"]
        fields = {"session": session, "parent": None, "text": "once", "params": {"max_tokens": 4}}
        assert isinstance(await refused(harness.call("send_message", id_="same", **fields)), StoreUnavailableError)
        held = harness.service._core.sessions
        held.add(
            SessionState(
                record=msgspec.structs.replace(held.peek(ANN, session).record, session="s"), seq=0, messages=()
            )
        )
        await harness.until(lambda: harness.health[-1] == ("store", True))
        ack = await harness.call("send_message", id_="same", **fields)
        await harness.ended(session, ack["reply"])


@pytest.mark.parametrize("fate", ["lost", "done"])
async def test_a_turn_whose_write_was_not_answered_may_be_sent_again_and_happens_once(
    encoders: Encoders, fate: str
) -> None:
    store = FlakyStore()
    async with Harness(encoders["chatml"], store=store) as harness:
        session = await harness.create()
        fields = {"session": session, "parent": None, "text": "once", "params": {"max_tokens": 4}}
        store.plan = [fate]
        assert isinstance(await refused(harness.call("send_message", id_="same", **fields)), StoreUnavailableError)
        await harness.until(lambda: harness.health and harness.health[-1] == ("store", True))
        ack = await harness.call("send_message", id_="same", **fields)
        await harness.ended(session, ack["reply"])
        assert len(harness.mirrors[session].messages) == 2
        _, two = await harness.turn(session, "more", ack["reply"], max_tokens=2)
        assert harness.mirrors[session].messages[two]["status"] == "done"
        await harness.idle()
        await harness.check()


@pytest.mark.parametrize("fate", ["lost", "done"])
@pytest.mark.parametrize("at", range(0, 14, 2))
async def test_text_is_neither_lost_nor_doubled_whichever_write_is_not_answered(
    encoders: Encoders, fate: str, at: int
) -> None:
    store = FlakyStore()
    async with Harness(encoders["chatml"], store=store) as harness:
        session = await harness.create(params={"temperature": 1.0, "seed": 9, "max_tokens": 12})
        message, reply = await harness.say(session, "go")
        store.plan = [*["ok"] * at, fate, fate, "ok", fate]
        await harness.ended(session, reply)
        store.plan = []
        await harness.until(lambda: not harness.health or harness.health[-1] == ("store", True))
        again = await harness.regenerate(session, message)
        await harness.ended(session, again)
        assert harness.text(session, again) == harness.text(session, reply)
        await harness.idle()
        await harness.check()
        stored = await store.load(ANN, session)
        assert view_of(stored) == harness.mirrors[session].view()
