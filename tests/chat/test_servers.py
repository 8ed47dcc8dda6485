"""Several servers on one store: one of them holds a session at a time, whoever asks is served, and the heirs of the
dead go on with the same text."""

from __future__ import annotations

import asyncio
import copy
import random
from typing import Any

import pytest

from chatserve.chat import forwarding, leases, orphans
from chatserve.chat.events import AnyEvent, SessionUpdated
from chatserve.chat.letters import AnyLetter, LeaseTaken, encode_letter
from chatserve.chat.live_session import LiveSession
from chatserve.chat.prompt import PromptEncoder
from chatserve.chat.store import LeaseLostError
from chatserve.errors import ChatError, NotFoundError, OverloadedError
from chatserve.types import SessionId, UserId
from tests.chat.harness import ANN, BOB, Harness, refused, view_of
from tests.fakes.memory_store import MemoryStore

Encoders = dict[str, PromptEncoder]
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 5}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leases, "CONFIRM_S", 0.0)
    monkeypatch.setattr(orphans, "LEAST_PAUSE_S", 0.01)
    monkeypatch.setattr(forwarding, "ASK_AGAIN_S", 0.05)
    monkeypatch.setattr(forwarding, "UNHEARD_PAUSE_S", 0.01)


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
