"""The terminal client against a small server of the protocol: what is typed, what is printed, dropped connections."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from chatserve.terminal.app import ChatApp
from chatserve.terminal.client import ChatClient, NotConnectedError, ServerError
from chatserve.terminal.lines import Output, PipedLines, printable
from chatserve.terminal.view import SessionView
from tests.cli.fake_server import FakeServer

TIMEOUT_S = 20


class Typed:
    """Lines that a person would type."""

    def __init__(self, *lines: str, interactive: bool = False) -> None:
        self.interactive = interactive
        self._lines = list(lines)

    async def read(self) -> str | None:
        return self._lines.pop(0) if self._lines else None


async def talk(server: FakeServer, *lines: str, session: str | None = None, code: int = 0) -> tuple[str, str]:
    """Run the client over these lines; what it printed, and what it noted."""
    out, notes = io.StringIO(), io.StringIO()
    output = Output(out, Console(file=notes, width=200))
    async with asyncio.timeout(TIMEOUT_S), ChatClient(server.url, token=server.token) as client:
        assert await ChatApp(client, Typed(*lines), output).run(session) == code
    return out.getvalue(), notes.getvalue()


async def test_an_answer_is_printed_as_it_is() -> None:
    async with FakeServer() as server:
        out, _ = await talk(server, "hello there, you")
        assert out == "hello there, you\n"


async def test_the_next_question_goes_below_the_last_answer() -> None:
    async with FakeServer() as server:
        await talk(server, "one", "two")
        first, second = [each for each in server.requests if each["type"] == "message.send"]
        assert first["parent"] is None
        messages = server.sessions[first["session"]]["messages"]
        assert messages[second["parent"]]["text"] == "one"
        assert messages[second["parent"]]["role"] == "assistant"


async def test_regenerate_edit_and_branch_move_through_the_tree() -> None:
    async with FakeServer() as server:
        out, notes = await talk(server, "one", "/regenerate", "/branch", "/branch 1", "/edit two", "/branch 1 1")
        assert out.startswith("one\nagain one\none\none\ntwo\n")
        assert "* 2 again one" in notes
        session = next(iter(server.sessions.values()))
        assert [each["role"] for each in session["messages"].values()].count("user") == 2


@pytest.mark.parametrize("cuts", [[], [6], [7, 0]])
async def test_a_continued_answer_shows_what_is_added(cuts: list[int]) -> None:
    async with FakeServer() as server:
        server.cut_after_events = list(cuts)
        out, _ = await talk(server, "one", "/continue", "/history")
        assert out == "one\n and on\none\none and on\n"


async def test_params_and_system_are_set_and_taken_back() -> None:
    async with FakeServer() as server:
        _, notes = await talk(
            server,
            "/params temperature=0 stop=x",
            "hi",
            "/params temperature=",
            "/params",
            "/system Be brief.",
            "/system",
        )
        assert next(iter(server.sessions.values()))["params"] == {"stop": "x"}
        assert 'stop="x"' in notes
        assert "Be brief." in notes


async def test_a_parameter_that_is_no_json_number_is_the_servers_to_judge() -> None:
    async with FakeServer() as server:
        await talk(server, "/params temperature=NaN top_p=-Infinity")
        assert next(iter(server.sessions.values()))["params"] == {"temperature": "NaN", "top_p": "-Infinity"}


async def test_sessions_are_listed_and_opened_by_number() -> None:
    async with FakeServer() as server:
        await talk(server, "/new First", "hello first")
        out, notes = await talk(server, "/sessions", "/open 1")
        assert "1 First (2 messages)" in notes
        assert out == "hello first\nhello first\n"


async def test_errors_are_said_and_counted_when_nobody_watches() -> None:
    async with FakeServer() as server:
        _, notes = await talk(server, "/nonsense", "/open nowhere", "/regenerate", code=1)
        assert "there is no command /nonsense" in notes
        assert "nowhere" in notes
        assert "there is no such message yet" in notes


async def test_a_doubled_slash_is_a_message_that_begins_with_one() -> None:
    async with FakeServer() as server:
        out, _ = await talk(server, "//help me")
        assert out == "/help me\n"


@pytest.mark.parametrize("cuts", [[1], [3], [4], [5], [2, 1, 0, 1], [6, 0, 0]])
async def test_an_answer_survives_cut_connections(cuts: list[int]) -> None:
    text = "a b c d e f g h"
    async with FakeServer() as server:
        server.cut_after_events = list(cuts)
        out, _ = await talk(server, text)
        assert out == f"{text}\n"
        assert len(server.hellos) == len(cuts) + 1
        assert all("resume" in each for each in server.hellos[1:])


async def test_a_repeated_request_does_its_work_once() -> None:
    async with FakeServer() as server:
        server.cut_after_events = [0, 0, 0]
        await talk(server, "once")
        assert len(next(iter(server.sessions.values()))["messages"]) == 2


async def test_ctrl_c_stops_the_answer_and_not_the_program() -> None:
    async with FakeServer() as server:
        server.word_gate = asyncio.Event()

        async def interrupt() -> None:
            await server.waiting.wait()
            os.kill(os.getpid(), signal.SIGINT)

        interrupting = asyncio.create_task(interrupt())
        out, notes = await talk(server, "never the end", "/history")
        await interrupting
        assert out.startswith("never the\n")
        assert "stopped" in notes
        assert "assistant" in notes  # /history still ran


async def test_ctrl_c_leaves_an_answer_that_a_lost_connection_holds_up() -> None:
    async with FakeServer() as server:
        server.word_gate = asyncio.Event()
        out, notes = io.StringIO(), io.StringIO()
        async with asyncio.timeout(TIMEOUT_S), ChatClient(server.url) as client:
            app = ChatApp(client, Typed("never the end", "/quit"), Output(out, Console(file=notes, width=200)))
            running = asyncio.create_task(app.run())
            await server.waiting.wait()
            await server.__aexit__()
            await client.wait_for(lambda: not client.connected)
            os.kill(os.getpid(), signal.SIGINT)
            assert await running == 1
        assert "never the end".startswith(out.getvalue())
        assert "there is no connection" in notes.getvalue()


async def test_a_wrong_token_ends_the_client_with_the_servers_words() -> None:
    async with FakeServer(token="right") as server:
        with pytest.raises(NotConnectedError, match="a token is needed") as refused:
            async with ChatClient(server.url, token="wrong"):
                pass
    assert "--token" in refused.value.advice


async def test_an_unreachable_server_is_one_sentence() -> None:
    with pytest.raises(NotConnectedError, match=r"cannot reach ws://127\.0\.0\.1:1/ws"):
        async with ChatClient("http://127.0.0.1:1"):
            pass


@pytest.mark.parametrize("url", ["", "http://", "http://[::1", "http://127.0.0.1:99999", "http://a..b", "127.0.0.1:x"])
async def test_an_address_that_is_none_is_one_sentence(url: str) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        with pytest.raises(NotConnectedError, match="cannot reach"):
            async with ChatClient(url):
                pass


async def test_an_address_needs_no_scheme() -> None:
    async with (
        FakeServer() as server,
        asyncio.timeout(TIMEOUT_S),
        ChatClient(server.url.removeprefix("http://")) as client,
    ):
        assert client.connected


async def test_a_silent_connection_is_given_up_for_another() -> None:
    async with FakeServer() as server, asyncio.timeout(TIMEOUT_S), ChatClient(server.url, silence_s=0.05) as client:
        view = await client.open((await client.request("session.create"))["session"])
        await client.wait_for(lambda: len(server.hellos) >= 3)
        assert server.hellos[-1]["resume"] == [{"session": view.session, "after": 0}]


async def test_bytes_that_are_no_text_are_replaced() -> None:
    lines = PipedLines(io.TextIOWrapper(io.BytesIO(b"a\xffb\nrest\n"), encoding="utf-8"))
    async with asyncio.timeout(TIMEOUT_S):
        assert [await lines.read() for _ in range(3)] == ["a\ufffdb", "rest", None]


async def test_a_refusal_is_the_servers_sentence() -> None:
    async with FakeServer() as server, ChatClient(server.url) as client:
        with pytest.raises(ServerError, match="what is that") as caught:
            await client.request("no.such.thing")
        assert caught.value.code == "unknown_type"


async def test_a_refusal_for_now_says_when_to_come_back() -> None:
    frame = {"type": "error", "code": "overloaded", "detail": "12 requests are waiting", "retryable": True}
    assert str(ServerError({**frame, "retry_after_s": 2.6})) == "12 requests are waiting; try again in 3 s"
    assert str(ServerError(frame)) == "12 requests are waiting"


async def test_the_command_works_over_pipes() -> None:
    async with FakeServer() as server:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "chatserve", "chat", "--url", server.url),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parent.parent.parent,
        )
        async with asyncio.timeout(TIMEOUT_S):
            out, err = await process.communicate(b"hello pipe\n/regenerate\n")
        assert (process.returncode, out.decode()) == (0, "hello pipe\nagain hello pipe\n"), err


@given(st.text())
def test_printed_text_cannot_move_the_cursor(text: str) -> None:
    shown = printable(text)
    assert not any(char for char in shown if (ord(char) < 32 and char not in "\n\t") or 127 <= ord(char) < 160)
    assert [char for char in text if char in "\n\t" or char.isprintable()] == [
        char for char in shown if char in "\n\t" or char.isprintable()
    ]


def frames(text: str) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = [
        {"type": "message.added", "message": "u", "parent": None, "role": "user", "text": "q", "status": "done"},
        {
            "type": "message.added",
            "message": "a",
            "parent": "u",
            "role": "assistant",
            "text": "",
            "status": "generating",
        },
        {"type": "branch.selected", "leaf": "a"},
        *({"type": "generation.delta", "message": "a", "text": char} for char in text),
        {"type": "generation.end", "message": "a", "reason": "stop", "status": "done", "usage": {}, "seed": 1},
    ]
    return [{**frame, "session": "s", "seq": seq} for seq, frame in enumerate(made, start=1)]


EMPTY = {
    "type": "snapshot",
    "session": "s",
    "seq": 0,
    "title": "",
    "leaf": None,
    "messages": [],
    "part": 0,
    "last": True,
}


@given(st.text(max_size=20), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6))
def test_replays_of_any_range_change_nothing(text: str, replays: list[tuple[int, int]]) -> None:
    """At any point the server may replay what the view holds already: the end is the same."""
    events = frames(text)
    plain, disturbed = SessionView("s"), SessionView("s")
    for view in (plain, disturbed):
        view.apply(EMPTY)
    for index, event in enumerate(events):
        plain.apply(event)
        disturbed.apply(event)
        for start, length in replays:
            for again in events[min(start, index) : min(start + length, index + 1)]:
                assert not disturbed.apply(again)
    assert disturbed == plain
    assert plain.messages["a"].text == text


def test_half_a_snapshot_is_not_resumed_from() -> None:
    view = SessionView("s")
    message = {"message": "m", "parent": None, "role": "user", "text": "t", "status": "done"}
    view.apply({**EMPTY, "seq": 7, "messages": [message], "leaf": "n", "last": False})
    assert view.seq == -1
    view.apply({**EMPTY, "seq": 7, "messages": [{**message, "message": "n", "parent": "m"}], "leaf": "n", "part": 1})
    assert view.seq == 7
    assert [each.message for each in view.path()] == ["m", "n"]


def test_a_deleted_subtree_goes_whole() -> None:
    view = SessionView("s")
    view.apply(EMPTY)
    for event in frames("x"):
        view.apply(event)
    view.apply({"type": "branch.selected", "leaf": None, "session": "s", "seq": 6})
    view.apply({"type": "message.deleted", "message": "u", "deleted": 2, "session": "s", "seq": 7})
    assert view.messages == {}
    assert json.dumps(view.params) == "{}"


def test_the_path_has_no_hole_between_a_deletion_and_the_choice_of_a_new_leaf() -> None:
    view = SessionView("s")
    view.apply(EMPTY)
    for event in frames("x"):
        view.apply(event)
    assert view.leaf == "a"
    view.apply({"type": "message.deleted", "message": "a", "deleted": 1, "session": "s", "seq": view.seq + 1})
    assert [each.message for each in view.path()] == ["u"]
    view.apply({"type": "message.deleted", "message": "u", "deleted": 1, "session": "s", "seq": view.seq + 1})
    assert view.path() == []
