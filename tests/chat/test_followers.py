"""Who follows a session that another server holds or has taken over: all of it in order, or sent away to come back."""

from __future__ import annotations

import asyncio
import copy

import pytest

from chatserve.chat.events import AnyEvent
from chatserve.types import SessionId, UserId
from tests.chat.harness import ANN, Encoders
from tests.chat.servers import SAMPLED, agree, server, undisturbed
from tests.fakes.memory_store import MemoryStore

pytestmark = pytest.mark.usefixtures("impatient")


async def test_an_answer_comes_before_the_events_that_a_take_over_finds(encoders: Encoders) -> None:
    """The server that did the request dies, and nothing that it said of it was heard."""
    store = MemoryStore()
    a = await server(encoders, store, "a").__aenter__()
    async with server(encoders, store, "b") as b:
        session = await a.create(params={"max_tokens": 3000})
        await b.follow(session)
        _, running = await a.say(session, "holds it")
        await b.writing(session, running)
        b.service._runtime.feed.is_deaf = True
        asking = asyncio.ensure_future(b.say(session, "meanwhile", max_tokens=3))
        await a.until(lambda: len(a.mirrors[session].messages) == 4)
        await a.crash()
        store.workers.die(a.owner)
        _, reply = await asking  # checks the order
        await b.ended(session, reply)
        await b.call("stop_generation", session=session, message=running)
        await agree(b)


async def test_followers_of_what_is_trimmed_are_sent_away_by_a_take_over(encoders: Encoders) -> None:
    store = MemoryStore(event_history=5)
    a = await server(encoders, store, "a").__aenter__()
    async with server(encoders, store, "b") as b:
        session = await a.create(params={"max_tokens": 60})
        await b.follow(session)
        b.service._runtime.feed.is_deaf = True
        _, reply = await a.turn(session, "too much to be caught up with")
        await a.crash()
        store.workers.die(a.owner)
        await b.service._core.sessions.get(ANN, session)
        assert b.broken_off == [session]
        await b.follow(session)
        await b.turn(session, "goes on", reply, max_tokens=2)
        await agree(b)


async def test_what_a_broken_feed_missed_is_read(encoders: Encoders) -> None:
    store = MemoryStore()
    async with server(encoders, store, "a") as a, server(encoders, store, "b") as b:
        session = await a.create(params={"max_tokens": 2000})
        await b.follow(session)
        _, reply = await a.say(session, "on")
        feed = b.service._runtime.feed
        for _ in range(5):
            seen = len(b.text(session, reply)) if reply in b.mirrors[session].messages else 0
            feed.is_deaf = True
            length = len(a.text(session, reply)) if reply in a.mirrors[session].messages else 0
            await a.writing(session, reply, length + 20)
            feed.recover()
            await b.until(lambda seen=seen: reply in b.mirrors[session].messages and len(b.text(session, reply)) > seen)
        feed.is_deaf = True
        await a.call("stop_generation", session=session, message=reply)
        feed.recover()
        await b.ended(session, reply)
        await agree(a, b)
        assert not b.broken_off


async def test_followers_of_what_is_trimmed_are_sent_away(encoders: Encoders) -> None:
    store = MemoryStore(event_history=5)
    async with server(encoders, store, "a") as a, server(encoders, store, "b") as b:
        session = await a.create(params={"max_tokens": 60})
        await b.follow(session)
        feed = b.service._runtime.feed
        feed.is_deaf = True
        await a.turn(session, "too much to be caught up with")
        feed.recover()
        await b.until(lambda: b.broken_off == [session])
        await b.follow(session)
        await agree(a, b)


async def test_followers_of_what_cannot_be_read_are_sent_away_and_hear_all_when_they_are_back(
    encoders: Encoders, caplog: pytest.LogCaptureFixture
) -> None:
    class Damaged(MemoryStore):
        is_damaged = False

        async def events(self, user: UserId, session: SessionId, after: int) -> list[AnyEvent] | None:
            if self.is_damaged:
                raise ValueError("this is no event")
            return await super().events(user, session, after)

    store = Damaged()
    async with server(encoders, store, "a") as a, server(encoders, store, "b") as b:
        session = await a.create(params={"max_tokens": 2000})
        await b.follow(session)
        _, reply = await a.say(session, "on")
        await b.writing(session, reply, 20)
        store.is_damaged = True
        b.service._runtime.feed.is_deaf = True
        b.service._runtime.feed.recover()
        await b.until(lambda: b.broken_off == [session])
        assert "this is no event" in caplog.text
        store.is_damaged = False
        await b.follow(session)
        await a.call("stop_generation", session=session, message=reply)
        await b.ended(session, reply)
        await agree(a, b)


async def test_a_store_that_lost_its_last_writes_is_believed(encoders: Encoders) -> None:
    """As after a failover: a replica becomes the primary before it has heard of everything."""
    wanted = await undisturbed(encoders, "on", **SAMPLED, max_tokens=200)
    store = MemoryStore()
    async with server(encoders, store, "a") as a:
        session = await a.create(params={**SAMPLED, "max_tokens": 200})
        lost = await a.create(params={"max_tokens": 3})
        _, reply = await a.say(session, "on")
        await a.writing(session, reply, 20)
        older = copy.deepcopy(store._sessions)
        await a.turn(lost, "never happened")
        await a.writing(session, reply, 60)
        a.client.pause()
        shown = {name: a.mirrors[name].seq for name in (session, lost)}
        store._sessions = older
        store.feeds.interrupt()
        await a.until(lambda: set(a.broken_off) == {session, lost})
        a.client.resume()
        await a.follow(session)
        await a.follow(lost)
        await a.ended(session, reply)
        assert a.text(session, reply) == wanted
        assert not a.mirrors[lost].messages
        for name, seq in shown.items():
            assert a.mirrors[name].seq > seq, "no number is used again"
            assert await a.service.replay(ANN, name, seq) is None, "whoever saw what is lost gets a snapshot"
        await a.turn(lost, "happened", max_tokens=2)
        await agree(a)
        await a.idle()
