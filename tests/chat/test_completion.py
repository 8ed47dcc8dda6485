"""One-shot answers: nothing is stored, and whoever stops reading stops the generation."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from chatserve.chat.completion import Chunk
from chatserve.errors import BadParamsError, ChatError, ContextOverflowError, EngineUnavailableError
from tests.chat.harness import ANN, Encoders, Harness, Scripted, Talkative
from tests.fakes.fake_runner import FakeRunner


@pytest.fixture
async def harness(encoders: Encoders) -> Any:
    encoder = encoders["chatml"]
    script = Scripted(encoder, "Well, STOP 👩‍👩‍👧‍👦 there", "Second answer")
    runner = FakeRunner(vocab_size=encoder.vocab_size, num_blocks=256, script=script)
    async with Harness(encoder, runner=runner) as harness:
        yield harness
        await harness.idle()
        assert (await harness.service.list_sessions(ANN)).sessions == ()


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


async def read(harness: Harness, *messages: dict[str, str], **params: Any) -> list[Chunk]:
    return [chunk async for chunk in harness.service.complete(ANN, messages, params)]


async def test_the_text_comes_in_pieces_and_the_end_says_why_and_what_it_cost(harness: Harness) -> None:
    chunks = await read(harness, said("system", "S"), said("user", "Hi"))
    assert "".join(chunk.text for chunk in chunks) == "Well, STOP 👩‍👩‍👧‍👦 there"
    assert {chunk.finish_reason for chunk in chunks[:-1]} <= {None}
    assert chunks[-1].finish_reason == "stop"
    assert chunks[-1].usage.prompt_tokens == len(harness.encoder.encode_root("S", "Hi"))
    assert chunks[-1].usage.completion_tokens == len(harness.encoder.encode_continuation("Well, STOP 👩‍👩‍👧‍👦 there"))


@pytest.mark.parametrize(
    ("params", "text", "reason"),
    [
        ({"max_tokens": 2}, "We", "length"),
        ({"stop": ["STOP"]}, "Well, ", "stop"),
        ({"stop": ["👩‍👧"]}, "Well, STOP 👩‍", "stop"),
    ],
)
async def test_it_ends_where_it_is_told_to(harness: Harness, params: dict[str, Any], text: str, reason: str) -> None:
    chunks = await read(harness, said("user", "Hi"), **params)
    whole = "".join(chunk.text for chunk in chunks)
    assert whole == text if reason == "stop" else whole.startswith(text)
    assert chunks[-1].finish_reason == reason


async def test_a_conversation_shares_its_cache_with_its_next_turn(harness: Harness) -> None:
    first = [said("user", "Hi")]
    chunks = await read(harness, *first)
    answer = "".join(chunk.text for chunk in chunks)
    usage = chunks[-1].usage
    (*_, last) = await read(harness, *first, said("assistant", answer), said("user", "And?"))
    assert last.usage.cached_tokens >= usage.prompt_tokens + usage.completion_tokens - 1


async def test_messages_in_a_row_are_one_turn(harness: Harness) -> None:
    split = await read(harness, said("system", "a"), said("user", "b"), said("system", "c"), said("user", "d"))
    joined = await read(harness, said("system", "a\n\nc"), said("user", "b\n\nd"))
    assert split[-1].usage.prompt_tokens == joined[-1].usage.prompt_tokens


@pytest.mark.parametrize(
    "messages",
    [[], [said("user", "x"), said("assistant", "y")], [said("robot", "x")], [said("system", "only")]],
)
async def test_what_cannot_be_answered_is_bad(harness: Harness, messages: list[dict[str, str]]) -> None:
    with pytest.raises(BadParamsError):
        await read(harness, *messages)


async def test_errors_come_before_the_first_chunk(harness: Harness) -> None:
    with pytest.raises(ContextOverflowError):
        await read(harness, said("user", "word " * 6000))
    with pytest.raises(BadParamsError):
        await read(harness, said("user", "x"), temperature=9)


async def test_closing_the_iterator_stops_the_generation(encoders: Encoders) -> None:
    async with Harness(encoders["chatml"]) as harness:
        chunks = harness.service.complete(ANN, [said("user", "x")], {"max_tokens": 3000})
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                assert chunk.finish_reason is None
                break
        await harness.idle()
        assert sum(len(plan.rows) for plan in harness.runner.plans) < 500


async def test_it_goes_on_after_the_engine_died_once_and_fails_after_twice(encoders: Encoders) -> None:
    async with Harness(encoders["chatml"]) as harness:

        async def collect(deaths: int) -> str:
            text = ""
            async for chunk in harness.service.complete(ANN, [said("user", "x")], {"max_tokens": 300, "seed": 4}):
                text += chunk.text
                if deaths and chunk.text:
                    deaths -= 1
                    harness.client.kill()
                    await harness.until(lambda: harness.health[-1:] == [("engine", False)])
                    harness.client.revive(harness.make_engine(Talkative(harness.encoder)))
            return text

        undisturbed = await collect(0)
        assert await collect(1) == undisturbed
        with pytest.raises(EngineUnavailableError):
            await collect(2)
        await harness.until(lambda: harness.client.info is not None)
        await harness.idle()


async def test_without_an_engine_it_is_unavailable(encoders: Encoders) -> None:
    async with Harness(encoders["chatml"]) as harness:
        harness.client.kill()
        await asyncio.sleep(0)
        with pytest.raises(ChatError, match="started"):
            await read(harness, said("user", "x"))
