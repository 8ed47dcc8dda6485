"""Requests that are refused: with the reason, and with nothing created."""

from __future__ import annotations

import pytest

from chatserve.config import Limits
from chatserve.errors import (
    BadParamsError,
    BusyError,
    ContextOverflowError,
    NotFoundError,
    OverloadedError,
    RateLimitedError,
    TooLargeError,
)
from chatserve.types import SessionId
from tests.chat.harness import BOB, Encoders, Harness, refused
from tests.fakes.fake_runner import FakeRunner


async def test_busy_is_for_the_message_that_is_being_generated_alone(harness: Harness) -> None:
    session = await harness.create(params={"max_tokens": 3000})
    message, reply = await harness.say(session, "long")
    sibling = await harness.regenerate(session, message)
    await harness.writing(session, sibling)
    for name, fields in (
        ("send_message", {"parent": reply, "text": "too soon"}),
        ("continue_message", {"message": reply}),
        ("regenerate_message", {"message": reply}),
        ("fork_session", {"message": reply}),
    ):
        assert isinstance(await refused(harness.call(name, session=session, **fields)), BusyError)
    await harness.call("select_branch", session=session, message=reply)
    for running in (reply, sibling):
        await harness.call("stop_generation", session=session, message=running)


async def test_requests_that_name_the_wrong_thing_create_nothing(harness: Harness) -> None:
    session = await harness.create()
    user, reply = await harness.turn(session, "root", max_tokens=1)
    seq = harness.mirrors[session].seq
    for name, fields, kind in (
        ("send_message", {"parent": user, "text": "x"}, BadParamsError),
        ("send_message", {"parent": "nobody", "text": "x"}, NotFoundError),
        ("send_message", {"parent": None, "text": 7}, BadParamsError),
        ("send_message", {"parent": None, "text": "\ud800"}, BadParamsError),
        ("send_message", {"parent": None, "text": "x", "params": {"top_p": 0}}, BadParamsError),
        ("send_message", {"parent": None, "text": "x", "params": []}, BadParamsError),
        ("edit_message", {"message": reply, "text": "x"}, BadParamsError),
        ("continue_message", {"message": user}, BadParamsError),
        ("regenerate_message", {"message": "nobody"}, NotFoundError),
        ("delete_message", {"message": "nobody"}, NotFoundError),
        ("select_branch", {"message": "nobody"}, NotFoundError),
        ("stop_generation", {"message": "nobody"}, NotFoundError),
        ("stop_generation", {"message": user}, BadParamsError),
        ("fork_session", {"message": "nobody"}, NotFoundError),
    ):
        assert type(await refused(harness.call(name, session=session, **fields))) is kind, (name, fields)
        elsewhere = harness.call(name, session=SessionId("nowhere"), **fields)
        assert type(await refused(elsewhere)) in {NotFoundError, BadParamsError}
    assert harness.mirrors[session].seq == seq


async def test_another_users_session_is_not_found(harness: Harness) -> None:
    session = await harness.create(system="secret")
    message, reply = await harness.turn(session, "private", max_tokens=1)
    for name, fields in (
        ("send_message", {"parent": reply, "text": "x"}),
        ("edit_message", {"message": message, "text": "x"}),
        ("regenerate_message", {"message": reply}),
        ("continue_message", {"message": reply}),
        ("delete_message", {"message": message}),
        ("select_branch", {"message": message}),
        ("stop_generation", {"message": reply}),
        ("fork_session", {"message": reply}),
        ("update_session", {"title": "mine"}),
        ("delete_session", {}),
    ):
        assert isinstance(await refused(harness.call(name, user=BOB, session=session, **fields)), NotFoundError)
    for ask in (
        harness.service.snapshot(BOB, session),
        harness.service.export(BOB, session),
    ):
        assert isinstance(await refused(ask), NotFoundError)
    assert await harness.service.replay(BOB, session, 0) is None
    harness.service.typing(BOB, session, reply, "spy")


async def test_too_long_a_text_is_refused_before_it_is_counted_in_tokens(harness: Harness) -> None:
    session = await harness.create()
    most = harness.limits.max_text_bytes
    error = await refused(harness.say(session, "ä" * (most // 2 + 1)))
    assert isinstance(error, TooLargeError)
    assert str(most + 2) in error.detail


async def test_a_full_context_is_an_error_with_both_counts_and_creates_nothing(harness: Harness) -> None:
    session = await harness.create()
    error = await refused(harness.say(session, "word " * 6000))
    assert isinstance(error, ContextOverflowError)
    assert error.fields["context_tokens"] == harness.client.info.context_tokens
    assert error.fields["prompt_tokens"] > error.fields["context_tokens"]
    assert not harness.mirrors[session].messages


async def test_the_last_token_of_the_context_is_used_and_not_one_more(encoders: Encoders) -> None:
    runner = FakeRunner(vocab_size=encoders["chatml"].vocab_size, script=lambda _: 50)
    async with Harness(encoders["chatml"], runner=runner, context_tokens=64) as harness:
        session = await harness.create()
        _, reply = await harness.turn(session, "Hello")
        end = harness.mirrors[session].ends[reply][0]
        assert end.reason == "length"
        assert abs(end.usage.prompt_tokens + end.usage.completion_tokens - 64) <= 1
        error = await refused(harness.call("continue_message", session=session, message=reply))
        assert isinstance(error, ContextOverflowError)


@pytest.mark.parametrize("room", [0, 1])
async def test_a_context_that_holds_no_conversation_is_said_when_the_engine_comes(
    encoders: Encoders, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    least = encoders["chatml"].min_prompt_tokens
    async with Harness(encoders["chatml"], context_tokens=least + room) as harness:
        await harness.create()
    assert ("no conversation fits" in caplog.text) == (not room)


async def test_what_one_user_may_have_running_is_limited(encoders: Encoders) -> None:
    async with Harness(encoders["chatml"], limits=Limits(max_generations_per_user=2)) as harness:
        session = await harness.create(params={"max_tokens": 3000})
        message, _ = await harness.say(session, "one")
        await harness.regenerate(session, message)
        error = await refused(harness.regenerate(session, message))
        assert isinstance(error, RateLimitedError)
        theirs = await harness.create(user=BOB)
        await harness.say(theirs, "mine goes", user=BOB, max_tokens=1)


async def test_a_full_queue_is_overloaded_and_creates_nothing(encoders: Encoders) -> None:
    async with Harness(encoders["chatml"], max_queued=2, max_running=1) as harness:
        session = await harness.create(params={"max_tokens": 50})
        harness.client.pause()
        for n in range(2):
            await harness.say(session, f"waits {n}")
        error = await refused(harness.say(session, "one too many"))
        assert isinstance(error, OverloadedError)
        assert error.fields["retry_after_s"] > 0
        assert len(harness.mirrors[session].messages) == 4
        harness.client.resume()
        await harness.idle()


async def test_a_session_holds_only_so_many_messages(encoders: Encoders) -> None:
    async with Harness(encoders["chatml"], limits=Limits(max_messages_per_session=3)) as harness:
        session = await harness.create(params={"max_tokens": 1})
        _, one = await harness.turn(session, "a")
        assert isinstance(await refused(harness.say(session, "b", one)), TooLargeError)
        assert await harness.regenerate(session, one)
