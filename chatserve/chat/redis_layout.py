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
    chatserve:{user}:events:SID         stream       SEQ-0 -> event, the last ones
    chatserve:{user}:generating:SID     hash         message id -> ATTEMPT.FENCE, place of an empty delta
    chatserve:{user}:live-text:SID:MID  string       what was appended to `texts` since the message was put
    chatserve:{user}:live-tokens:SID:MID
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
from functools import lru_cache
from typing import TYPE_CHECKING, Final
from urllib.parse import quote

import msgspec

from chatserve.chat.events import AnyEvent, GenerationDelta
from chatserve.chat.feed import News
from chatserve.chat.store import MessageRecord, SessionRecord, SessionState
from chatserve.types import MessageId, SessionId, UserId

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from chatserve.chat.store import Delta

SCHEMA: Final = 3

encode: Final = msgspec.msgpack.encode
_meta_decoder: Final = msgspec.msgpack.Decoder(MessageRecord)
_record_decoder: Final = msgspec.msgpack.Decoder(SessionRecord)
_event_decoder: Final[msgspec.msgpack.Decoder[AnyEvent]] = msgspec.msgpack.Decoder(AnyEvent)
_place_decoder: Final = msgspec.msgpack.Decoder(tuple[MessageId, int, int, int])


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

    def live(self, session: SessionId, message: str = "") -> tuple[bytes, bytes]:
        """Of a message: its live text and tokens; without one: what their names begin with."""
        return self.of("live-text:", f"{session}:{message}"), self.of("live-tokens:", f"{session}:{message}")


def put_arguments(message: MessageRecord) -> Iterable[bytes | int]:
    """What commit.lua takes of a message."""
    meta = encode(msgspec.structs.replace(message, text="", token_ids=()))
    is_generating = int(message.status == "generating")
    yield from (message.message.encode(), is_generating, message.attempt, meta)
    yield from (message.text.encode(), pack_tokens(message.token_ids))


@lru_cache(maxsize=4096)
def append_names(user: UserId, session: SessionId, message: MessageId) -> tuple[tuple[bytes, ...], bytes]:
    """The keys that append.lua takes for a delta of a message, and the channel of its session."""
    keys = Keys(user)
    names = keys.session(session, "session", "generating", "events")
    return names + keys.live(session, message), keys.news(session)


def place_of(delta: Delta) -> bytes:
    """What tells a delta from the others of its session: message, attempt, first token, number of tokens."""
    return encode((delta.message, delta.attempt, delta.first_token, len(delta.token_ids)))


LETTERS: Final = "chatserve:letters:"
"""Before an owner's name: the channel on which it hears letters."""


def read_state(seq: int, fence: int, record: bytes, sizes: bytes, body: bytes) -> SessionState:
    """From load.lua's reply."""
    return SessionState(
        record=_record_decoder.decode(record),
        seq=seq,
        fence=fence,
        messages=tuple(
            msgspec.structs.replace(_meta_decoder.decode(meta), text=text.decode(), token_ids=_unpack_tokens(token_ids))
            for meta, text, token_ids in _cut(sizes, body)
        ),
    )


def read_events(session: SessionId, first_seq: int, sizes: bytes, body: bytes) -> list[AnyEvent]:
    """From events.lua's reply."""
    return [_read_event(session, seq, *parts) for seq, parts in enumerate(_cut(sizes, body), start=first_seq)]


def read_news(user: UserId, session: SessionId, message: bytes) -> News:
    """From what commit.lua and append.lua publish."""
    first_seq, num_parts = struct.unpack_from("<QI", message)
    start = 12 + 12 * num_parts
    parts = _cut(message[12:start], message[start:])
    request_id, answer, _ = next(parts)
    events = tuple(_read_event(session, seq, *part) for seq, part in enumerate(parts, start=first_seq))
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


def _read_event(session: SessionId, seq: int, place: bytes, text: bytes, payload: bytes) -> AnyEvent:
    if place:
        message = _place_decoder.decode(place)[0]
        return GenerationDelta(session=session, seq=seq, message=message, text=text.decode())
    event: AnyEvent = msgspec.structs.replace(_event_decoder.decode(payload), seq=seq)
    return event


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def _unpack_tokens(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 4}i", packed)
