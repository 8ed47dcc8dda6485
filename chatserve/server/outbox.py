"""What waits to be sent on one socket: a bounded queue in which neighbouring deltas melt together.

Owns the order and the size of what waits; knows no socket and no subscription. One event loop uses it: whoever sends
never waits, the writer takes with `next_frame`, and a reader of the store that has much to send (a snapshot, a replay)
waits for `room`. Past the bound it has `ended`, once and for good, and holds nothing. A single frame larger than the
bound is taken when nothing else waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import UnsetType

from chatserve.chat.events import AnyEvent, GenerationDelta
from chatserve.types import SessionId

FRAME_OVERHEAD_BYTES: Final = 256
"""What a waiting frame costs beside its text: a flood of tiny frames is bounded too."""
MAX_MERGED_BYTES: Final = 128 * 1024
"""A merged delta's text stays under this, so that its frame is far below any frame limit."""


class Frame(msgspec.Struct, frozen=True):
    """An encoded frame, made once for all sockets. `delta` is set where it may melt with a neighbour."""

    text: str
    num_bytes: int
    session: SessionId | None = None
    seq: int = 0
    delta: GenerationDelta | None = None


_encoder = msgspec.json.Encoder()


def frame_of(text: str) -> Frame:
    num_bytes = len(text) if text.isascii() else len(text.encode())
    return Frame(text, num_bytes + FRAME_OVERHEAD_BYTES)


def encode(value: object) -> Frame:
    data = _encoder.encode(value)
    return Frame(data.decode(), len(data) + FRAME_OVERHEAD_BYTES)


def encode_event(event: AnyEvent) -> Frame:
    data = _encoder.encode(event)
    delta = event if isinstance(event, GenerationDelta) else None
    return Frame(data.decode(), len(data) + FRAME_OVERHEAD_BYTES, event.session, event.seq, delta)


def merge(deltas: Sequence[GenerationDelta]) -> GenerationDelta:
    """One delta that stands for neighbours of one message, in order."""
    first, last = deltas[0], deltas[-1]
    if len(deltas) == 1:
        return first
    return GenerationDelta(
        session=last.session,
        seq=last.seq,
        message=last.message,
        text="".join(delta.text for delta in deltas),
        from_seq=first_seq(first),
    )


def first_seq(event: AnyEvent) -> int:
    if isinstance(event, GenerationDelta) and not isinstance(event.from_seq, UnsetType):
        return event.from_seq
    return event.seq


def merge_events(events: Sequence[AnyEvent]) -> list[AnyEvent]:
    """The same events in as few frames as the protocol allows."""
    merged: list[AnyEvent] = []
    run: list[GenerationDelta] = []
    run_bytes = 0
    for event in events:
        size = len(event.text) * 4 if isinstance(event, GenerationDelta) else 0
        melts = isinstance(event, GenerationDelta) and run and neighbours(run[-1], event)
        if run and not (melts and run_bytes + size <= MAX_MERGED_BYTES):
            merged.append(merge(run))
            run, run_bytes = [], 0
        if isinstance(event, GenerationDelta):
            run.append(event)
            run_bytes += size
        else:
            merged.append(event)
    if run:
        merged.append(merge(run))
    return merged


def neighbours(before: GenerationDelta, after: GenerationDelta) -> bool:
    return before.session == after.session and before.message == after.message and before.seq + 1 == first_seq(after)


class _Waiting:
    """One frame to be, possibly made of several deltas."""

    __slots__ = ("deltas", "frame", "num_bytes")

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.num_bytes = frame.num_bytes
        self.deltas = [] if frame.delta is None else [frame.delta]


class Outbox:
    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.ended = False
        self._finishing = False
        self.num_bytes = 0
        self._waiting: deque[_Waiting] = deque()
        self._tails: dict[SessionId, _Waiting] = {}
        """The last waiting frame of each session, while it is a delta."""
        self._changed = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self._end = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, frame: Frame) -> None:
        """Queue a frame behind the others, or into a waiting neighbour."""
        if self.ended or self._finishing:
            return
        if frame.session is not None:
            tail = self._tails.get(frame.session)
            if tail is not None and frame.delta is not None and self._melt(tail, frame):
                return
        waiting = _Waiting(frame)
        self._waiting.append(waiting)
        if frame.session is not None:
            if frame.delta is None:
                self._tails.pop(frame.session, None)
            else:
                self._tails[frame.session] = waiting
        self._grew(frame.num_bytes)

    def put_first(self, frame: Frame) -> None:
        """Queue a frame that belongs to no session before all others (heartbeats)."""
        assert frame.session is None, "a session's frames keep their order"
        if self.ended or self._finishing:
            return
        self._waiting.appendleft(_Waiting(frame))
        self._grew(frame.num_bytes)

    async def room(self, num_bytes: int) -> None:
        """Return when that many fit into half of the bound, or nothing waits, or nothing will ever be sent again.

        Whoever waited puts its frame before it waits for anything else: then two of them never share one room.
        """
        while self._waiting and self.num_bytes + num_bytes > self.max_bytes // 2 and not self.ended:
            self._drained.clear()
            await self._drained.wait()

    async def next_frame(self) -> str | None:
        """The next frame's text, when there is one; None: there will be none."""
        while not self._waiting:
            if self.ended or self._finishing:
                return None
            self._changed.clear()
            await self._changed.wait()
        waiting = self._waiting.popleft()
        self.num_bytes -= waiting.num_bytes
        session = waiting.frame.session
        if session is not None and self._tails.get(session) is waiting:
            del self._tails[session]
        self._drained.set()
        if len(waiting.deltas) > 1:
            return _encoder.encode(merge(waiting.deltas)).decode()
        return waiting.frame.text

    def finish(self) -> None:
        """Take nothing more, but let what waits be sent."""
        self._finishing = True
        self._changed.set()

    async def wait_ended(self) -> None:
        await self._end.wait()

    def end(self) -> None:
        """Drop all and take nothing more."""
        self.ended = True
        self._waiting.clear()
        self._tails.clear()
        self.num_bytes = 0
        self._changed.set()
        self._drained.set()
        self._end.set()

    def check(self) -> None:
        """Assert the invariants: sizes add up, and a tail is its session's last waiting frame."""
        assert self.num_bytes == sum(waiting.num_bytes for waiting in self._waiting)
        assert self.num_bytes <= self.max_bytes or len(self._waiting) == 1
        last = {waiting.frame.session: waiting for waiting in self._waiting if waiting.frame.session is not None}
        for session, tail in self._tails.items():
            assert last[session] is tail
            assert tail.deltas
        assert not (self.ended and self._waiting)

    def _melt(self, tail: _Waiting, frame: Frame) -> bool:
        delta = frame.delta
        assert delta is not None
        size = frame.num_bytes - FRAME_OVERHEAD_BYTES
        if not neighbours(tail.deltas[-1], delta) or tail.num_bytes + size > MAX_MERGED_BYTES:
            return False
        tail.deltas.append(delta)
        tail.num_bytes += size
        self._grew(size)
        return True

    def _grew(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self.num_bytes > self.max_bytes and len(self._waiting) > 1:
            self.end()
        else:
            self._changed.set()
