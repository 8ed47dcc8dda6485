"""The engine dies, the store goes away, the process is killed: no text is lost, doubled or left spinning."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import msgspec
import pytest

from chatserve.chat import runtime, service, sessions
from chatserve.chat.prompt import PromptEncoder
from chatserve.chat.store import Committed, Delta, SessionState, Transaction
from chatserve.engine.paths import PathTable
from chatserve.errors import EngineUnavailableError, StoreUnavailableError
from chatserve.types import SessionId, UserId
from tests.chat.harness import ANN, Harness, Talkative, refused, view_of
from tests.fakes.memory_store import MemoryStore

Encoders = dict[str, PromptEncoder]


# --- the engine -------------------------------------------------------------------------------------------------------


async def test_a_dead_engines_answers_go_on_as_if_it_had_lived(encoders: Encoders) -> None:
    encoder = encoders["chatml"]
    async with Harness(encoder) as harness:
        session = await harness.create(params={"temperature": 1.0, "seed": 5, "max_tokens": 200})
        message, reply = await harness.say(session, "a long answer please", stop=["never said"])
        await harness.writing(session, reply, 20)
        harness.client.kill()
        await harness.until(lambda: ("engine", False) in harness.health)
        assert isinstance(await refused(harness.say(session, "meanwhile")), EngineUnavailableError)
        harness.client.revive(harness.make_engine(Talkative(encoder)))
        end = await harness.ended(session, reply)
        assert ("engine", True) in harness.health
        assert len(harness.mirrors[session].starts[reply]) == 1
        again = await harness.regenerate(session, message, stop=["never said"])
        other = await harness.ended(session, again)
        assert harness.text(session, again) == harness.text(session, reply)
        assert (end.reason, end.usage.completion_tokens) == (other.reason, other.usage.completion_tokens)
        assert end.usage.prompt_tokens == other.usage.prompt_tokens
        await harness.idle()
        await harness.check()


async def test_what_ran_at_two_deaths_is_not_tried_again_but_what_waited_is(encoders: Encoders) -> None:
    encoder = encoders["chatml"]
    async with Harness(encoder, max_running=1) as harness:
        session = await harness.create(params={"max_tokens": 3000})
        _, killer = await harness.say(session, "kills the engine")
        _, waits = await harness.say(session, "waits", max_tokens=3)
        for _ in range(2):
            length = len(harness.text(session, killer))
            await harness.writing(session, killer, length + 5)
            harness.client.kill()
            await harness.until(lambda: harness.client.info is None)
            harness.client.revive(harness.make_engine(Talkative(encoder)))
        end = await harness.ended(session, killer)
        assert (end.reason, end.status, end.code) == ("error", "failed", "engine_unavailable")
        assert "2 times" in end.detail
        assert harness.text(session, killer)
        assert (await harness.ended(session, waits)).status == "done"
        await harness.idle()
        await harness.check()


async def test_what_kills_the_engine_before_it_says_a_word_is_not_tried_for_ever(encoders: Encoders) -> None:
    encoder = encoders["chatml"]
    async with Harness(encoder) as harness:
        session = await harness.create()
        harness.client.pause()  # no step ends: the engine dies of the one that admits it
        _, killer = await harness.say(session, "kills the engine in its first step")
        for _ in range(2):
            harness.client.kill()
            await harness.until(lambda: harness.client.info is None)
            harness.client.revive(harness.make_engine(Talkative(encoder)))
            await harness.until(lambda: harness.client.info is not None)
        end = await harness.ended(session, killer)
        assert (end.reason, end.code) == ("error", "engine_unavailable")
        harness.client.resume()
        await harness.turn(session, "sending works", killer, max_tokens=2)
        await harness.idle()
        await harness.check()


async def test_stop_works_while_the_engine_is_away(encoders: Encoders) -> None:
    async with Harness(encoders["chatml"]) as harness:
        session = await harness.create()
        _, reply = await harness.say(session, "on", max_tokens=3000)
        await harness.writing(session, reply, 5)
        harness.client.kill()
        await harness.until(lambda: ("engine", False) in harness.health)
        await harness.call("stop_generation", session=session, message=reply)
        assert harness.mirrors[session].ends[reply][0].reason == "cancelled"
        harness.client.revive(harness.make_engine(Talkative(encoders["chatml"])))
        await harness.turn(session, "goes on", reply, max_tokens=2)
        await harness.idle()


async def test_an_engine_that_dies_while_it_is_told_to_stop_ends_it_too(encoders: Encoders) -> None:
    async with Harness(encoders["chatml"]) as harness:
        session = await harness.create()
        _, reply = await harness.say(session, "on", max_tokens=3000)
        await harness.writing(session, reply, 5)
        harness.client.pause()
        stopping = asyncio.ensure_future(harness.call("stop_generation", session=session, message=reply))
        await asyncio.sleep(0)
        harness.client.kill()
        await stopping
        assert harness.mirrors[session].ends[reply][0].reason == "cancelled"


async def test_a_turn_that_a_new_engine_knows_nothing_of_sends_all_ids(encoders: Encoders) -> None:
    encoder = encoders["chatml"]
    async with Harness(encoder) as harness:
        session = await harness.create(params={"max_tokens": 5})
        _, one = await harness.turn(session, "first")
        harness.client.kill()
        harness.client.revive(harness.make_engine(Talkative(encoder)))
        await harness.until(lambda: harness.client.info is not None)
        _, two = await harness.turn(session, "second", one)
        assert harness.started(session, two).cached_tokens == 0


async def test_a_path_that_the_engine_forgot_is_sent_again(encoders: Encoders) -> None:
    """`need_tokens` is between us and the engine: nobody hears of it."""
    async with Harness(encoders["chatml"], paths=PathTable(max_tokens=40)) as harness:
        session = await harness.create(params={"max_tokens": 5, "temperature": 0})
        _, one = await harness.turn(session, "first")
        other = await harness.create(params={"max_tokens": 5})
        await harness.turn(other, "pushes the first out of the table")
        _, two = await harness.turn(session, "second", one)
        started = harness.started(session, two)
        assert started.cached_tokens > 0, "it is matched by tokens"
        assert harness.mirrors[session].ends[two][0].status == "done"
        await harness.idle()


async def test_an_engine_that_never_comes_back_interrupts_what_waits_for_it(encoders: Encoders) -> None:
    async with Harness(encoders["chatml"], engine_patience_s=0.0) as harness:
        session = await harness.create()
        _, reply = await harness.say(session, "on", max_tokens=3000)
        await harness.writing(session, reply, 5)
        harness.client.kill()
        end = await harness.ended(session, reply)
        assert (end.reason, end.status) == ("interrupted", "interrupted")
        assert harness.text(session, reply)
        harness.client.revive(harness.make_engine(Talkative(encoders["chatml"])))
        await harness.until(lambda: harness.client.info is not None)
        await harness.turn(session, "goes on", reply, max_tokens=2)
        await harness.idle()
        await harness.check()


# --- the store --------------------------------------------------------------------------------------------------------


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


class FlakyStore(MemoryStore):
    """Fails some calls, before or after it has done them: a caller cannot know which."""

    def __init__(self) -> None:
        super().__init__()
        self.plan: list[str] = []

    async def _flaky(self, work: object) -> object:
        fate = self.plan.pop(0) if self.plan else "ok"
        if fate == "lost":
            work.close()
            raise StoreUnavailableError("no answer")
        result = await work
        if fate == "done":
            raise StoreUnavailableError("no answer")
        return result

    async def commit(self, change: Transaction) -> Committed:
        return await self._flaky(super().commit(change))

    async def append(self, deltas: Sequence[Delta]) -> list[int | None]:
        return await self._flaky(super().append(deltas))


class LossyStore(MemoryStore):
    """Does what it is asked while `lossy` and keeps the replies until `lost`, when all of them fail at once."""

    def __init__(self) -> None:
        super().__init__()
        self.lossy = False
        self.num_kept = {"append": 0, "commit": 0}
        self.lost = asyncio.Event()
        self.may_append = asyncio.Event()
        self.may_append.set()

    async def commit(self, change: Transaction) -> Committed:
        lossy, committed = self.lossy, await super().commit(change)
        await self._reply("commit", lossy=lossy)
        return committed

    async def append(self, deltas: Sequence[Delta]) -> list[int | None]:
        await self.may_append.wait()
        lossy, seqs = self.lossy, await super().append(deltas)
        await self._reply("append", lossy=lossy)
        return seqs

    async def _reply(self, kind: str, *, lossy: bool) -> None:
        if lossy:
            self.num_kept[kind] += 1
            await self.lost.wait()
            raise StoreUnavailableError("no answer")


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


class GatedStore(MemoryStore):
    """Writes text only as often as it is told to, while there is a `gate_of_text`."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_of_text: asyncio.Semaphore | None = None
        self.waiting: Sequence[Delta] = ()

    async def append(self, deltas: Sequence[Delta]) -> list[int | None]:
        if self.gate_of_text is not None:
            self.waiting = deltas
            await self.gate_of_text.acquire()
            self.waiting = ()
        return await super().append(deltas)


