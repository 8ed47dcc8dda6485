"""Several servers on one store: one of them holds a session at a time, and whoever asks any of them is served."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from chatserve.errors import ChatError, NotFoundError
from chatserve.types import SessionId
from tests.chat.harness import ANN, BOB, Encoders, refused
from tests.chat.servers import SAMPLED, agree, is_held, server
from tests.fakes.memory_store import MemoryStore

pytestmark = pytest.mark.usefixtures("impatient")


async def test_stop_branch_and_stream_from_either_of_two_servers(encoders: Encoders) -> None:
    store = MemoryStore()
    async with server(encoders, store, "a") as a, server(encoders, store, "b") as b:
        session = await a.create(params={"max_tokens": 3000})
        await b.follow(session)
        message, one = await a.say(session, "from a")
        await b.writing(session, one, 20)
        # A branch from the server that does not hold it, while the first goes on; each is seen by both.
        two = await b.regenerate(session, message)
        await a.writing(session, two, 20)
        await b.writing(session, two, 20)
        assert is_held(a, session)
        assert not is_held(b, session)
        await b.call("stop_generation", session=session, message=one)
        assert b.mirrors[session].ends[one][0].reason == "cancelled", "the answer comes after the end"
        await a.call("stop_generation", session=session, message=two)
        assert a.mirrors[session].ends[two][0].reason == "cancelled"
        three = await b.say(session, "from b", two, max_tokens=5)
        await b.ended(session, three[1])
        await a.ended(session, three[1])
        await b.call("update_session", session=session, title="by b")
        await agree(a, b)
        assert a.mirrors[session].title == "by b"
        await b.call("delete_session", session=session)
        await a.until(lambda: a.mirrors[session].deleted)
        await b.until(lambda: b.mirrors[session].deleted)
        for one_server in (a, b):
            assert isinstance(await refused(one_server.say(session, "late")), NotFoundError)
            await one_server.idle()


async def test_an_answer_comes_before_the_events_of_a_request_that_another_server_does(encoders: Encoders) -> None:
    store = MemoryStore()
    async with server(encoders, store, "a") as a, server(encoders, store, "b") as b:
        session = await a.create(params={"max_tokens": 2000})
        await b.follow(session)
        _, running = await a.say(session, "holds it")
        await b.writing(session, running)
        for turn in range(20):
            order: list[str] = []
            ack: dict[str, Any] = {}

            def answer(fields: dict[str, Any], order: list[str] = order, ack: dict[str, Any] = ack) -> None:
                ack.update(fields)
                order.append("ack")

            took = b.mirrors[session].take

            def take(event: Any, order: list[str] = order, took: Any = took) -> None:
                if type(event).__name__ == "MessageAdded":
                    order.append("event")
                took(event)

            b.mirrors[session].take = take  # type: ignore[method-assign]
            await b.service.send_message(
                ANN, f"r{turn}", answer=answer, session=session, parent=None, text="?", params={"max_tokens": 1}
            )
            await b.ended(session, ack["reply"])
            b.mirrors[session].take = took  # type: ignore[method-assign]
            assert order == ["ack", "event", "event"]
        await a.call("stop_generation", session=session, message=running)
        await agree(a, b)


async def test_an_idle_session_moves_to_whoever_asks_and_stays_where_it_is_followed(encoders: Encoders) -> None:
    store = MemoryStore()
    async with server(encoders, store, "a") as a, server(encoders, store, "b") as b:
        session = await a.create(params={"max_tokens": 4})
        _, one = await a.turn(session, "first")
        await b.follow(session)
        _, two = await b.turn(session, "second", one)
        assert is_held(a, session), "somebody follows it there"
        await a.unfollow(session)
        _, three = await b.turn(session, "third", two)
        assert is_held(b, session)
        assert not is_held(a, session)
        await a.follow(session)
        await a.turn(session, "fourth", three)
        assert is_held(b, session)
        await agree(a, b)


async def test_a_request_sent_at_once_to_both_servers_is_done_once(encoders: Encoders) -> None:
    store = MemoryStore()
    async with server(encoders, store, "a") as a, server(encoders, store, "b") as b:
        creates = [one.call("create_session", id_="new", title="t") for one in (a, b)]
        created = await asyncio.gather(*creates)
        assert created[0] == created[1]
        session = SessionId(created[0]["session"])
        await a.follow(session)
        await b.follow(session)
        fields = {"session": session, "parent": None, "text": "once", "params": {"max_tokens": 3}}
        acks = await asyncio.gather(*(one.call("send_message", id_="double click", **fields) for one in (a, b, a)))
        assert acks[0] == acks[1] == acks[2]
        await a.ended(session, acks[0]["reply"])
        await b.ended(session, acks[0]["reply"])
        assert len(a.mirrors[session].messages) == 2
        await agree(a, b)


async def test_another_users_session_is_not_found_on_any_server(encoders: Encoders) -> None:
    store = MemoryStore()
    async with server(encoders, store, "a") as a, server(encoders, store, "b") as b:
        session = await a.create(params={"max_tokens": 500})
        _, reply = await a.say(session, "secret")
        for one in (a, b):
            await one.service.follow(BOB, session)
            assert isinstance(await refused(one.service.snapshot(BOB, session)), NotFoundError)
            assert await one.service.replay(BOB, session, 0) is None
            assert isinstance(await refused(one.say(session, "mine", user=BOB)), NotFoundError)
            assert isinstance(
                await refused(one.call("stop_generation", user=BOB, session=session, message=reply)), NotFoundError
            )
            one.service.unfollow(BOB, session)
        await a.writing(session, reply, 20)
        assert session not in b.mirrors


async def test_whoever_follows_anywhere_keeps_an_answer_going(encoders: Encoders) -> None:
    store = MemoryStore()
    async with server(encoders, store, "a", orphan_grace_s=0.0) as a, server(encoders, store, "b") as b:
        session = await a.create(params={"max_tokens": 3900})
        await b.follow(session)
        _, reply = await a.say(session, "on")
        await a.writing(session, reply)
        await a.unfollow(session)
        a.client.pause()
        for _ in range(200):
            await asyncio.sleep(0)  # long enough for the grace, which is none
        a.client.resume()
        length = len(b.text(session, reply))
        await b.writing(session, reply, length + 20)
        mirror = b.mirrors[session]
        await b.unfollow(session)
        state = await b.service.snapshot(ANN, session)
        async with asyncio.timeout(5):
            while state.messages[-1].status == "generating":
                state = await b.service.snapshot(ANN, session)
        assert state.messages[-1].status == "stopped"
        assert state.messages[-1].text.startswith(mirror.messages[reply]["text"])


async def test_every_server_tells_its_sockets_of_changed_lists(encoders: Encoders) -> None:
    store = MemoryStore()
    async with server(encoders, store, "a") as a, server(encoders, store, "b") as b:
        b.service.user_came(ANN)
        await b.until(lambda: ANN in b.service._runtime.feed.users)
        session = await a.create(title="one")
        await a.call("update_session", session=session, title="two")
        await a.call("delete_session", session=session)
        told = [(session, "one", False), (session, "two", False), (session, None, True)]
        await b.until(lambda: b.changed == told)
        assert a.changed == told, "once each"
        b.service.user_left(ANN)
        await b.until(lambda: not b.service._runtime.feed.users)


@pytest.mark.parametrize("seed", range(4))
async def test_servers_that_come_and_go_lose_and_double_nothing(encoders: Encoders, seed: int) -> None:
    """Random requests at random servers, any of which may be killed, taken for dead or deafened at any time."""
    choose = random.Random(seed)
    store = MemoryStore()
    alive = [await server(encoders, store, place).__aenter__() for place in ("a", "b", "c")]
    acked: list[tuple[str, str]] = []
    refusals: list[ChatError] = []
    session = SessionId((await alive[0].call("create_session", params={"max_tokens": 12, **SAMPLED}))["session"])
    for one in alive:
        await one.follow(session)

    async def ask(number: int) -> None:
        one = choose.choice(alive)
        replies = [m for m, fields in one.mirrors[session].messages.items() if fields["role"] == "assistant"]
        kind = choose.choice(["send", "send", "stop", "regenerate", "select"]) if replies else "send"
        try:
            if kind == "send":
                parent = choose.choice([None, *replies])
                acked.append(await one.say(session, f"text {number}", parent))
            elif kind == "regenerate":
                acked.append(("", await one.regenerate(session, choose.choice(replies))))
            elif kind == "stop":
                await one.call("stop_generation", session=session, message=choose.choice(replies))
            else:
                await one.call("select_branch", session=session, message=choose.choice(replies))
        except ChatError as error:
            refusals.append(error)

    try:
        for number in range(25):
            requests = [asyncio.ensure_future(ask(number)) for _ in range(2)]
            for _ in range(choose.randrange(40)):
                await asyncio.sleep(0)
            fate = choose.random()
            victim = choose.choice(alive)
            if fate < 0.15:
                place = victim.owner.partition("/")[0]
                for request in requests:
                    request.cancel()
                await asyncio.gather(*requests, return_exceptions=True)
                await victim.crash()
                alive[alive.index(victim)] = heir = await server(encoders, store, place).__aenter__()
                await heir.follow(session)
            elif fate < 0.3:
                store.workers.die(victim.owner)
            elif fate < 0.45:
                victim.service._runtime.feed.is_deaf = True
                await asyncio.sleep(0)
                victim.service._runtime.feed.recover()
            await asyncio.gather(*requests, return_exceptions=True)
        for one in alive:
            async with asyncio.timeout(20):
                while any(m["status"] == "generating" for m in one.mirrors[session].messages.values()):
                    one.news.clear()
                    await one.news.wait()
        assert all(error.retryable or error.code == "busy" for error in refusals), refusals
        await agree(*alive)
        state = await alive[0].service.snapshot(ANN, session)
        ids = [m.message for m in state.messages]
        assert len(set(ids)) == len(ids)
        for message, reply in acked:
            assert reply in ids
            assert not message or message in ids
        events = await store.events(ANN, session, 0)
        assert events is not None
        assert [event.seq for event in events] == list(range(1, state.seq + 1))
        ends = [e.message for e in events if type(e).__name__ == "GenerationEnd"]
        assert sorted(ends) == sorted(m.message for m in state.messages if m.role == "assistant")
        for one in alive:
            await one.idle()
    finally:
        for one in alive:
            await one.__aexit__()


async def test_old_conversations_expire_unless_something_happens_in_them(encoders: Encoders) -> None:
    store = MemoryStore()
    async with server(encoders, store, "a", expiry_s=100.0) as a, server(encoders, store, "b", expiry_s=100.0) as b:
        a.now = b.now = 1000.0
        old, running, watched, elsewhere = [await a.create(params={"max_tokens": 3900}) for _ in range(4)]
        _, reply = await a.say(running, "on")
        await a.writing(running, reply)
        a.now = b.now = 1050.0
        young = await a.create()
        for session in (old, running, elsewhere, young):
            await a.unfollow(session)
        await b.follow(elsewhere)
        await b.call("update_session", session=elsewhere, params={"max_tokens": 1})
        a.now = b.now = 1120.0
        assert [await one.service._expiry.once() for one in (b, a)] == [0, 1]
        left = (await a.service.list_sessions(ANN)).sessions
        assert {found.session for found in left} == {running, watched, elsewhere, young}
        await b.until(lambda: (old, None, True) in a.changed)
        a.now = b.now = 1300.0
        await a.call("stop_generation", session=running, message=reply)
        assert [await one.service._expiry.once() for one in (a, b)] == [1, 0]
        left = (await a.service.list_sessions(ANN)).sessions
        assert {found.session for found in left} == {running, watched, elsewhere}
