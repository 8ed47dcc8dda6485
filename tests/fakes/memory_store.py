"""A store in a dictionary: the meaning of `Store` in the fewest lines, for tests of the layers above it.

The property tests of tests/store hold the real store to this model. Every method has one point where it gives way to
other tasks, before it changes anything, so that callers cannot count on being alone. `fail()` takes the store away and
`heal()` brings it back; `gate` (an `asyncio.Event`) makes every call wait.
"""

from __future__ import annotations

import asyncio
import base64
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from chatserve.chat.events import AnyEvent, Event, GenerationDelta
from chatserve.chat.feed import News
from chatserve.chat.letters import LeaseTaken, encode_letter
from chatserve.chat.quotas import over_quota
from chatserve.chat.store import (
    Committed,
    Delta,
    Lease,
    LeaseLostError,
    MessageRecord,
    OwnedElsewhereError,
    SessionPage,
    SessionRecord,
    SessionState,
    SessionSummary,
    Transaction,
)
from chatserve.chat.workers import Owner
from chatserve.errors import BadParamsError, ConflictError, NotFoundError, StoreUnavailableError
from chatserve.types import MessageId, SessionId, UserId
from tests.fakes.memory_workers import MemoryFeed, MemoryFeeds, MemoryWorkers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

WRITES_KEPT = 64
NOBODY = Owner("")


@dataclass(slots=True)
class _Session:
    record: SessionRecord
    owner: Owner = NOBODY
    fence: int = 0
    seq: int = 0
    messages: dict[MessageId, MessageRecord] = field(default_factory=dict)
    events: list[AnyEvent] = field(default_factory=list)
    bodies: dict[MessageId, int] = field(default_factory=dict)
    """Bytes of each message's text and token ids, as they were put."""
    live: dict[MessageId, tuple[int, int]] = field(default_factory=dict)
    """Of each generating message: its attempt and how many tokens were appended to it."""
    deltas: dict[tuple[MessageId, int, int, int], tuple[int, str]] = field(default_factory=dict)
    """By message, attempt, first token and number of tokens: event number and text."""


def _size(record: MessageRecord | SessionRecord) -> int:
    """Bytes of a record, of a message without its text and token ids."""
    if isinstance(record, MessageRecord):
        record = msgspec.structs.replace(record, text="", token_ids=())
    return len(msgspec.msgpack.encode(record))


def _body(message: MessageRecord) -> int:
    return len(message.text.encode()) + 4 * len(message.token_ids)


