"""Runs of deltas as they lie in Redis: chunks, whose format lua/chunk.lua has, and what a script takes of a delta."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

import msgspec

from chatserve.chat.events import GenerationDelta
from chatserve.chat.store import Delta
from chatserve.types import MessageId, SessionId

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_HEAD: Final = struct.Struct("<QH")
_TRAILER: Final = struct.Struct("<QIII")
_NEWS_HEAD: Final = struct.Struct("<QI")


class Chunk:
    """Deltas of one attempt at one message."""

    def __init__(self, packed: bytes) -> None:
        self._packed = packed
        self.first_seq, length = _HEAD.unpack_from(packed)
        self._start = _HEAD.size + length
        self.attempt, self.message = _split(packed[_HEAD.size : self._start])

    def _backwards(self) -> Iterator[tuple[int, int, int, int]]:
        """Of each delta, the last one first: its number, and where its text and token ids begin and end."""
        stop = len(self._packed)
        while stop > self._start:
            seq, _, num_tokens, num_bytes = _TRAILER.unpack_from(self._packed, stop - _TRAILER.size)
            end = stop - _TRAILER.size
            middle = end - 4 * num_tokens
            stop = middle - num_bytes
            yield seq, stop, middle, end

    def content(self) -> tuple[bytes, bytes]:
        """Text and packed token ids of all its deltas."""
        texts: list[bytes] = []
        token_ids: list[bytes] = []
        for _, start, middle, end in self._backwards():
            texts.append(self._packed[start:middle])
            token_ids.append(self._packed[middle:end])
        return b"".join(reversed(texts)), b"".join(reversed(token_ids))

    def events(self, session: SessionId, after: int) -> list[GenerationDelta]:
        """Those with a number above `after`."""
        found = [
            GenerationDelta(session=session, seq=seq, message=self.message, text=self._packed[start:middle].decode())
            for seq, start, middle, _ in self._backwards()
            if seq > after
        ]
        return found[::-1]


def appended(states: Sequence[bytes], chunks: Sequence[Chunk]) -> dict[MessageId, tuple[bytes, bytes]]:
    """Text and packed token ids that were appended to each message that is being generated, by load.lua's last two
    replies.
    """
    found: dict[MessageId, tuple[bytes, bytes]] = {}
    for name, state in zip(states[::2], states[1::2], strict=True):
        message = MessageId(name.decode())
        attempt, since = int(state.partition(b".")[0]), int(state.rpartition(b" ")[2])
        contents = [
            chunk.content()
            for chunk in chunks
            if chunk.message == message and chunk.attempt == attempt and chunk.first_seq >= since
        ]
        found[message] = b"".join(text for text, _ in contents), b"".join(ids for _, ids in contents)
    return found


def pack_name(message: MessageId, attempt: int, fence: int) -> bytes:
    """Whose deltas a chunk has, with its length."""
    name = f"{attempt}.{fence} {message}".encode()
    return len(name).to_bytes(2, "little") + name


def raw(value: bytes) -> msgspec.Raw:
    """For scripts: their MessagePack has strings of any bytes, and no type for what is no text."""
    return msgspec.Raw(b"\xdb" + len(value).to_bytes(4, "big") + value)


def pack_deltas(deltas: Sequence[tuple[Delta, msgspec.Raw, msgspec.Raw]]) -> bytes:
    """What append.lua and extend.lua take of deltas, each with what `pack_name` gave and its session's channel."""
    return msgspec.msgpack.encode(
        [
            (name, delta.first_token, len(delta.token_ids), delta.text, raw(pack_tokens(delta.token_ids)), channel)
            for delta, name, channel in deltas
        ]
    )


def read_delta_news(session: SessionId, message: bytes) -> GenerationDelta | None:
    """The delta that a published message is about; None: it is about something else."""
    seq, num_parts = _NEWS_HEAD.unpack_from(message)
    if num_parts:
        return None
    name_at = _NEWS_HEAD.size + 2
    text_at = name_at + int.from_bytes(message[name_at - 2 : name_at], "little")
    _, name = _split(message[name_at:text_at])
    return GenerationDelta(session=session, seq=seq, message=name, text=message[text_at:].decode())


def _split(name: bytes) -> tuple[int, MessageId]:
    place, _, message = name.partition(b" ")
    return int(place.partition(b".")[0]), MessageId(message.decode())


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """As little-endian int32."""
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 4}i", packed)
