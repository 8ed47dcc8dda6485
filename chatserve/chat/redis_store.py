"""The store on Redis or Valkey: how sessions lie in keys, and the calls that change them.

Keys carry a hash tag of their user, so that one script sees a session and its index together. Of a user:

    chatserve:{user}:index              sorted set   session ids by updated_at
    chatserve:{user}:unfinished         set          sessions with a message that is being generated
    chatserve:{user}:request:ID         hash         digest and answer of a request, 20 minutes
    chatserve:{user}:session:SID        hash         record, title, seq, order; after a deletion: deleted, seq
    chatserve:{user}:metas:SID          hash         message id -> record without text and token ids
    chatserve:{user}:texts:SID          hash         message id -> text
    chatserve:{user}:tokens:SID         hash         message id -> token ids, packed int32
    chatserve:{user}:order:SID          sorted set   message ids in creation order
    chatserve:{user}:events:SID         stream       SEQ-0 -> event, the last ones
    chatserve:{user}:generating:SID     hash         message id -> attempt and first token of its last delta
    chatserve:{user}:live-text:SID:MID  string       what was appended to `texts` since the message was put
    chatserve:{user}:live-tokens:SID:MID
    chatserve:{user}:writes:SID         list         ids and results of the last writes

Besides them there are `chatserve:schema` and `chatserve:users`, the users that ever made a session. Only scripts write
a session, and each gets `session:SID` as its first key: the place for whatever else a write must be permitted by.
"""

from __future__ import annotations

import base64
import itertools
import logging
import math
import re
import struct
import uuid
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

import msgspec
from redis.exceptions import ResponseError

from chatserve.chat.events import AnyEvent, GenerationDelta
from chatserve.chat.redis_link import Call, RedisLink, Script, one_line
from chatserve.chat.store import (
    Committed,
    Delta,
    MessageRecord,
    SessionPage,
    SessionRecord,
    SessionState,
    SessionSummary,
    Transaction,
)
from chatserve.errors import BadParamsError, ConflictError, NotFoundError, StartupError, StoreUnavailableError
from chatserve.types import MessageId, SessionId, UserId

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

logger = logging.getLogger(__name__)

SCHEMA: Final = 1
OLDEST_SERVER: Final = (6, 2)
REQUEST_TTL_S: Final = 20 * 60
WRITES_TTL_S: Final = 20 * 60
WRITES_KEPT: Final = 64
TOMBSTONE_TTL_S: Final = 24 * 3600
EVENTS_TTL_S: Final = 24 * 3600
"""A session that rests gives its events' memory back; whoever then resumes gets a snapshot."""

SEARCH_SESSIONS: Final = 16
"""Sessions that a search reads at a time …"""
SEARCH_BYTES: Final = 256 * 1024
"""… and bytes of text of each."""

_encode: Final = msgspec.msgpack.encode
_meta_decoder: Final = msgspec.msgpack.Decoder(MessageRecord)
_record_decoder: Final = msgspec.msgpack.Decoder(SessionRecord)
_event_decoder: Final[msgspec.msgpack.Decoder[AnyEvent]] = msgspec.msgpack.Decoder(AnyEvent)
_place_decoder: Final = msgspec.msgpack.Decoder(tuple[MessageId, int, int, int])
"""Of a delta: message, attempt, first token, number of tokens."""
_cursor_decoder: Final = msgspec.json.Decoder(tuple[float, SessionId])


async def open_store(url: str, *, event_history: int) -> RedisStore:
    """Connect to `redis://`, `rediss://` or `unix://` and check that what is there is ours.

    Raises:
        StartupError: no answer, a server that is too old, or data of a newer schema.
    """
    try:
        link = RedisLink(url)
    except ValueError as error:
        raise StartupError(f"the store's URL is not usable: {one_line(error)}") from error
    try:
        await _check_server(link)
    except StoreUnavailableError as error:
        await link.close()
        raise StartupError(f"no store at {link.name}: {error.detail}; start it, or correct --redis-url") from error
    except StartupError:
        await link.close()
        raise
    return RedisStore(link, event_history=event_history)


