"""The outgoing queue of one socket: order, melting deltas, the bound."""

from __future__ import annotations

import asyncio
import json

from hypothesis import given
from hypothesis import strategies as st

from chatserve.chat.events import AnyEvent, BranchSelected, GenerationDelta
from chatserve.server.outbox import MAX_MERGED_BYTES, Frame, Outbox, encode_event, frame_of, merge_events
from chatserve.types import MessageId, SessionId


def delta(seq: int, text: str = "x", session: str = "s", message: str = "m") -> GenerationDelta:
    return GenerationDelta(session=SessionId(session), seq=seq, message=MessageId(message), text=text)


def other(seq: int, session: str = "s") -> BranchSelected:
    return BranchSelected(session=SessionId(session), seq=seq, leaf=None)


async def drain(outbox: Outbox) -> list[dict[str, object]]:
    frames = []
    while len(outbox):
        text = await outbox.next_frame()
        assert text is not None
        frames.append(json.loads(text))
        outbox.check()
    return frames


async def test_waiting_neighbours_melt_into_one_frame_that_covers_them() -> None:
    outbox = Outbox(1 << 20)
    for seq, text in enumerate("hello", start=4):
        outbox.put(encode_event(delta(seq, text)))
    assert await drain(outbox) == [
        {"type": "generation.delta", "session": "s", "seq": 8, "message": "m", "text": "hello", "from_seq": 4}
    ]


async def test_a_single_delta_names_no_range() -> None:
    outbox = Outbox(1 << 20)
    outbox.put(encode_event(delta(4)))
    assert await drain(outbox) == [{"type": "generation.delta", "session": "s", "seq": 4, "message": "m", "text": "x"}]


async def test_what_stands_between_two_deltas_of_a_session_keeps_them_apart() -> None:
    outbox = Outbox(1 << 20)
    for event in (delta(1), other(2), delta(3), delta(4, message="n"), delta(6, message="n")):
        outbox.put(encode_event(event))
    assert [frame["seq"] for frame in await drain(outbox)] == [1, 2, 3, 4, 6]


async def test_frames_of_other_sessions_do_not_keep_deltas_apart() -> None:
    outbox = Outbox(1 << 20)
    for event in (delta(1), delta(1, session="t"), delta(2), other(2, session="t"), delta(3)):
        outbox.put(encode_event(event))
    assert [(frame["session"], frame.get("from_seq"), frame["seq"]) for frame in await drain(outbox)] == [
        ("s", 1, 3),
        ("t", None, 1),
        ("t", None, 2),
    ]


async def test_what_has_left_takes_no_more() -> None:
    outbox = Outbox(1 << 20)
    outbox.put(encode_event(delta(1)))
    await outbox.next_frame()
    outbox.put(encode_event(delta(2)))
    assert [frame["seq"] for frame in await drain(outbox)] == [2]


async def test_past_the_bound_it_ends_and_holds_nothing() -> None:
    outbox = Outbox(10_000)
    for seq in range(1, 1000):
        outbox.put(encode_event(other(seq)))
        outbox.check()
    assert outbox.ended
    assert (len(outbox), outbox.num_bytes) == (0, 0)
    assert await outbox.next_frame() is None
    await asyncio.wait_for(outbox.wait_ended(), 1)


async def test_a_frame_larger_than_the_bound_is_taken_alone() -> None:
    outbox = Outbox(1000)
    outbox.put(frame_of('"' + "x" * 5000 + '"'))
    assert not outbox.ended
    assert await outbox.next_frame()
    outbox.put(frame_of("1"))
    assert not outbox.ended


async def test_many_deltas_fit_where_as_many_frames_would_not() -> None:
    outbox = Outbox(10_000)
    for seq in range(1, 50):
        outbox.put(encode_event(delta(seq)))
    assert not outbox.ended
    assert len(await drain(outbox)) == 1