async def test_an_answer_goes_on_after_a_late_write_of_the_same_lease(encoders: Encoders) -> None:
    """A session that is lost and asked for again is ours under the same fence: what was on its way then still lands."""
    store = GatedStore()
    async with Harness(encoders["chatml"], store=store) as harness:
        session = await harness.create(params={"temperature": 1.0, "seed": 3, "max_tokens": 100})
        message, reply = await harness.say(session, "on")
        await harness.writing(session, reply, 5)
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
        await harness.ended(session, reply)
        again = await harness.regenerate(session, message)
        await harness.ended(session, again)
        assert harness.text(session, reply) == harness.text(session, again)
        await harness.idle()
        await harness.check()


async def test_a_doubt_of_what_was_read_again_is_no_doubt_of_what_came_after_it(encoders: Encoders) -> None:
    store = MemoryStore()
    async with Harness(encoders["chatml"], store=store) as harness:
        session = await harness.create(params={"temperature": 1.0, "seed": 3, "max_tokens": 100})
        message, reply = await harness.say(session, "on")
        await harness.writing(session, reply, 5)
        held = harness.service._core.sessions
        before = await held.get(ANN, session)
        held.tenure.read_again(before)
        after = await held.get(ANN, session)
        assert after.fence > before.fence
        await held.tenure.check_lease(before)
        assert held.peek(ANN, session) is after
        await harness.ended(session, reply)
        again = await harness.regenerate(session, message)
        await harness.ended(session, again)
        assert harness.text(session, reply) == harness.text(session, again)
        await harness.idle()
        await harness.check()


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


class LosesAnEnd(MemoryStore):
    """Stores the end of `victim`, says so only by failing, and that not before `lost`."""

    def __init__(self) -> None:
        super().__init__()
        self.victim = ""
        self.lost = asyncio.Event()

    async def commit(self, change: Transaction) -> Committed:
        committed = await super().commit(change)
        if self.victim and change.write_id == f"end:{self.victim}:0":
            self.victim = ""
            await self.lost.wait()
            raise StoreUnavailableError("no answer")
        return committed


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


class SlowStore(MemoryStore):
    """Reads sessions when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[asyncio.Future[None]] = []

    async def load(self, user: UserId, session: SessionId) -> SessionState | None:
        self.reads.append(asyncio.get_running_loop().create_future())
        await self.reads[-1]
        return await super().load(user, session)


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


# --- the process ------------------------------------------------------------------------------------------------------


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
