"""The OpenAI API, by OpenAI's own client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from chatserve.types import RequestId
from tests.server.harness import Server, running_server
from tests.server.tiny import ends_after

HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def client(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(server) as made:
        yield made


def client_of(server: Server, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=server.url + "/v1", api_key=key, max_retries=0, http_client=httpx.AsyncClient(trust_env=False)
    )


async def test_an_answer_comes_whole(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="fake", messages=HELLO, max_tokens=5, temperature=0)
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content is not None
    assert len(choice.message.content.split()) == 5
    assert choice.finish_reason == "length"
    assert answer.object == "chat.completion"
    assert answer.model == "fake"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 5
    assert answer.usage.prompt_tokens_details is not None
    again = await client.chat.completions.create(model="fake", messages=HELLO, max_completion_tokens=5, temperature=0)
    assert again.choices[0].message.content == choice.message.content
    assert again.id != answer.id
    assert again.usage is not None
    assert again.usage.prompt_tokens_details is not None
    assert again.usage.prompt_tokens_details.cached_tokens == again.usage.prompt_tokens - 1


async def test_a_stream_says_the_same_as_the_whole(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model="fake", messages=HELLO, max_tokens=9, seed=3)
    stream = await client.chat.completions.create(
        model="fake", messages=HELLO, max_tokens=9, seed=3, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 9
    assert all(chunk.usage is None for chunk in chunks[:-1])
    plain = await client.chat.completions.create(model="fake", messages=HELLO, max_tokens=2, stream=True)
    assert all(chunk.usage is None and chunk.choices for chunk in [chunk async for chunk in plain])


async def test_the_clients_own_stream_helper_works() -> None:
    async with running_server(script=ends_after(4)) as server, client_of(server) as client:
        async with client.chat.completions.stream(model="fake", messages=HELLO) as stream:
            answer = await stream.get_final_completion()
        assert answer.choices[0].message.content is not None
        assert len(answer.choices[0].message.content.split()) == 4


async def test_stop_strings_end_an_answer_and_are_no_part_of_it(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model="fake", messages=HELLO, max_tokens=60, temperature=0)
    text = whole.choices[0].message.content
    assert text is not None
    for stop in ("bird", ["nothing like this", "d sang"]):
        cut = await client.chat.completions.create(
            model="fake", messages=HELLO, max_tokens=60, temperature=0, stop=stop
        )
        wanted = text.split(stop if isinstance(stop, str) else stop[1])[0]
        assert cut.choices[0].message.content == wanted
        assert cut.choices[0].finish_reason == ("stop" if wanted != text else "length")


async def test_an_answer_that_ends_by_itself_says_stop() -> None:
    async with running_server(script=ends_after(3)) as server, client_of(server) as client:
        answer = await client.chat.completions.create(model="fake", messages=HELLO)
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].message.content is not None
        assert len(answer.choices[0].message.content.split()) == 3


async def test_content_may_be_text_parts_and_roles_may_be_any(client: openai.AsyncOpenAI) -> None:
    plain: list[Any] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one two"},
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": "four"},
    ]
    parts: list[Any] = [
        {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": [{"type": "text", "text": "one two"}], "name": "ada"},
        {"role": "assistant", "content": "three"},
        {"role": "user", "content": "four"},
    ]
    one, two = [
        await client.chat.completions.create(model="x", messages=messages, max_tokens=5, temperature=0)
        for messages in (plain, parts)
    ]
    assert one.choices[0].message.content == two.choices[0].message.content


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_p": "x"}, "top_p"),
        ({"stop": ["x"] * 9}, "stop"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
    ],
)
async def test_what_is_not_offered_is_refused_by_name(
    client: openai.AsyncOpenAI, options: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(**{"model": "fake", "messages": HELLO, **options})
    assert refused.value.param == param
    assert refused.value.type == "invalid_request_error"
    assert refused.value.code == "bad_params"
    assert refused.value.message


async def test_options_that_ask_for_nothing_are_taken(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="fake",
        messages=HELLO,
        max_tokens=1,
        n=1,
        logprobs=False,
        response_format={"type": "text"},
        user="someone",
        metadata={"a": "b"},
        presence_penalty=0.5,
        frequency_penalty=0.5,
    )
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model":NaN}', b"[" * 100_000])
async def test_a_body_that_is_no_json_object_is_refused(server: Server, body: bytes) -> None:
    async with httpx.AsyncClient(trust_env=False) as http:
        answer = await http.post(server.url + "/v1/chat/completions", content=body)
    assert answer.status_code == 400
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_too_long_a_conversation_says_so(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "x" * 10_000}])
    assert refused.value.code == "context_length_exceeded"
    assert "4096" in refused.value.message
    with pytest.raises(openai.APIStatusError) as too_large:
        await client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "x" * 300_000}])
    assert too_large.value.status_code == 413


async def test_an_engine_that_is_away_is_503(server: Server, client: openai.AsyncOpenAI) -> None:
    server.engine.kill()
    for stream in (False, True):
        with pytest.raises(openai.InternalServerError) as failed:
            await client.chat.completions.create(model="fake", messages=HELLO, stream=stream)
        assert failed.value.status_code == 503
        assert failed.value.code == "engine_unavailable"
    server.engine.replace()
    await asyncio.wait_for(server.engine.taken(), 5)
    assert await client.chat.completions.create(model="fake", messages=HELLO, max_tokens=1)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_cancels_its_generation(
    server: Server, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    cancelled, cancel = asyncio.Event(), server.engine.cancel

    def tell_and_cancel(request_id: RequestId, keep: int | None = None) -> None:
        cancel(request_id, keep)
        cancelled.set()

    monkeypatch.setattr(server.engine, "cancel", tell_and_cancel)
    server.engine.pace.allow(4)
    body = json.dumps({"model": "fake", "messages": HELLO, "stream": stream}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    if stream:
        await reader.readuntil(b'"delta":{"content":')
    await asyncio.wait_for(server.engine.pace.spent(), 5)
    assert (await server.engine.inspect()).running == 1
    writer.close()
    server.engine.pace.allow(50)
    await asyncio.wait_for(cancelled.wait(), 5)
    report = await server.engine.inspect()
    assert report.running == 0
    assert report.device.pinned == 0
    assert report.counters["output_tokens"] < 60
    server.context.service.check()


async def test_the_model_is_listed(client: openai.AsyncOpenAI) -> None:
    (model,) = (await client.models.list()).data
    assert (model.id, model.object, model.owned_by) == ("fake", "model", "chatserve")
    assert (await client.models.retrieve("fake")).id == "fake"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("another/model")


async def test_a_key_is_a_token() -> None:
    async with running_server(tokens={"secret": "ada"}) as server:
        async with client_of(server, "secret") as client:
            assert await client.chat.completions.create(model="fake", messages=HELLO, max_tokens=1)
        async with client_of(server, "wrong") as client:
            with pytest.raises(openai.AuthenticationError) as refused:
                await client.chat.completions.create(model="fake", messages=HELLO)
            assert refused.value.code == "invalid_api_key"
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
