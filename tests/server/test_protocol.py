"""`ChatProtocol`: how a connection begins, shows that it lives, and ends."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatserve.server import frames
from chatserve.server.protocol import PING, PONG, ChatProtocol, Close, CloseCode, Opened, Send, Typed
from chatserve.types import UserId
from tests.server.talking import HELLO, LIMITS, error, fresh, opened, receive


@pytest.mark.parametrize(
    "first", [{"type": "ping"}, {"type": "session.list", "id": "1"}, {"type": "surprise"}, {**HELLO, "protocol": 1}]
)
def test_what_comes_before_hello_or_speaks_another_version_closes_with_4000(first: object) -> None:
    protocol = fresh()
    assert receive(protocol, first).code == CloseCode.MISUSE
    assert protocol.receive_text(json.dumps(HELLO), 1.0) == []


def test_no_hello_within_5_seconds_closes_with_4000() -> None:
    protocol = fresh()
    assert protocol.tick(4.9) == []
    assert protocol.deadline() == 5.0
    (output,) = protocol.tick(5.0)
    assert isinstance(output, Close)
    assert output.code == CloseCode.MISUSE
    assert protocol.tick(100.0) == []


def test_a_second_hello_is_a_bad_frame() -> None:
    assert error(opened(), HELLO)["code"] == "bad_frame"


@pytest.mark.parametrize(
    ("bearer", "token", "user"),
    [("a", None, "ada"), (None, "b", "bob"), ("a", "b", "bob"), (None, None, "nobody"), ("x", None, None)],
)
def test_the_token_comes_from_hello_or_else_from_the_upgrade(
    bearer: str | None, token: str | None, user: str | None
) -> None:
    hello = HELLO if token is None else {**HELLO, "token": token}
    output = receive(fresh(bearer), hello)
    if user is None:
        assert isinstance(output, Close)
        assert output.code == CloseCode.NOT_AUTHENTICATED
    else:
        assert output == Opened(UserId(user), ())


def test_hello_names_what_to_resume() -> None:
    output = receive(fresh(), {**HELLO, "resume": [{"session": "s", "after": 3, "x": 1}, {"session": "t", "after": 0}]})
    assert output.resume == (frames.Resume("s", 3), frames.Resume("t", 0))


@pytest.mark.parametrize(
    ("first", "code"),
    [
        *(
            ({**HELLO, "resume": resume}, "bad_params")
            for resume in (
                {},
                [3],
                [{"session": "s"}],
                *([{"session": "s", "after": after}] for after in (-1, 1.5, "3", None, True)),
                [{"session": "s", "after": 0}] * 1001,
            )
        ),
        ({"type": "hello"}, "bad_frame"),
        ({**HELLO, "token": 3}, "bad_params"),
        ({"protocol": "chat.v1"}, "bad_frame"),
        ("{", "bad_frame"),
        ("[]", "bad_frame"),
        (b"\x00", "bad_frame"),
    ],
    ids=lambda given: str(given)[:60],
)
def test_a_first_frame_that_is_no_valid_hello_is_told_why_and_closed_with_4000(first: Any, code: str) -> None:
    protocol = fresh()
    if isinstance(first, bytes):
        said, close = protocol.receive_binary(1.0)
    else:
        said, close = protocol.receive_text(first if isinstance(first, str) else json.dumps(first), 1.0)
    assert isinstance(said, Send)
    assert json.loads(said.text)["code"] == code
    assert isinstance(close, Close)
    assert close.code == CloseCode.MISUSE
    assert protocol.receive_text(json.dumps(HELLO), 1.0) == []


def test_a_ping_every_20_seconds_and_4008_after_8_of_silence() -> None:
    protocol = fresh()
    receive(protocol, HELLO, 1.0)
    assert protocol.tick(19.9) == []
    assert protocol.deadline() <= 21.0
    assert protocol.tick(21.0) == [Send(PING)]
    assert protocol.deadline() == 29.0
    assert protocol.tick(28.9) == []
    (output,) = protocol.tick(29.0)
    assert isinstance(output, Close)
    assert output.code == CloseCode.TOO_SLOW


@pytest.mark.parametrize("frame", ['{"type":"pong"}', '{"type":"ping"}', "{", '{"type":"session.list","id":"1"}'])
def test_any_frame_is_a_sign_of_life(frame: str) -> None:
    protocol = fresh()
    receive(protocol, HELLO, 0.0)
    assert protocol.tick(20.0) == [Send(PING)]
    protocol.receive_text(frame, 27.9)
    assert protocol.tick(28.0) == []
    assert protocol.tick(40.0) == [Send(PING)], "a talkative client learns too that the server is there"
    protocol.receive_binary(47.9)
    assert protocol.tick(48.0) == []
    assert protocol.deadline() == 60.0


def test_pings_are_answered_and_pongs_are_not() -> None:
    protocol = opened()
    assert receive(protocol, {"type": "ping"}) == Send(PONG)
    assert protocol.receive_text('{"type":"pong"}', 2.0) == []


def test_typing_is_a_hint_and_never_an_error() -> None:
    protocol = opened()
    output = receive(protocol, {"type": "typing", "session": "s", "parent": "m", "text": "hel"})
    assert isinstance(output, Typed)
    assert (output.typing.session, output.typing.parent, output.typing.text) == ("s", "m", "hel")
    for broken in ({}, {"session": 3, "parent": None}, {"session": "s"}, {"session": "s", "parent": None, "text": 3}):
        assert protocol.receive_text(json.dumps({"type": "typing", **broken}), 2.0) == []
    long = {"type": "typing", "session": "s", "parent": None, "text": "x" * 1001}
    assert protocol.receive_text(json.dumps(long), 2.0) == []


@given(st.lists(st.sampled_from(["tick", "frame", "garbage", "binary"]), max_size=30), st.integers(0, 30))
def test_it_closes_at_most_once_and_says_nothing_afterwards(steps: list[str], pace: int) -> None:
    protocol, now, closes = fresh(), 0.0, 0
    for step in steps:
        now += pace
        match step:
            case "tick":
                outputs = protocol.tick(now)
            case "frame":
                outputs = protocol.receive_text(json.dumps(HELLO), now)
            case "garbage":
                outputs = protocol.receive_text("}", now)
            case _:
                outputs = protocol.receive_binary(now)
        assert not (closes and outputs)
        closes += sum(isinstance(output, Close) for output in outputs)
        assert protocol.closed == bool(closes)


def test_a_token_that_is_taken_back_ends_its_connections_at_the_next_ping() -> None:
    users = {"a": UserId("ada"), "b": UserId("bob")}
    first, second = (ChatProtocol(LIMITS, users.get, 0.0, "a") for _ in range(2))
    for protocol, hello in ((first, HELLO), (second, {**HELLO, "token": "b"})):
        assert isinstance(receive(protocol, hello, 1.0), Opened)
        assert protocol.tick(protocol.deadline()) == [Send(PING)]
        receive(protocol, {"type": "ping"}, protocol.deadline() - 1)
    del users["a"]
    (close,) = first.tick(first.deadline())
    assert isinstance(close, Close)
    assert close.code is CloseCode.NOT_AUTHENTICATED
    assert first.closed
    assert second.tick(second.deadline()) == [Send(PING)]
    users["b"] = UserId("carol")
    receive(second, {"type": "ping"}, second.deadline() - 1)
    assert isinstance(second.tick(second.deadline())[0], Close)
