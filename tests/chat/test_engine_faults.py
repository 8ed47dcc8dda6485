"""The engine dies, forgets or never comes back: no text is lost, doubled or left spinning."""

from __future__ import annotations

import asyncio

from chatserve.engine.paths import PathTable
from chatserve.errors import EngineUnavailableError
from tests.chat.harness import Encoders, Harness, Talkative, refused


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
