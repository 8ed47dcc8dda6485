"""What processes that share a store write to each other: a request for whoever has its session, and what came of it.

A letter may be lost. Whoever waits for an answer asks again: what was done is done once, whoever asks how often.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from chatserve.chat.workers import Owner
from chatserve.types import SessionId, UserId


class LeaseTaken(msgspec.Struct, frozen=True, tag=True):
    """You were taken for dead: the lease of this session is another's, or was when this was written."""

    user: UserId
    session: SessionId


class Ask(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Do this request, for the session is yours. `fields` are those that the client gave."""

    number: int
    """The asker's own, to find the answer's receiver by."""
    reply_to: Owner
    user: UserId
    session: SessionId
    request_id: str
    kind: str
    fields: dict[str, Any]


class Done(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """It is done; `fields` are the acknowledgement's. Events up to `seq` came before it."""

    number: int
    fields: dict[str, Any]
    seq: int


class Refused(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """It was not done: a `ChatError`."""

    number: int
    code: str
    detail: str
    fields: dict[str, Any]


class Moved(msgspec.Struct, frozen=True, tag=True):
    """The session is no longer mine; take its lease yourself."""

    number: int


AnyLetter = LeaseTaken | Ask | Done | Refused | Moved

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final[msgspec.msgpack.Decoder[AnyLetter]] = msgspec.msgpack.Decoder(AnyLetter)


def encode_letter(letter: AnyLetter) -> bytes:
    return _encoder.encode(letter)


def decode_letter(body: bytes) -> AnyLetter:
    """Raises:
    msgspec.MsgspecError: it is none of ours; a server of another version may share the store.
    """
    return _decoder.decode(body)
