"""Messages as bytes on a stream: a four-byte big-endian length, then MessagePack. Sans-I/O: bytes in, messages out."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final

import msgspec

from chatserve.engine.messages import AnyCommand, EngineEvent

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_FRAME_BYTES: Final = 64 * 1024 * 1024
"""Far above a million token ids of five bytes each."""

_LENGTH: Final = struct.Struct(">I")
_encoder: Final = msgspec.msgpack.Encoder()


class MalformedFrameError(Exception):
    """The stream is not ours, or its sender is broken; nothing after this can be read."""


def encode(message: AnyCommand | EngineEvent) -> bytes:
    """One frame.

    Raises:
        MalformedFrameError: the message is longer than a frame may be.
    """
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise MalformedFrameError(f"a message of {len(body)} bytes; at most {MAX_FRAME_BYTES} are allowed")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Collects bytes and gives the complete messages of one type (a union of tagged structs)."""

    __slots__ = ("_buffer", "_decoder")

    def __init__(self, message_type: Any) -> None:
        self._buffer = bytearray()
        self._decoder = msgspec.msgpack.Decoder(message_type)

    def feed(self, data: bytes) -> Iterator[Any]:
        """Take in bytes and yield what they complete.

        Raises:
            MalformedFrameError: a length past the limit, or a body that is no message of the type.
        """
        self._buffer += data
        start = 0
        try:
            while len(self._buffer) - start >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._buffer, start)
                if length > MAX_FRAME_BYTES:
                    raise MalformedFrameError(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
                end = start + _LENGTH.size + length
                if len(self._buffer) < end:
                    break
                body = bytes(self._buffer[start + _LENGTH.size : end])
                start = end
                yield self._decode(body)
        finally:
            del self._buffer[:start]

    def _decode(self, body: bytes) -> Any:
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise MalformedFrameError(f"not a message: {error}") from error


def command_reader() -> FrameReader:
    """For the engine's side."""
    return FrameReader(AnyCommand)


def event_reader() -> FrameReader:
    """For a client's side."""
    return FrameReader(EngineEvent)
