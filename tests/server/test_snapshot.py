"""Snapshots: every message arrives whole, and no frame is too large."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatserve.chat.events import Usage
from chatserve.chat.store import MessageRecord, SessionRecord, SessionState
from chatserve.server.snapshot import MAX_SNAPSHOT_FRAME_BYTES, snapshot_frames
from chatserve.terminal.view import SessionView
from chatserve.types import MessageId, SessionId, UserId


def state(texts: list[str], *, system: str | None = None, title: str = "t") -> SessionState:
    messages = tuple(
        MessageRecord(
            message=MessageId(f"m{index}"),
            parent=MessageId(f"m{index - 1}") if index else None,
            role="assistant" if index % 2 else "user",
            text=text,
            status="done",
            created_at=1.5,
            usage=Usage(prompt_tokens=3, cached_tokens=3, completion_tokens=1) if index % 2 else Usage(),
        )
        for index, text in enumerate(texts)
    )
    record = SessionRecord(
        session=SessionId("s"),
        user=UserId("ada"),
        title=title,
        system=system,
        params={"stop": ['"messages":[],']},
        leaf=messages[-1].message if messages else None,
        version=7,
        created_at=1.0,
        updated_at=2.0,
    )
    return SessionState(record=record, seq=42, messages=messages)


def read(frames: list[str], max_bytes: int) -> list[dict[str, Any]]:
    """The messages, put together as a client does."""
    messages: dict[str, dict[str, Any]] = {}
    parsed = [json.loads(frame) for frame in frames]
    for part, frame in enumerate(parsed):
        assert len(frames[part].encode()) < max_bytes
        assert frame["part"] == part
        assert frame["last"] == (part == len(frames) - 1)
        assert {**frame, "messages": 0, "part": 0, "last": 0} == {**parsed[0], "messages": 0, "part": 0, "last": 0}
        for message in frame["messages"]:
            if message.get("append"):
                messages[message["message"]]["text"] += message["text"]
            else:
                assert message["message"] not in messages
                assert message["parent"] is None or message["parent"] in messages
                messages[message["message"]] = message
    return list(messages.values())


def test_an_empty_session_is_one_frame() -> None:
    (frame,) = snapshot_frames(state([], system='"messages":[],'))
    assert json.loads(frame) == {
        "type": "snapshot",
        "session": "s",
        "seq": 42,
        "version": 7,
        "title": "t",
        "system": '"messages":[],',
        "params": {"stop": ['"messages":[],']},
        "leaf": None,
        "messages": [],
        "part": 0,
        "last": True,
    }


def test_a_message_says_what_is_known_of_it() -> None:
    (frame,) = snapshot_frames(state(["hi", "ho"]))
    assert json.loads(frame)["messages"] == [
        {"message": "m0", "parent": None, "role": "user", "text": "hi", "status": "done", "created_at": 1.5},
        {
            "message": "m1",
            "parent": "m0",
            "role": "assistant",
            "text": "ho",
            "status": "done",
            "created_at": 1.5,
            "usage": {"prompt_tokens": 3, "cached_tokens": 3, "completion_tokens": 1},
        },
    ]


@pytest.mark.parametrize(
    "text", ["x" * 262_144, "\n" * 262_144, "\x00" * 262_144, "\U0001f600" * 65_536, '"' * 262_144]
)
def test_texts_at_their_limit_fit_whatever_they_are_made_of(text: str) -> None:
    texts = [text, "short", text, text]
    frames = list(snapshot_frames(state(texts, system="\x00" * 65_536, title='"' * 1024)))
    assert [message["text"] for message in read(frames, MAX_SNAPSHOT_FRAME_BYTES)] == texts


def test_a_long_session_fills_its_frames() -> None:
    texts = ["word " * 400] * 1500
    frames = list(snapshot_frames(state(texts)))
    assert [message["text"] for message in read(frames, MAX_SNAPSHOT_FRAME_BYTES)] == texts
    assert len(frames) == -(-sum(len(frame) for frame in frames) // (MAX_SNAPSHOT_FRAME_BYTES - 4096))


@settings(max_examples=60)
@given(st.lists(st.text(max_size=60) | st.integers(0, 1500).map("\x00".__mul__), max_size=12), st.integers(900, 4000))
def test_any_session_arrives_whole_under_any_frame_limit(texts: list[str], max_bytes: int) -> None:
    frames = list(snapshot_frames(state(texts), max_bytes))
    assert [message["text"] for message in read(frames, max_bytes)] == texts


@settings(max_examples=60)
@given(st.lists(st.text(max_size=60) | st.integers(0, 1500).map("\x00".__mul__), max_size=12), st.integers(900, 4000))
def test_the_terminal_client_puts_any_session_together(texts: list[str], max_bytes: int) -> None:
    view = SessionView("s")
    for _ in range(2):  # the second replaces the first
        for frame in snapshot_frames(state(texts), max_bytes):
            view.apply(json.loads(frame))
        assert [message.text for message in view.path()] == texts
        assert view.seq == 42