async def _check_server(link: RedisLink) -> None:
    info: dict[str, Any] = await link.command("tell its version", "INFO")
    version = str(info.get("redis_version", "0"))
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST_SERVER:
        raise StartupError(f"the store at {link.name} speaks Redis {version}; 6.2 or newer is needed")
    if info.get("maxmemory") and info.get("maxmemory_policy") != "noeviction":
        logger.warning(
            "the store at %s may throw sessions away when it is full: set its maxmemory-policy to noeviction", link.name
        )
    await link.command("mark its schema", "SET", "chatserve:schema", str(SCHEMA), "NX")
    found: bytes = await link.command("tell its schema", "GET", "chatserve:schema")
    if not found.isdigit() or int(found) > SCHEMA:
        raise StartupError(
            f"the store at {link.name} has schema {found.decode(errors='replace')} and this version knows {SCHEMA}: "
            "upgrade chatserve, or give it another store"
        )


class _Keys:
    """The names of one user's keys; of one session's, where a session is given."""

    __slots__ = ("_prefix",)

    def __init__(self, user: UserId) -> None:
        assert user, "a user has a name"
        self._prefix = f"chatserve:{{{quote(user, safe='')}}}:"

    def of(self, kind: str, suffix: str = "") -> bytes:
        return f"{self._prefix}{kind}{suffix}".encode()

    def session(self, session: SessionId, *kinds: str) -> tuple[bytes, ...]:
        return tuple(f"{self._prefix}{kind}:{session}".encode() for kind in kinds)

    def live(self, session: SessionId, message: str = "") -> tuple[bytes, bytes]:
        """Of a message: its live text and tokens; without one: what their names begin with."""
        return self.of("live-text:", f"{session}:{message}"), self.of("live-tokens:", f"{session}:{message}")


