"""Cuts a session's state into `snapshot` frames.

Owns the rule that a frame stays under 512 KiB, whatever the session holds; knows nothing of sockets or of time. The
session's own fields stand on each frame, messages fill the rest in creation order, and a message that fits no frame is
cut at a code point: its later pieces carry `append: true`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec
from msgspec import UNSET

from chatserve.chat.store import MessageRecord, SessionState
from chatserve.server.frames import Snapshot, SnapshotMessage

MAX_SNAPSHOT_FRAME_BYTES: Final = 512 * 1024
_FREE_BYTES: Final = 64
"""Room for a long part number and the like."""

_encoder = msgspec.json.Encoder()


def snapshot_frames(state: SessionState, max_bytes: int = MAX_SNAPSHOT_FRAME_BYTES) -> Iterator[str]:
    """Encoded `snapshot` frames of fewer than `max_bytes` bytes, the last one with `last` true."""
    empty = _encoder.encode(_frame(state, 0, last=False)).decode()
    head, tail = empty.split('"messages":[],', 1)
    head, tail = head + '"messages":[', "],"
    room = max_bytes - len(_encoder.encode(_frame(state, 0, last=False))) - _FREE_BYTES
    assert room > _FREE_BYTES, "the limits on titles, system prompts and params leave room for messages"
    part, used = 0, 0
    pieces: list[str] = []

    def finish(*, last: bool) -> str:
        return f'{head}{",".join(pieces)}{tail}"part":{part},"last":{"true" if last else "false"}}}'

    for entry, size in _entries(state, room):
        if pieces and used + size + 1 > room:
            yield finish(last=False)
            part, used = part + 1, 0
            pieces.clear()
        pieces.append(entry)
        used += size + 1
    yield finish(last=True)


def _frame(state: SessionState, part: int, *, last: bool) -> Snapshot:
    record = state.record
    return Snapshot(
        session=record.session,
        seq=state.seq,
        version=record.version,
        title=record.title,
        system=record.system,
        params=record.params,
        leaf=record.leaf,
        messages=[],
        part=part,
        last=last,
    )


def _entries(state: SessionState, room: int) -> Iterator[tuple[str, int]]:
    """Each message's JSON and its size in bytes, under `room`."""
    for record in state.messages:
        data = _encoder.encode(_message(record))
        if len(data) + 1 <= room:
            yield data.decode(), len(data)
            continue
        # A code point is at most 6 bytes of JSON, or 12 as a pair of escapes, which our encoder never writes.
        fixed = len(_encoder.encode(_message(record, text="", append=True)))
        step = max(1, (room - fixed - 1) // 6)
        for start in range(0, len(record.text), step):
            piece = _message(record, text=record.text[start : start + step], append=start > 0)
            data = _encoder.encode(piece)
            assert len(data) < room
            yield data.decode(), len(data)


def _message(record: MessageRecord, *, text: str | None = None, append: bool = False) -> SnapshotMessage:
    usage = record.usage
    return SnapshotMessage(
        message=record.message,
        parent=record.parent,
        role=record.role,
        text=record.text if text is None else text,
        status=record.status,
        created_at=record.created_at,
        usage=UNSET if usage.prompt_tokens is UNSET else usage,
        append=True if append else UNSET,
    )