class MemoryStore:
    """Implements `chatserve.chat.store.Store`. Tests may look into `num_appends`, `num_commits` and `raw`."""

    def __init__(self, *, event_history: int = 4096) -> None:
        self._event_history = event_history
        self._sessions: dict[tuple[UserId, SessionId], _Session] = {}
        self._tombstones: set[tuple[UserId, SessionId]] = set()
        self._writes: dict[tuple[UserId, SessionId], OrderedDict[str, Committed]] = {}
        self._answers: dict[tuple[UserId, str], tuple[str, bytes]] = {}
        self._failure: str | None = None
        self.workers = MemoryWorkers(self._turn)
        self.feeds = MemoryFeeds(self._turn)
        self.gate: asyncio.Event | None = None
        self.num_commits = 0
        self.num_appends = 0

    # What tests do to it

    def fail(self, detail: str = "the store is away") -> None:
        """Make every call raise `StoreUnavailableError` until `heal()`."""
        self._failure = detail

    def heal(self) -> None:
        self._failure = None

    async def _turn(self) -> None:
        await asyncio.sleep(0)
        if self.gate is not None:
            await self.gate.wait()
        if self._failure is not None:
            raise StoreUnavailableError(self._failure)

    # The protocol

    def open_feed(self, owner: Owner) -> MemoryFeed:
        return MemoryFeed(self.feeds, owner)

    async def acquire(
        self, user: UserId, session: SessionId, owner: Owner, *, instead_of: Owner | None = None
    ) -> Lease:
        await self._turn()
        found = self._sessions.get((user, session))
        if found is None:
            raise NotFoundError(f"there is no session {session}")
        if found.owner != owner:
            if found.owner and found.owner != instead_of:
                raise OwnedElsewhereError(found.owner)
            if found.owner:
                self.feeds.send(found.owner, encode_letter(LeaseTaken(user, session)))
            found.owner, found.fence = owner, found.fence + 1
        return Lease(found.fence, found.seq)

    async def release(self, user: UserId, session: SessionId, fence: int, *, lost_up_to: int = 0) -> None:
        await self._turn()
        found = self._sessions.get((user, session))
        if found is not None and found.fence == fence:
            found.owner = NOBODY
            if found.seq < lost_up_to:
                found.seq = lost_up_to + 1

    async def commit(self, change: Transaction) -> Committed:
        await self._turn()
        key = (change.user, change.session)
        writes = self._writes.setdefault(key, OrderedDict())
        if change.write_id and change.write_id in writes:
            return writes[change.write_id]
        if (idempotency := change.idempotency) is not None:
            done = self._answers.get((change.user, idempotency.request_id))
            if done is not None:
                digest, answer = done
                if digest != idempotency.digest:
                    raise ConflictError(f"the request id {idempotency.request_id!r} was used with another body")
                return Committed(first_seq=0, answer=answer)
        session = self._sessions.get(key)
        if change.create:
            if key in self._tombstones:
                raise NotFoundError(f"session {change.session} was deleted")
            if session is not None:
                raise ConflictError(f"session {change.session} exists already")
            assert change.record is not None
            self._check_quota(change)
            session = self._sessions[key] = _Session(change.record, change.owner, change.fence if change.owner else 0)
        if session is None:
            raise NotFoundError(f"there is no session {change.session}")
        if not change.create and (session.fence != change.fence or session.seq < change.seq):
            raise LeaseLostError
        if not change.create:
            self._check_quota(change)
        committed = Committed(first_seq=session.seq + 1)
        self._apply(session, change)
        self.num_commits += 1
        if change.events:
            events = tuple(
                msgspec.structs.replace(event, seq=seq) for seq, event in enumerate(change.events, committed.first_seq)
            )
            asked = {} if idempotency is None else {"request_id": idempotency.request_id, "answer": idempotency.answer}
            self.feeds.tell(News(user=change.user, session=change.session, events=events, **asked))
        if change.announcement:
            self.feeds.announce(change.user, change.announcement)
        if change.delete:
            del self._sessions[key]
            self._tombstones.add(key)
        if idempotency is not None:
            self._answers[change.user, idempotency.request_id] = (idempotency.digest, idempotency.answer)
        if change.write_id:
            writes[change.write_id] = committed
            while len(writes) > WRITES_KEPT:
                writes.popitem(last=False)
        return committed

    def usage(self, user: UserId) -> tuple[int, int]:
        """What a user has stored, in bytes, and how many answers of theirs are being generated."""
        sessions = [session for (owner, _), session in self._sessions.items() if owner == user]
        num_bytes = sum(
            _size(session.record) + sum(session.bodies.values()) + sum(map(_size, session.messages.values()))
            for session in sessions
        )
        return num_bytes, sum(len(session.live) for session in sessions)

    def _check_quota(self, change: Transaction) -> None:
        quota, (num_bytes, num_generating) = change.quota, self.usage(change.user)
        num_sessions = sum(user == change.user for user, _ in self._sessions)
        more = 0 if change.record is None else _size(change.record)
        more += sum(_size(message) + _body(message) for message in change.puts)
        for which, used, after, most in (
            ("sessions", num_sessions, num_sessions + change.create, quota.sessions),
            ("bytes", num_bytes, num_bytes + more, quota.stored_bytes),
            ("generations", num_generating, num_generating + 1, quota.generations),
        ):
            if most is not None and after > most and (which != "sessions" or change.create):
                raise over_quota(quota, which, used)

    def _apply(self, session: _Session, change: Transaction) -> None:
        if change.record is not None:
            session.record = change.record
        for message in change.deletes:
            session.messages.pop(message, None)
            session.bodies.pop(message, None)
            session.live.pop(message, None)
        for record in change.puts:
            self._put(session, record)
        for event in change.events:
            self._emit(session, event)

    @staticmethod
    def _put(session: _Session, message: MessageRecord) -> None:
        new = message
        growing = message.status == "generating" and message.message in session.live
        if not growing or session.live[message.message][0] != message.attempt:
            session.bodies[message.message] = _body(message)
        if message.status != "generating":
            session.live.pop(message.message, None)
        elif message.message in session.live and session.live[message.message][0] == message.attempt:
            old = session.messages[message.message]
            new = msgspec.structs.replace(message, text=old.text, token_ids=old.token_ids)
        else:
            session.live[message.message] = (message.attempt, 0)
            session.deltas = {place: result for place, result in session.deltas.items() if place[0] != message.message}
        session.messages[message.message] = new

    def _emit(self, session: _Session, event: AnyEvent) -> int:
        session.seq += 1
        numbered: AnyEvent = msgspec.structs.replace(event, seq=session.seq)
        session.events.append(numbered)
        del session.events[: -self._event_history]
        return session.seq

    async def append(self, deltas: Sequence[Delta]) -> list[int | None]:
        await self._turn()
        self.num_appends += 1
        return [self._append(delta) for delta in deltas]

    def _append(self, delta: Delta) -> int | None:
        session = self._sessions.get((delta.user, delta.session))
        live = session.live.get(delta.message) if session is not None else None
        if session is None or live is None or live[0] != delta.attempt or session.fence != delta.fence:
            return None
        place = (delta.message, delta.attempt, delta.first_token, len(delta.token_ids))
        if delta.first_token < live[1] or (not delta.token_ids and place in session.deltas):
            seq, text = session.deltas.get(place, (None, ""))
            return seq if text == delta.text else None
        if delta.first_token > live[1]:
            return None
        message = session.messages[delta.message]
        session.messages[delta.message] = msgspec.structs.replace(
            message, text=message.text + delta.text, token_ids=message.token_ids + delta.token_ids
        )
        session.live[delta.message] = (delta.attempt, live[1] + len(delta.token_ids))
        seq = self._emit(session, GenerationDelta(session=delta.session, message=delta.message, text=delta.text))
        session.deltas[place] = (seq, delta.text)
        self.feeds.tell(News(user=delta.user, session=delta.session, events=(session.events[-1],)))
        return seq

    async def answer(self, user: UserId, request_id: str) -> tuple[str, bytes] | None:
        await self._turn()
        return self._answers.get((user, request_id))

    async def load(self, user: UserId, session: SessionId) -> SessionState | None:
        await self._turn()
        found = self._sessions.get((user, session))
        if found is None:
            return None
        return SessionState(
            record=found.record, seq=found.seq, messages=tuple(found.messages.values()), fence=found.fence
        )

    async def events(self, user: UserId, session: SessionId, after: int) -> list[AnyEvent] | None:
        await self._turn()
        found = self._sessions.get((user, session))
        if found is None or after > found.seq:
            return None
        later = [event for event in found.events if event.seq > after]
        return later if len(later) == found.seq - after else None

    async def list_sessions(self, user: UserId, limit: int, cursor: str | None, query: str | None) -> SessionPage:
        await self._turn()
        before = _parse_cursor(cursor)
        wanted = (query or "").casefold()
        keyed = sorted(
            (
                ((found.record.updated_at, session), found)
                for (owner, session), found in self._sessions.items()
                if owner == user and _matches(found, wanted)
            ),
            key=lambda pair: pair[0],
            reverse=True,
        )
        rest = [pair for pair in keyed if before is None or pair[0] < before]
        page = [
            SessionSummary(session, found.record.title, found.record.updated_at, len(found.messages))
            for (_, session), found in rest[:limit]
        ]
        return SessionPage(tuple(page), _make_cursor(page[-1]) if len(rest) > limit else None)

    async def untouched(self, before: float) -> AsyncIterator[tuple[UserId, SessionId]]:
        await self._turn()
        for key, found in list(self._sessions.items()):
            if found.record.updated_at < before:
                yield key

    async def unfinished(self, sessions: Sequence[tuple[UserId, SessionId]]) -> list[tuple[UserId, SessionId]]:
        await self._turn()
        return [key for key in sessions if key in self._sessions and self._sessions[key].live]

    async def ping(self) -> None:
        await self._turn()

    async def close(self) -> None:
        pass

    def num_appended(self, user: UserId, session: SessionId, message: MessageId) -> int:
        """Tokens that a message has had appended in its present attempt."""
        found = self._sessions.get((user, session))
        return 0 if found is None else found.live.get(message, (0, 0))[1]

    def raw(self, user: UserId, session: SessionId) -> list[Event]:
        """The kept events, without waiting."""
        return list(self._sessions[user, session].events)


def _matches(found: _Session, wanted: str) -> bool:
    return wanted in found.record.title.casefold() or any(wanted in m.text.casefold() for m in found.messages.values())


def _make_cursor(last: SessionSummary) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode((last.updated_at, last.session))).decode()


def _parse_cursor(cursor: str | None) -> tuple[float, SessionId] | None:
    if cursor is None:
        return None
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(cursor), type=tuple[float, SessionId])
    except (ValueError, msgspec.MsgspecError) as error:
        raise BadParamsError.of("cursor", cursor, "a cursor that session.list returned") from error