class RedisStore:
    """Implements `chatserve.chat.store.Store`; made by `open_store`."""

    def __init__(self, link: RedisLink, *, event_history: int) -> None:
        assert event_history > 0
        self._link = link
        self._event_history = event_history
        self._commit, self._append, self._load, self._events, self._page, self._texts = (
            Script.read(name) for name in ("commit", "append", "load", "events", "page", "texts")
        )

    async def commit(self, change: Transaction) -> Committed:
        """See `Store.commit`."""
        if change.create:
            # Before the session, so that no crash leaves one that `unfinished` cannot find.
            await self._link.command("note a user", "SADD", "chatserve:users", change.user)
        reply = await self._link.script("save a change", self._commit, self._commit_call(change))
        match reply:
            case [b"ok", int(first_seq)]:
                return Committed(first_seq=first_seq)
            case [b"done", bytes(answer)]:
                return Committed(first_seq=0, answer=answer)
            case [b"conflict"]:
                assert change.idempotency is not None
                raise ConflictError(f"the id {change.idempotency.request_id!r} was used by another request")
            case [b"exists"]:
                raise ConflictError(f"session {change.session} exists already")
            case [b"deleted"]:
                raise NotFoundError(f"session {change.session} was deleted")
            case [b"missing"]:
                raise NotFoundError(f"there is no session {change.session}")
            case _:
                raise AssertionError(f"not a result of commit: {reply!r}")

    def _commit_call(self, change: Transaction) -> Call:
        assert change.record is not None or not change.create, "a new session needs its record"
        keys = _Keys(change.user)
        names = keys.session(
            change.session, "session", "metas", "texts", "tokens", "order", "events", "generating", "writes"
        )
        names += (keys.of("index"), keys.of("unfinished"))
        digest, answer = b"", b""
        if change.idempotency is not None:
            names += (keys.of("request:", change.idempotency.request_id),)
            digest, answer = change.idempotency.digest.encode(), change.idempotency.answer
        record, title, updated_at = b"", b"", 0.0
        if change.record is not None:
            record, title, updated_at = _encode(change.record), change.record.title.encode(), change.record.updated_at
        # Without an id of the caller's it still needs one: a retry of ours must not double it.
        write_id = change.write_id or uuid.uuid4().hex
        args: list[bytes | int | float] = [*keys.live(change.session), change.session.encode(), write_id.encode()]
        args += [int(change.create), int(change.delete), record, title, repr(updated_at).encode(), digest, answer]
        args += [self._event_history, EVENTS_TTL_S, REQUEST_TTL_S, WRITES_TTL_S, TOMBSTONE_TTL_S, WRITES_KEPT]
        args += [len(change.deletes), *(message.encode() for message in change.deletes)]
        args += [len(change.puts), *itertools.chain.from_iterable(map(_put_args, change.puts))]
        args += [len(change.events), *map(_encode, change.events)]
        return Call(names, tuple(args))

    async def append(self, deltas: Sequence[Delta]) -> list[int | None]:
        """See `Store.append`."""
        if not deltas:
            return []
        calls = [self._append_call(delta) for delta in deltas]
        replies = await self._link.scripts("append text", self._append, calls)
        return [_append_result(delta, reply) for delta, reply in zip(deltas, replies, strict=True)]

    def _append_call(self, delta: Delta) -> Call:
        keys = _Keys(delta.user)
        names = keys.session(delta.session, "session", "generating", "events")
        place = _encode((delta.message, delta.attempt, delta.first_token, len(delta.token_ids)))
        return Call(
            names + keys.live(delta.session, delta.message),
            (
                delta.message.encode(),
                delta.attempt,
                delta.first_token,
                place,
                delta.text.encode(),
                _pack_tokens(delta.token_ids),
                self._event_history,
            ),
        )

    async def answer(self, user: UserId, request_id: str) -> tuple[str, bytes] | None:
        """See `Store.answer`."""
        key = _Keys(user).of("request:", request_id)
        digest, answer = await self._link.command("look up a request", "HMGET", key, "digest", "answer")
        return None if digest is None else (digest.decode(), answer)

    async def load(self, user: UserId, session: SessionId) -> SessionState | None:
        """See `Store.load`."""
        keys = _Keys(user)
        names = keys.session(session, "session", "metas", "texts", "tokens", "order", "generating")
        reply = await self._link.read("read a session", self._load, Call(names, keys.live(session)))
        if reply is None:
            return None
        seq, record, sizes, body = reply
        return SessionState(
            record=_record_decoder.decode(record),
            seq=seq,
            messages=tuple(
                msgspec.structs.replace(
                    _meta_decoder.decode(meta), text=text.decode(), token_ids=_unpack_tokens(token_ids)
                )
                for meta, text, token_ids in _cut(sizes, body)
            ),
        )

    async def events(self, user: UserId, session: SessionId, after: int) -> list[AnyEvent] | None:
        """See `Store.events`."""
        names = _Keys(user).session(session, "session", "events")
        reply = await self._link.read("read events", self._events, Call(names, (after,)))
        if reply is None:
            return None
        return [_read_event(session, seq, *parts) for seq, parts in enumerate(_cut(*reply), start=after + 1)]

    async def list_sessions(self, user: UserId, limit: int, cursor: str | None, query: str | None) -> SessionPage:
        """See `Store.list_sessions`."""
        assert limit > 0
        wanted = (query or "").casefold()
        kept: list[SessionSummary] = []
        async for batch in self._batches(user, limit, _parse_cursor(cursor), wanted):
            kept += batch
            if len(kept) > limit:
                break
        more, page = len(kept) > limit, kept[:limit]
        return SessionPage(tuple(page), _make_cursor(page[-1]) if more else None)

    async def _batches(
        self, user: UserId, limit: int, place: tuple[float, SessionId], wanted: str
    ) -> AsyncIterator[list[SessionSummary]]:
        size = SEARCH_SESSIONS if wanted else limit + 1
        while True:
            keys = _Keys(user)
            updated_at, last = place
            args = (keys.of("session:"), keys.of("order:"), size, repr(updated_at).encode(), last.encode())
            rows = await self._link.script("list sessions", self._page, Call((keys.of("index"),), args))
            batch = [
                SessionSummary(SessionId(row[0].decode()), (row[2] or b"").decode(), float(row[1]), row[3])
                for row in rows
            ]
            if wanted:
                matching = await self._matching(user, batch, wanted)
                yield [summary for summary in batch if summary.session in matching]
            else:
                yield batch
            if len(batch) < size:
                return
            place = batch[-1].updated_at, batch[-1].session

    async def _matching(self, user: UserId, batch: Sequence[SessionSummary], wanted: str) -> set[SessionId]:
        """The sessions of a batch in whose title or texts `wanted` (casefolded) stands."""
        keys = _Keys(user)
        matching = {summary.session for summary in batch if wanted in summary.title.casefold()}
        places = {summary.session: 0 for summary in batch if summary.session not in matching}
        while places:
            calls = [
                Call(
                    keys.session(session, "order", "texts", "generating"),
                    (keys.live(session)[0], place, SEARCH_BYTES),
                )
                for session, place in places.items()
            ]
            replies = await self._link.scripts("search", self._texts, calls)
            for session, reply in zip(tuple(places), replies, strict=True):
                _raise_error(reply)
                place, *texts = reply
                if any(wanted in text.decode().casefold() for text in texts):
                    matching.add(session)
                    del places[session]
                elif place < 0:
                    del places[session]
                else:
                    places[session] = place
        return matching

    async def unfinished(self) -> list[tuple[UserId, SessionId]]:
        """See `Store.unfinished`."""
        found: list[tuple[UserId, SessionId]] = []
        cursor = 0
        while True:
            next_cursor, names = await self._link.command(
                "list users", "SSCAN", "chatserve:users", cursor, "COUNT", 500
            )
            users = [UserId(name.decode()) for name in names]
            replies = await self._link.commands(
                "list unfinished sessions", [("SMEMBERS", _Keys(user).of("unfinished")) for user in users]
            )
            for user, reply in zip(users, replies, strict=True):
                _raise_error(reply)
                found += [(user, SessionId(session.decode())) for session in reply]
            cursor = int(next_cursor)
            if cursor == 0:
                return sorted(set(found))

    async def ping(self) -> None:
        """See `Store.ping`."""
        await self._link.command("answer a ping", "PING")

    async def close(self) -> None:
        """Wait for what is being written, then close the connections."""
        await self._link.close()


