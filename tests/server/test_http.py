"""The routes beside the socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from chatserve.errors import StartupError, StoreUnavailableError
from chatserve.server import api, app
from chatserve.server.http import SECURITY_HEADERS
from tests.blackbox.client import ChatClient
from tests.fakes.memory_store import MemoryStore
from tests.server.harness import Server, running_server

CYCLE = json.dumps(
    {
        "format": "chatserve.session",
        "version": 1,
        "messages": [
            {"message": "a", "parent": "b", "role": "user", "text": "x"},
            {"message": "b", "parent": "a", "role": "assistant", "text": "y"},
        ],
    }
).encode()


@pytest.fixture
async def http(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
        yield client


async def test_an_export_comes_back_as_an_equal_session(server: Server, http: httpx.AsyncClient) -> None:
    async with ChatClient(server.ws_url) as client:
        session, mirror = await client.started_session(title="Ünïcode \x00 <b>", system="be brief")
        message, reply = await client.turn(session, "hello", max_tokens=4)
        await client.turn(session, "more", parent=reply, max_tokens=4)
        await client.request("message.edit", session=session, message=message, text="hi", params={"max_tokens": 2})
        await client.until(lambda: [m["status"] for m in mirror.messages.values()] == ["done"] * 6)
        exported = await http.get(f"/api/sessions/{session}/export")
        assert exported.status_code == 200
        assert exported.headers["content-type"] == "application/json"
        assert "attachment" in exported.headers["content-disposition"]
        body = exported.json()
        assert {m["message"] for m in body["messages"]} == set(mirror.messages)
        for files in (None, {"file": ("export.json", exported.content)}):
            content = None if files else exported.content
            imported = await http.post("/api/sessions/import", content=content, files=files)
            assert imported.status_code == 201, imported.text
            (copy,) = imported.json()["sessions"]
            assert copy != session
            copied = await client.watch(copy)
            assert copied.title == mirror.title
            assert copied.system == mirror.system
            assert shape(copied.messages) == shape(mirror.messages)


def shape(messages: dict[str, dict[str, Any]]) -> list[tuple[object, ...]]:
    """A tree without its ids."""
    order = {message: index for index, message in enumerate(messages)}
    return [(order.get(m["parent"]), m["role"], m["text"], m["status"]) for m in messages.values()]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"nonsense",
        CYCLE,
    ],
)
async def test_a_broken_import_is_refused_and_creates_nothing(
    server: Server, http: httpx.AsyncClient, body: bytes
) -> None:
    answer = await http.post("/api/sessions/import", content=body)
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]["detail"]
    async with ChatClient(server.ws_url) as client:
        assert (await client.request("session.list"))["sessions"] == []


@pytest.mark.parametrize("files", [{}, {"file": ("x.json", b"{")}, {"note": (None, "text only")}])
async def test_a_broken_form_is_refused(http: httpx.AsyncClient, files: dict[str, Any]) -> None:
    headers = {} if files else {"content-type": "multipart/form-data"}
    answer = await http.post("/api/sessions/import", files=files or None, headers=headers)
    assert answer.status_code == 400
    assert answer.json()["error"]["detail"]


async def test_a_body_over_the_limit_is_refused(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "MAX_IMPORT_BYTES", 1000)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield b"x" * 100

    answer = await http.post("/api/sessions/import", content=b"x" * 1001)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")
    answer = await http.post("/api/sessions/import", content=chunks())
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_large")


async def test_what_does_not_exist_is_404(http: httpx.AsyncClient) -> None:
    answer = await http.get("/api/sessions/none/export")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert (await http.get("/nowhere")).status_code == 404
    assert (await http.get("/api/sessions/import")).status_code == 405


async def test_the_cache_adds_up(server: Server, http: httpx.AsyncClient) -> None:
    async with ChatClient(server.ws_url) as client:
        session, _ = await client.started_session()
        await client.turn(session, "hello " * 20, max_tokens=20)
    cache = (await http.get("/api/cache")).json()
    for tier in ("device", "host"):
        counts = cache[tier]
        assert counts["free"] + counts["cached"] + counts["private"] + counts["transit"] == counts["total"]
    assert cache["device"]["cached"] > 0
    assert cache["block_size"] == 16
    assert len(cache["map"]) == cache["device"]["total"]
    assert cache["map"].count("c") == cache["device"]["cached"]


async def test_ready_says_what_is_missing(server: Server, http: httpx.AsyncClient) -> None:
    assert (await http.get("/readyz")).status_code == 200
    server.store.fail()
    answer = await http.get("/readyz")
    assert (answer.status_code, set(answer.json()["problems"])) == (503, {"store"})
    server.store.heal()
    server.engine.kill()
    answer = await http.get("/readyz")
    assert (answer.status_code, set(answer.json()["problems"])) == (503, {"engine"})
    assert (await http.get("/healthz")).status_code == 200
    assert (await http.get("/api/cache")).json()["error"]["code"] == "engine_unavailable"
    assert (await http.get("/metrics")).status_code == 200


async def test_an_engine_that_hangs_holds_up_no_one_who_asks_about_it(
    server: Server, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "INSPECT_TIMEOUT_S", 0.02)
    monkeypatch.setattr(api, "PROBE_TIMEOUT_S", 0.02)
    server.engine.hang()
    assert (await http.get("/api/cache")).json()["error"]["code"] == "engine_unavailable"
    assert "chatserve_engine_up 0.0" in (await http.get("/metrics")).text


async def test_ready_tells_strangers_no_address(server: Server, http: httpx.AsyncClient) -> None:
    server.store.fail("cannot connect to 10.1.2.3:6379")
    answer = await http.get("/readyz", headers={"host": "stranger.example"})
    assert (answer.status_code, set(answer.json()["problems"])) == (503, {"store"})
    assert "10.1.2.3" not in answer.text


async def test_metrics_tell_what_happened(server: Server, http: httpx.AsyncClient) -> None:
    async with ChatClient(server.ws_url) as client:
        session, _ = await client.started_session()
        _, reply = await client.turn(session, "hello", max_tokens=10)
        await client.turn(session, "more", parent=reply, max_tokens=10)
        answer = await http.get("/metrics")
        found = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
        }
    assert answer.headers["content-type"].startswith("text/plain")
    assert found["chatserve_running_requests",] == 0
    assert found["chatserve_queued_requests",] == 0
    assert found["chatserve_engine_up",] == 1
    assert found["chatserve_sockets",] == 1
    assert found["chatserve_subscriptions",] == 1
    assert found["chatserve_kv_blocks", ("state", "total"), ("tier", "device")] == 512
    assert found["chatserve_kv_blocks", ("state", "pinned"), ("tier", "host")] == 0
    started = [f for f in client.frames if f["type"] == "generation.started"]
    for source in ("cached", "swapped_in", "computed"):
        total = sum(f[f"{source}_tokens"] for f in started)
        assert found["chatserve_prompt_tokens_total", ("source", source)] == total
    assert found["chatserve_output_tokens_total",] == 20
    assert found["chatserve_time_to_first_token_seconds_count",] == 2
    assert found["chatserve_inter_token_seconds_count",] > 0
    assert found["chatserve_generations_total", ("reason", "length")] == 2
    assert found["chatserve_requests_total", ("code", "ok"), ("type", "message.send")] == 2


async def test_the_page_runs_no_script_but_its_own(http: httpx.AsyncClient) -> None:
    page = await http.get("/")
    assert page.status_code == 200
    policy = dict(part.strip().split(" ", 1) for part in page.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert policy["trusted-types"] == "dompurify"
    assert "unsafe" not in page.headers["content-security-policy"]
    assert f"ws://{http.base_url.netloc.decode()}" in policy["connect-src"]
    for name, value in SECURITY_HEADERS.items():
        assert page.headers[name] == value or name == "content-security-policy"
    assert "<script>" not in page.text
    assert " onload=" not in page.text
    assert (await http.get("/static/index.html")).status_code == 200
    assert (await http.get("/static/../pyproject.toml")).status_code == 404
    assert (await http.get("/static/%2e%2e/pyproject.toml")).status_code == 404
    for answer in (await http.get("/healthz"), await http.get("/nowhere"), await http.get("/static/index.html")):
        for name, value in SECURITY_HEADERS.items():
            assert answer.headers[name] == value


async def test_foreign_hosts_and_origins_are_refused(http: httpx.AsyncClient) -> None:
    for headers in ({"host": "rebound.example"}, {"origin": "http://evil.example"}, {"origin": "null"}):
        for method, path in (
            ("GET", "/"),
            ("GET", "/api/cache"),
            ("POST", "/api/sessions/import"),
            ("GET", "/metrics"),
        ):
            assert (await http.request(method, path, headers=headers)).status_code == 403
    assert (await http.get("/healthz", headers={"host": "10.1.2.3"})).status_code == 200
    own = str(http.base_url).rstrip("/")
    assert (await http.get("/api/cache", headers={"origin": own})).status_code == 200


async def test_with_tokens_nobody_gets_in_without_one() -> None:
    async with (
        running_server(tokens={"a": "ada", "b": "bob"}) as server,
        httpx.AsyncClient(base_url=server.url, trust_env=False) as http,
        ChatClient(server.ws_url, token="a") as ada,
    ):
        session, _ = await ada.started_session(title="private")
        export = f"/api/sessions/{session}/export"
        for path in (export, "/api/cache", "/v1/models", export + "?token=a"):
            for headers in ({}, {"authorization": "Bearer nope"}, {"authorization": "Basic YTpi"}):
                answer = await http.get(path, headers=headers)
                assert answer.status_code == 401
                assert answer.headers["www-authenticate"] == "Bearer"
        assert (await http.get(export, headers={"authorization": "Bearer b"})).status_code == 404
        assert (await http.get(export, headers={"authorization": "Bearer a"})).status_code == 200
        assert (await http.post("/api/sessions/import", content=b"{}")).status_code == 401
        assert (await http.get("/readyz")).status_code == 200


async def test_a_bug_is_an_error_like_any_other_and_says_nothing_of_itself(
    server: Server, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_args: object) -> None:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(server.context.service, "export", fail)
    monkeypatch.setattr(server.context.service, "complete", fail)
    chat = {"model": "any", "messages": [{"role": "user", "content": "hi"}]}
    exported = await http.get("/api/sessions/any/export")
    completed = await http.post("/v1/chat/completions", json=chat)
    assert exported.json()["error"]["code"] == completed.json()["error"]["code"] == "internal"
    assert completed.json()["error"]["message"] == exported.json()["error"]["detail"]
    for answer in (exported, completed):
        assert answer.status_code == 500
        assert "secret" not in answer.text
        assert SECURITY_HEADERS.items() <= dict(answer.headers).items()
    assert caplog.text.count("ZeroDivisionError: a secret") == 2


async def test_a_request_that_does_not_come_is_not_waited_for(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chatserve.server.http_transport.HEAD_TIMEOUT_S", 0.2)
    async with asyncio.timeout(20), ChatClient(server.ws_url) as client:
        # Older than any of those below, and cut off by none of what cuts them off.
        late, body = await asyncio.open_connection("127.0.0.1", server.port)
        body.write(b"POST /api/sessions/import HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\n\r\n")
        whole = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        for sent in (b"", b"GET /healthz HTTP/1.1\r\nHo", whole + b"GET /hea"):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(sent)
            with contextlib.suppress(ConnectionError):
                while said := await reader.read(1 << 16):
                    assert said.startswith(b"HTTP/1.1 200")
            writer.close()
        body.write(b"{")
        assert b"400" in await late.readline()
        body.close()
        assert (await client.request("session.list"))["sessions"] == []


async def test_an_import_that_hangs_up_in_the_middle_creates_nothing(server: Server) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(
        b"POST /api/sessions/import HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        b"Content-Length: 1000\r\n\r\n" + json.dumps({"format": "chatserve.session"}).encode()
    )
    await writer.drain()
    writer.close()
    async with ChatClient(server.ws_url) as client:
        assert (await client.request("session.list"))["sessions"] == []


async def test_a_store_that_goes_away_during_the_start_is_waited_for() -> None:
    store = MemoryStore()
    store.fail("it is loading")
    asyncio.get_running_loop().call_later(0.5, store.heal)
    async with running_server(store=store) as server, ChatClient(server.ws_url) as client:
        session, _ = await client.started_session()
        await client.turn(session, "it works", max_tokens=2)


async def test_a_store_that_stays_away_is_a_start_up_error_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    class Service:
        async def start(self) -> None:
            raise StoreUnavailableError("it is loading")

    monkeypatch.setattr(app, "STORE_PATIENCE_S", 0.3)
    with pytest.raises(StartupError, match="the store went away during the start: it is loading"):
        await app._start(Service())
