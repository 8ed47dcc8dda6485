"""Frames survive any cutting of the stream, and nothing else is taken for one."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatserve.engine.framing import MAX_FRAME_BYTES, MalformedFrameError, command_reader, encode, event_reader
from chatserve.engine.messages import (
    AnyCommand,
    Cancel,
    Command,
    Drain,
    Drained,
    EngineEvent,
    Finished,
    Hint,
    Inspect,
    PathRef,
    Release,
    StepOutput,
    TokenDelta,
)
from chatserve.types import RequestId, UserId
from tests.fakes.engines import make_submit

PATH = PathRef("epoch", 3, 17)
COMMANDS: list[AnyCommand] = [
    make_submit("a", range(100)),
    make_submit("b", (), base=PATH, num_prompt_tokens=17, max_tokens=None),
    Cancel(RequestId("a")),
    Cancel(RequestId("a"), 3),
    Hint(user=UserId("ann"), key="chat", base=PATH, token_ids=(7, 8), num_shared_tokens=2, num_draft_tokens=2),
    Release(UserId("ann"), (PATH, PATH)),
    Release(UserId("ann"), (), 3, (1, 2, 3, 4)),
    Inspect(5, with_map=True),
    Drain(),
]
EVENTS: list[EngineEvent] = [
    StepOutput(deltas=(TokenDelta(RequestId("a"), 0, (1, 2)),)),
    StepOutput(finished=(Finished(request_id=RequestId("a"), reason="stop", num_output_tokens=2, path=PATH),)),
    Drained(),
]


@given(st.lists(st.integers(1, 300), max_size=60))
def test_commands_and_events_survive_any_cutting(cuts: list[int]) -> None:
    for messages, reader in ((COMMANDS, command_reader()), (EVENTS, event_reader())):
        stream = b"".join(encode(message) for message in messages)
        read = []
        for cut in [*cuts, len(stream)]:
            piece, stream = stream[:cut], stream[cut:]
            read += reader.feed(piece)
        read += reader.feed(stream)
        assert read == messages


@given(st.binary(min_size=5, max_size=64))
def test_garbage_is_refused_or_waits_for_more_and_raises_nothing_else(garbage: bytes) -> None:
    try:
        read = list(command_reader().feed(garbage))
    except MalformedFrameError:
        return
    assert all(isinstance(command, Command) for command in read)


def test_a_reader_refuses_messages_of_the_other_side() -> None:
    with pytest.raises(MalformedFrameError):
        list(command_reader().feed(encode(Drained())))
    with pytest.raises(MalformedFrameError):
        list(event_reader().feed(encode(Drain())))


def test_a_length_past_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(MalformedFrameError, match=str(MAX_FRAME_BYTES)):
        list(command_reader().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "big")))


def test_messages_before_a_malformed_one_are_read() -> None:
    commands = command_reader().feed(encode(Drain()) + b"\0\0\0\1\xc1")
    assert next(commands) == Drain()
    with pytest.raises(MalformedFrameError):
        next(commands)


def test_missing_fields_are_refused() -> None:
    body = msgspec.msgpack.encode({"type": "Cancel"})
    with pytest.raises(MalformedFrameError, match="request_id"):
        list(command_reader().feed(len(body).to_bytes(4, "big") + body))
