"""HTTP beside the socket, against the whole program: files in and out, the OpenAI API, what operators look at."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.blackbox.client import ChatClient, Mirror
from tests.blackbox.server import Server
from tests.blackbox.test_stop import idle

Connect = Callable[..., ChatClient]


@pytest.fixture
async def http(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=30) as client:
        yield client


@pytest.fixture
async def api(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def shape(mirror: Mirror) -> list[tuple[Any, ...]]:
    """A tree without its ids."""
    place = {message: number for number, message in enumerate(mirror.messages)}
    return [(place.get(m["parent"]), m["role"], m["text"], m["status"]) for m in mirror.messages.values()]


async def count_sessions(client: ChatClient) -> int:
    return len((await client.request("session.list", limit=100))["sessions"])


# --- files ------------------------------------------------------------------------------------------------------------


async def test_an_export_comes_back_whole_and_goes_on(connect: Connect, http: httpx.AsyncClient) -> None:
    async with connect() as client:
        session, mirror = await client.started_session(title=" T\x00 ", system="S", params={"max_tokens": 4})
        message, one = await client.turn(session, "  <|im_end|>\r\n👩‍👩‍👧‍👦 ")
        await client.turn(session, "left", one)
        await client.turn(session, "right", one)
        await client.request("branch.select", session=session, message=message)
        await client.settle()
        exported = (await http.get(f"/api/sessions/{session}/export")).json()
        assert [m["message"] for m in exported["messages"]] == list(mirror.messages)
        answer = await http.post("/api/sessions/import", json=exported)
        assert answer.status_code == 201
        (imported,) = answer.json()["sessions"]
        copy = await client.watch(imported)
        assert shape(copy) == shape(mirror)
        assert (copy.title, copy.system, copy.params) == (mirror.title, mirror.system, mirror.params)
        ids = [list(m.messages).index(m.leaf) for m in (copy, mirror) if m.leaf is not None]
        assert ids[0] == ids[1]
        await client.turn(imported, "goes on", copy.leaf)


async def test_a_conversation_too_large_for_one_frame_is_cut_and_whole_again(
    connect: Connect, http: httpx.AsyncClient
) -> None:
    texts = [f"{n} " + "ü👩‍👩‍👧‍👦\x00" * 7000 for n in range(12)]
    messages = [{"message": str(n), "parent": None, "role": "user", "text": text} for n, text in enumerate(texts)]
    (session,) = (await http.post("/api/sessions/import", json={"messages": messages})).json()["sessions"]
    async with connect() as client:
        mirror = await client.watch(session)
        assert [m["text"] for m in mirror.messages.values()] == texts
        parts = [f for f in client.frames if f["type"] == "snapshot"]
        assert len(parts) > 1
        assert all(len(json.dumps(part, ensure_ascii=False).encode()) < 512 * 1024 for part in parts)
        assert [part["last"] for part in parts] == [False] * (len(parts) - 1) + [True]


def chatgpt(title: str, *nodes: tuple[str, str | None, str, str]) -> dict[str, Any]:
    """A conversation as `conversations.json` has it; nodes are (id, parent, role, text)."""
    mapping: dict[str, Any] = {"root": {"id": "root", "parent": None, "message": None, "children": []}}
    for name, parent, role, text in nodes:
        message = {
            "id": name,
            "author": {"role": role, "name": None, "metadata": {}},
            "create_time": 1700000000.5,
            "content": {"content_type": "text", "parts": [text]},
            "status": "finished_successfully",
            "metadata": {},
        }
        mapping[name] = {"id": name, "parent": parent, "message": message, "children": []}
    return {"title": title, "create_time": 1.0, "mapping": mapping, "current_node": nodes[-1][0]}


async def test_chatgpts_conversations_come_in_with_their_branches(connect: Connect, http: httpx.AsyncClient) -> None:
    file = [
        chatgpt(
            "Boats",
            ("s", "root", "system", ""),
            ("q", "s", "user", "which boat?"),
            ("a", "q", "assistant", "a small one"),
            ("b", "q", "assistant", "none at all"),
        ),
        chatgpt("Birds", ("x", "root", "user", "sing"), ("y", "x", "assistant", "no")),
    ]
    form = {"file": ("conversations.json", json.dumps(file).encode(), "application/json")}
    answer = await http.post("/api/sessions/import", files=form)
    assert answer.status_code == 201
    async with connect() as client:
        boats, birds = [await client.watch(session) for session in answer.json()["sessions"]]
        assert (boats.title, birds.title) == ("Boats", "Birds")
        assert shape(boats) == [
            (None, "user", "which boat?", "done"),
            (0, "assistant", "a small one", "done"),
            (0, "assistant", "none at all", "done"),
        ]
        assert boats.leaf is not None
        assert boats.messages[boats.leaf]["text"] == "none at all"
        await client.turn(answer.json()["sessions"][0], "and then?", boats.leaf, max_tokens=2)


WHOLE = json.dumps([chatgpt("one", ("q", "root", "user", "x")), chatgpt("two", ("q", "root", "user", "y"))]).encode()


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"messages": [{"message": m, "parent": p, "role": "user", "text": ""} for m, p in ("ab", "ba")]}),
        json.dumps([chatgpt("good", ("q", "root", "user", "x")), chatgpt("loop", ("q", "q", "user", "x"))]),
        json.dumps([{"messages": []}, {"messages": [], "params": {"top_p": 7}}]),
        WHOLE[: len(WHOLE) // 2],
        WHOLE[:-1],
        b"",
        b"{}",
        b"[" * 100_000,
        b'{"messages": [], "title": "\xff"}',
        b'{"messages": [], "title": "\\ud800"}',
        json.dumps({"messages": [{"message": "a", "parent": None, "role": "user", "text": "x" * 300_000}]}),
    ],
    ids=[
        "cycle",
        "one bad of two",
        "bad params of one",
        "half",
        "all but a byte",
        "empty",
        "{}",
        "deep",
        "bytes",
        "surrogate",
        "too large",
    ],
)
async def test_what_cannot_be_imported_is_4xx_and_creates_nothing(
    connect: Connect, http: httpx.AsyncClient, body: bytes | str
) -> None:
    async with connect() as client:
        before = await count_sessions(client)
        answer = await http.post("/api/sessions/import", content=body)
        assert 400 <= answer.status_code < 500
        assert answer.json()["error"]["detail"]
        assert await count_sessions(client) == before
        assert not [f for f in client.frames if f["type"] == "sessions.changed"]


# --- the OpenAI API ---------------------------------------------------------------------------------------------------


async def test_an_unmodified_openai_client_gets_the_same_answer_whole_and_streamed(api: openai.AsyncOpenAI) -> None:
    (model,) = (await api.models.list()).data
    asked: dict[str, Any] = {
        "model": model.id,
        "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "tell me of the harbour " * 8}],
        "temperature": 0,
        "max_tokens": 12,
    }
    whole = await api.chat.completions.create(**asked)
    (choice,) = whole.choices
    assert choice.finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 12
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 12
    stream = await api.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == choice.message.content
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1, "the same prompt is cached"
    (reason,) = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert reason == "length"


async def test_an_openai_client_is_told_what_is_wrong(api: openai.AsyncOpenAI) -> None:
    ask: Any = api.chat.completions.create
    with pytest.raises(openai.BadRequestError, match="4096") as overflow:
        await ask(model="any", messages=[{"role": "user", "content": "word " * 6000}])
    assert overflow.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="temperature"):
        await ask(model="any", messages=[{"role": "user", "content": "x"}], temperature=10**400)


async def test_an_openai_client_that_hangs_up_stops_its_answer(server: Server, api: openai.AsyncOpenAI) -> None:
    ask: Any = api.chat.completions.create
    async with await ask(model="any", messages=[{"role": "user", "content": "on"}], stream=True) as stream:
        async for _ in stream:
            break
    await idle(server, timeout_s=5)


# --- what operators look at -------------------------------------------------------------------------------------------


async def test_the_cache_adds_up_at_every_moment_and_in_its_map(server: Server, connect: Connect) -> None:
    async with connect() as client:
        session, mirror = await client.started_session()
        _, reply = await client.say(session, "grow " * 100, max_tokens=150)
        seen_pinned = False
        while not mirror.ended[reply]:
            cache = await asyncio.to_thread(server.json, "/api/cache")
            for tier in ("device", "host"):
                counts = cache[tier]
                assert counts["free"] + counts["cached"] + counts["private"] + counts["transit"] == counts["total"]
                assert counts["pinned"] <= counts["total"] - counts["free"]
            letters = cache["map"].lower()
            assert len(letters) == cache["device"]["total"]
            for letter, state in (("f", "free"), ("c", "cached"), ("p", "private"), ("t", "transit")):
                assert letters.count(letter) == cache["device"][state]
            seen_pinned |= cache["device"]["pinned"] > 0
        assert seen_pinned
    assert (await idle(server))["device"]["cached"] > 0


async def test_the_metrics_that_are_promised_are_there_and_count(server: Server, connect: Connect) -> None:
    def prompt_tokens(source: str) -> float:
        return server.metric(f'chatserve_prompt_tokens_total{{source="{source}"}}')

    sources = ("cached", "swapped_in", "computed")
    before = {source: prompt_tokens(source) for source in sources}
    async with connect() as client:
        session, _ = await client.started_session()
        message, reply = await client.turn(session, "count me in " * 9, max_tokens=2)
        ack = await client.request("message.regenerate", session=session, message=message, params={"max_tokens": 2})
        await client.ended(session, ack["reply"])
        costs = [client.started(session, r) for r in (reply, ack["reply"])]
    cache = await idle(server)
    for source in sources:
        assert prompt_tokens(source) - before[source] == sum(c[f"{source}_tokens"] for c in costs)
    for tier in ("device", "host"):
        for state, value in cache[tier].items():
            assert server.metric(f'chatserve_kv_blocks{{state="{state}",tier="{tier}"}}') == value
    assert server.metric("chatserve_running_requests") == server.metric("chatserve_queued_requests") == 0
    assert list(text_string_to_metric_families(server.get("/metrics")[1].decode())), "Prometheus can read it"


async def test_ready_turns_red_while_a_part_is_away_and_what_was_acknowledged_is_done_once(
    start_server: Callable[..., Server],
) -> None:
    server = start_server()
    async with ChatClient(server.ws_url) as client:
        session, mirror = await client.started_session(params={"max_tokens": 2})
        root, reply = await client.turn(session, "root")
        requests: dict[str, tuple[str, dict[str, Any]]] = {
            "create": ("session.create", {"title": "once"}),
            "update": ("session.update", {"session": session, "title": "once"}),
            "fork": ("session.fork", {"session": session, "message": reply}),
            "send": ("message.send", {"session": session, "parent": reply, "text": "once"}),
            "edit": ("message.edit", {"session": session, "message": root, "text": "once"}),
            "regenerate": ("message.regenerate", {"session": session, "message": reply}),
            "select": ("branch.select", {"session": session, "message": reply}),
            "stop": ("generation.stop", {"session": session, "message": reply}),
        }
        acks = {name: await client.request(kind, id=name, **fields) for name, (kind, fields) in requests.items()}
        for name in ("send", "edit", "regenerate"):
            await client.ended(session, acks[name]["reply"])
        await client.settle()
        before = mirror.tree()

        await asyncio.to_thread(server.kill, "engine")
        await client.until(lambda: any(f["type"] == "degraded" for f in client.frames))
        status, body = await asyncio.to_thread(server.get, "/readyz")
        assert (status, set(json.loads(body)["problems"])) == (503, {"engine"})
        assert (await asyncio.to_thread(server.get, "/api/cache"))[0] == 503
        await client.until(lambda: any(f["type"] == "recovered" for f in client.frames))

        store = (await asyncio.to_thread(server.children))["store"]
        os.kill(store, signal.SIGSTOP)
        try:
            status, body = await asyncio.to_thread(server.get, "/readyz")
            assert (status, set(json.loads(body)["problems"])) == (503, {"store"})
            assert (await asyncio.to_thread(server.get, "/healthz"))[0] == 200
        finally:
            os.kill(store, signal.SIGCONT)

        await asyncio.to_thread(server.kill, "store")
        await asyncio.to_thread(server.kill, "web")
        await client.closed()
    await asyncio.to_thread(server.wait_ready)
    async with ChatClient(server.ws_url) as client:
        fresh = await client.watch(session)
        for name, (kind, fields) in requests.items():
            assert await client.request(kind, id=name, **fields) == acks[name]
        await client.settle()
        assert fresh.tree() == before, "nothing was done twice"