async def test_a_merged_frame_stays_below_its_limit() -> None:
    outbox = Outbox(1 << 24)
    for seq in range(1, 400):
        outbox.put(encode_event(delta(seq, "\x00" * 500)))
    texts = []
    while len(outbox):
        text = await outbox.next_frame()
        assert text is not None
        assert len(text) <= MAX_MERGED_BYTES
        texts.append(json.loads(text)["text"])
    assert "".join(texts) == "\x00" * 500 * 399
    assert len(texts) < 12


async def test_finishing_sends_what_waits_and_takes_no_more() -> None:
    outbox = Outbox(1 << 20)
    outbox.put(frame_of("1"))
    outbox.finish()
    outbox.put(frame_of("2"))
    assert [await outbox.next_frame(), await outbox.next_frame()] == ["1", None]


async def test_a_ping_overtakes_what_waits() -> None:
    outbox = Outbox(1 << 20)
    outbox.put(encode_event(delta(1)))
    outbox.put_first(frame_of('{"type":"ping"}'))
    outbox.put(encode_event(delta(2)))
    assert [frame["type"] for frame in await drain(outbox)] == ["ping", "generation.delta"]


async def test_whoever_sends_much_waits_until_half_is_free_and_two_never_share_one_room() -> None:
    outbox = Outbox(10_000)
    frame = frame_of("x" * 3000)

    async def bulk() -> None:
        for _ in range(10):
            await outbox.room(frame.num_bytes)
            outbox.put(frame)
            outbox.check()

    senders = [asyncio.create_task(bulk()) for _ in range(3)]
    for _ in range(30):
        assert await asyncio.wait_for(outbox.next_frame(), 5)
    await asyncio.gather(*senders)
    assert not outbox.ended
    outbox.end()
    await asyncio.wait_for(outbox.room(1 << 30), 1)


events = st.lists(st.sampled_from(["delta", "other message", "other"]), max_size=40)


def numbered(kinds: list[str]) -> list[AnyEvent]:
    made: list[AnyEvent] = []
    for seq, kind in enumerate(kinds, start=1):
        match kind:
            case "delta":
                made.append(delta(seq, str(seq)))
            case "other message":
                made.append(delta(seq, str(seq), message="n"))
            case _:
                made.append(other(seq))
    return made


def spelled_out(frames: list[dict[str, object]]) -> list[tuple[int, object]]:
    """Each frame's last number and the text so far a message: equal for any way of merging the same events."""
    texts: dict[object, str] = {}
    seq = 0
    for frame in frames:
        assert frame.get("from_seq", frame["seq"]) == seq + 1
        assert isinstance(frame["seq"], int)
        seq = frame["seq"]
        if frame["type"] == "generation.delta":
            texts[frame["message"]] = texts.get(frame["message"], "") + str(frame["text"])
    return [(seq, sorted(texts.items(), key=str))]


@given(events, st.lists(st.booleans(), max_size=60))
async def test_however_it_melts_the_reader_sees_each_event_once_and_in_order(
    kinds: list[str], takes: list[bool]
) -> None:
    made = numbered(kinds)
    plain = [json.loads(encode_event(event).text) for event in made]
    outbox = Outbox(1 << 20)
    seen: list[dict[str, object]] = []
    takes = [*takes, *([True] * len(made))]
    for event in made:
        outbox.put(encode_event(event))
        outbox.check()
        while len(outbox) and takes and takes.pop():
            text = await outbox.next_frame()
            assert text is not None
            seen.append(json.loads(text))
    seen += await drain(outbox)
    assert spelled_out(seen) == spelled_out(plain)
    merged = [json.loads(encode_event(event).text) for event in merge_events(made)]
    assert spelled_out(merged) == spelled_out(plain)


def test_an_event_is_encoded_once_for_all() -> None:
    frame = encode_event(delta(1))
    assert isinstance(frame, Frame)
    assert json.loads(frame.text)["seq"] == frame.seq == 1
