"""How sessions lie in Redis: the names of keys, and what stands in them.

Keys carry a hash tag of their user, so that one script sees a session and its index together. Of a user:

    chatserve:{user}:index              sorted set   session ids by updated_at
    chatserve:{user}:usage              hash         bytes of all sessions, answers that are being generated
    chatserve:{user}:request:ID         hash         digest and answer of a request, 20 minutes
    chatserve:{user}:session:SID        hash         record, title, seq, order, bytes, owner, fence; gone: deleted, seq
    chatserve:{user}:metas:SID          hash         message id -> record without text and token ids
    chatserve:{user}:texts:SID          hash         message id -> text
    chatserve:{user}:tokens:SID         hash         message id -> token ids, packed int32
    chatserve:{user}:order:SID          sorted set   message ids in creation order
    chatserve:{user}:log:SID            stream       SEQ-0 -> an event, or a chunk of deltas that ends with it: the last
                                                     ones, and all that unfinished answers consist of
    chatserve:{user}:tail:SID           string       the chunk of deltas that comes after the log
    chatserve:{user}:generating:SID     hash         message id -> its state; chunk.lua has it, and the format of chunks
    chatserve:{user}:writes:SID         list         ids and results of the last writes

Of the servers' processes (`workers`):

    chatserve:worker:PLACE              string       nonce of the process there, for as long as it beats
    chatserve:workers                   set          owners that joined and were not forgotten
    chatserve:held:OWNER                set          (user, session) whose lease an owner may hold

Besides them there are `chatserve:schema` and `chatserve:users`, the users that ever made a session. Only scripts write
a session, and each gets `session:SID` as its first key. Records and events are MessagePack. What is published:

    chatserve:{user}:news:SID           of each write the first seq, the request it answered, its events
    chatserve:{user}:list               announcements
    chatserve:letters:OWNER             letters to a process

What changes here in a way that older programs cannot read raises `SCHEMA` and gets a step in `redis_schema`.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import msgspec

from chatserve.chat.events import AnyEvent
from chatserve.chat.feed import News
from chatserve.chat.redis_chunks import Chunk, appended, pack_tokens, read_delta_news, unpack_tokens
from chatserve.chat.store import MessageRecord, SessionRecord, SessionState
from chatserve.types import SessionId, UserId

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SCHEMA: Final = 4

encode: Final = msgspec.msgpack.encode
_meta_decoder: Final = msgspec.msgpack.Decoder(MessageRecord)
_record_decoder: Final = msgspec.msgpack.Decoder(SessionRecord)
_event_decoder: Final[msgspec.msgpack.Decoder[AnyEvent]] = msgspec.msgpack.Decoder(AnyEvent)


class Keys:
    """The names of one user's keys; of one session's, where a session is given."""

    __slots__ = ("_prefix",)

    def __init__(self, user: UserId) -> None:
        assert user, "a user has a name"
        self._prefix = f"chatserve:{{{quote(user, safe='')}}}:"

    def of(self, kind: str, suffix: str = "") -> bytes:
        return f"{self._prefix}{kind}{suffix}".encode()

    def session(self, session: SessionId, *kinds: str) -> tuple[bytes, ...]:
        return tuple(f"{self._prefix}{kind}:{session}".encode() for kind in kinds)

    def news(self, session: SessionId) -> bytes:
        """The channel of a session's events."""
        return self.of("news:", session)


def put_arguments(message: MessageRecord) -> Iterable[bytes | int]:
    """What commit.lua takes of a message."""
    meta = encode(msgspec.structs.replace(message, text="", token_ids=()))
    is_generating = int(message.status == "generating")
    yield from (message.message.encode(), is_generating, message.attempt, meta)
    yield from (message.text.encode(), pack_tokens(message.token_ids))


LETTERS: Final = "chatserve:letters:"
"""Before an owner's name: the channel on which it hears letters."""


def read_state(
    seq: int, fence: int, record: bytes, sizes: bytes, body: bytes, states: list[bytes], chunks: list[bytes]
) -> SessionState:
    """From load.lua's reply."""
    grown = appended(states, list(map(Chunk, chunks)))
    messages: list[MessageRecord] = []
    for packed, text, token_ids in _cut(sizes, body):
        meta = _meta_decoder.decode(packed)
        more_text, more_ids = grown.get(meta.message, (b"", b""))
        whole = (text + more_text).decode(), unpack_tokens(token_ids + more_ids)
        messages.append(msgspec.structs.replace(meta, text=whole[0], token_ids=whole[1]))
    return SessionState(record=_record_decoder.decode(record), seq=seq, fence=fence, messages=tuple(messages))


def read_events(session: SessionId, after: int, sizes: bytes, body: bytes) -> list[AnyEvent]:
    """From events.lua's reply: all that come after a number."""
    events: list[AnyEvent] = []
    for chunk, _, payload in _cut(sizes, body):
        if chunk:
            events += Chunk(chunk).events(session, after)
        else:
            events.append(_read_event(payload, after + len(events) + 1))
    return events


def read_news(user: UserId, session: SessionId, message: bytes) -> News:
    """From what commit.lua, append.lua and extend.lua publish."""
    if (delta := read_delta_news(session, message)) is not None:
        return News(user=user, session=session, events=(delta,))
    first_seq, num_parts = struct.unpack_from("<QI", message)
    start = 12 + 12 * num_parts
    parts = _cut(message[12:start], message[start:])
    request_id, answer, _ = next(parts)
    events = tuple(_read_event(payload, seq) for seq, (_, _, payload) in enumerate(parts, start=first_seq))
    return News(user=user, session=session, events=events, request_id=request_id.decode(), answer=answer)


def _cut(sizes: bytes, body: bytes) -> Iterator[tuple[bytes, bytes, bytes]]:
    """Parts that a script joined, three by three."""
    start = 0
    for first, second, third in struct.iter_unpack("<III", sizes):
        middle, last = start + first, start + first + second
        end = last + third
        yield body[start:middle], body[middle:last], body[last:end]
        start = end
    assert start == len(body), f"parts of {start} bytes in a body of {len(body)}"


def _read_event(payload: bytes, seq: int) -> AnyEvent:
    event: AnyEvent = msgspec.structs.replace(_event_decoder.decode(payload), seq=seq)
    return event
