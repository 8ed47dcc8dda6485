"""Stopping: at any moment, for any reason, once; and the blocks come back."""

from __future__ import annotations

import asyncio

import pytest

from chatserve.errors import NotFoundError
from chatserve.types import FinishReason
from tests.chat.harness import ANN, Encoders, Harness, Talkative, refused


async def test_the_answer_to_stop_comes_after_the_end_and_no_text_follows(encoders: Encoders) -> None:
    async with Harness(encoders["chatml"]) as harness:
        session = await harness.create()
        _, reply = await harness.say(session, "on and on", max_tokens=3000)
        await harness.writing(session, reply, 10)
        await harness.call("stop_generation", session=session, message=reply)
        end = harness.mirrors[session].ends[reply][0]
        assert (end.reason, end.status) == ("cancelled", "stopped")
        seq, text = harness.mirrors[session].seq, harness.text(session, reply)
        await harness.idle()
        assert harness.mirrors[session].seq == seq
        assert harness.text(session, reply) == text != ""
        await harness.call("stop_generation", session=session, message=reply)
        await harness.check()


@pytest.mark.parametrize("turns", range(40))
async def test_a_stop_around_the_last_token_ends_it_once(encoders: Encoders, turns: int) -> None:
    async with Harness(encoders["chatml"]) as harness:
        session = await harness.create(params={"max_tokens": 3})
        _, reply = await harness.say(session, "short")
        for _ in range(turns):
            await asyncio.sleep(0)
        await harness.call("stop_generation", session=session, message=reply)
        assert len(harness.mirrors[session].ends[reply]) == 1
        end = harness.mirrors[session].ends[reply][0]
        state = await harness.service.snapshot(ANN, session)
        assert end.usage == type(end.usage)() or end.usage.completion_tokens == len(state.messages[1].token_ids)
        await harness.idle()
        await harness.check()
        _, two = await harness.turn(session, "next", reply, max_tokens=1)
        prompt = sum(len(m.token_ids) for m in state.messages) + len(harness.encoder.encode_turn("next"))
        assert harness.started(session, two).prompt_tokens == prompt
        await harness.idle()


async def test_stop_before_the_first_token_of_a_long_prompt(encoders: Encoders) -> None:
    runner = Talkative(encoders["chatml"], num_blocks=600, context_tokens=9000)
    async with Harness(encoders["chatml"], runner=runner, max_batched_tokens=64) as harness:
        session = await harness.create()
        _, reply = await harness.say(session, "word " * 1500)
        await harness.until(lambda: harness.mirrors[session].starts.get(reply))
        steps = len(runner.plans)
        await harness.call("stop_generation", session=session, message=reply)
        assert len(runner.plans) - steps <= 5, "not after the whole prompt"
        end = harness.mirrors[session].ends[reply][0]
        assert (end.reason, end.usage.completion_tokens) == ("cancelled", 0)
        assert harness.text(session, reply) == ""
        await harness.idle()


async def test_stop_while_it_waits_for_admission_leaves_usage_empty(encoders: Encoders) -> None:
    async with Harness(encoders["chatml"], max_running=1) as harness:
        session = await harness.create()
        _, running = await harness.say(session, "first", max_tokens=3000)
        await harness.writing(session, running)
        _, waiting = await harness.say(session, "second", max_tokens=3000)
        await harness.call("stop_generation", session=session, message=waiting)
        end = harness.mirrors[session].ends[waiting][0]
        assert end.reason == "cancelled"
        assert end.usage == type(end.usage)()
        await harness.call("stop_generation", session=session, message=running)


async def test_deleting_a_session_ends_every_branch_and_is_the_last_event(encoders: Encoders) -> None:
    async with Harness(encoders["chatml"]) as harness:
        session = await harness.create()
        _, one = await harness.turn(session, "a", max_tokens=2)
        replies = [(await harness.say(session, text, one, max_tokens=3000))[1] for text in "bc"]
        await harness.writing(session, replies[-1])
        await harness.call("delete_session", session=session)
        mirror = harness.mirrors[session]
        assert mirror.deleted
        assert [mirror.ends[reply][0].reason for reply in replies] == ["cancelled", "cancelled"]
        assert harness.changed[-1] == (session, None, True)
        assert isinstance(await refused(harness.say(session, "late")), NotFoundError)
        assert isinstance(await refused(harness.service.snapshot(ANN, session)), NotFoundError)
        await harness.idle()
        assert (await harness.client.inspect()).device.cached < 20


@pytest.mark.parametrize("turns", range(0, 30, 3))
async def test_what_is_deleted_stays_gone_however_late_the_last_write(encoders: Encoders, turns: int) -> None:
    async with Harness(encoders["chatml"]) as harness:
        session = await harness.create()
        message, _ = await harness.say(session, "a", max_tokens=9)
        for _ in range(turns):
            await asyncio.sleep(0)
        await asyncio.gather(
            harness.call("delete_session", session=session),
            harness.call("regenerate_message", session=session, message=message),
            return_exceptions=True,
        )
        assert harness.mirrors[session].deleted
        await harness.idle()
        assert await harness.store.load(ANN, session) is None
        assert (await harness.service.list_sessions(ANN)).sessions == ()


# --- nobody is looking ------------------------------------------------------------------------------------------------


async def test_without_a_grace_the_last_subscriber_takes_the_generation_along(encoders: Encoders) -> None:
    async with Harness(encoders["chatml"], orphan_grace_s=0.0) as harness:
        session = await harness.create()
        _, reply = await harness.say(session, "endless", max_tokens=3000)
        await harness.writing(session, reply)
        harness.service.set_subscribers(session, 2)
        harness.service.set_subscribers(session, 1)
        await harness.writing(session, reply, len(harness.text(session, reply)) + 5)
        harness.service.set_subscribers(session, 0)
        end = await harness.ended(session, reply)
        assert (end.reason, end.status) == ("orphaned", "stopped")
        assert harness.text(session, reply)
        await harness.idle()


async def test_within_the_grace_a_new_subscriber_keeps_it(encoders: Encoders) -> None:
    async with Harness(encoders["chatml"], orphan_grace_s=0.05) as harness:
        session = await harness.create()
        _, reply = await harness.say(session, "on", max_tokens=3000)
        harness.service.set_subscribers(session, 0)
        harness.service.set_subscribers(session, 1)
        until = asyncio.get_running_loop().time() + 0.1
        await harness.until(lambda: asyncio.get_running_loop().time() > until)
        assert reply not in harness.mirrors[session].ends or harness.mirrors[session].ends[reply][0].reason == "stop"


async def test_a_generation_that_nobody_ever_watched_is_stopped_after_the_grace(encoders: Encoders) -> None:
    async with Harness(encoders["chatml"], orphan_grace_s=0.0) as harness:
        session = await harness.create()
        harness.service.set_subscribers(session, 0)
        _, reply = await harness.say(session, "endless", max_tokens=3000)
        assert (await harness.ended(session, reply)).reason == "orphaned"


async def test_a_stopping_server_interrupts_what_it_generates_if_so_wished(encoders: Encoders) -> None:
    async with Harness(encoders["chatml"], resumes=False) as harness:
        session = await harness.create()
        _, reply = await harness.say(session, "on", max_tokens=3000)
        await harness.writing(session, reply, 5)
    end = harness.mirrors[session].ends[reply][0]
    assert end.reason == FinishReason.INTERRUPTED
    stored = await harness.store.load(ANN, session)
    assert stored.messages[1].status == "interrupted"
    assert stored.messages[1].text == harness.text(session, reply) != ""