def _put_args(message: MessageRecord) -> Iterable[bytes | int]:
    meta = _encode(msgspec.structs.replace(message, text="", token_ids=()))
    is_generating = int(message.status == "generating")
    yield from (message.message.encode(), is_generating, message.attempt, meta)
    yield from (message.text.encode(), _pack_tokens(message.token_ids))


def _append_result(delta: Delta, reply: object) -> int | None:
    match reply:
        case int(seq):
            return seq
        case None:
            return None
        case ResponseError() if str(reply).startswith("CONFLICT"):
            # Our bug, but one message's: the other deltas of the step are written.
            logger.error("message %s: a delta was lost or sent again with other content: %s", delta.message, reply)
            return None
        case _:
            _raise_error(reply)
            raise AssertionError(f"not an event number: {reply!r}")


def _raise_error(reply: object) -> None:
    if isinstance(reply, Exception):
        raise StoreUnavailableError(f"the store refused: {one_line(reply)}") from reply


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


def _pack_tokens(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def _unpack_tokens(packed: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(packed) // 4}i", packed)


def _make_cursor(last: SessionSummary) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode((last.updated_at, last.session))).decode()


def _parse_cursor(cursor: str | None) -> tuple[float, SessionId]:
    if cursor is None:
        return math.inf, SessionId("")
    try:
        return _cursor_decoder.decode(base64.urlsafe_b64decode(cursor.encode()))
    except (ValueError, msgspec.MsgspecError) as error:
        raise BadParamsError.of("cursor", cursor, "a cursor that session.list returned") from error
