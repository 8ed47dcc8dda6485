"""The store on Redis or Valkey: the calls that read and change sessions, each one script or one pipelined write.

Owns the meaning of the scripts in lua/; knows nothing of connections (`redis_link`) nor of keys' contents
(`redis_layout`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import time
import uuid
from typing import TYPE_CHECKING, Any, Final

from chatserve.chat.events import AnyEvent
from chatserve.chat.feed import Feed
from chatserve.chat.letters import LeaseTaken, encode_letter
from chatserve.chat.quotas import over_quota
from chatserve.chat.redis_append import Appender
from chatserve.chat.redis_feed import RedisFeed
from chatserve.chat.redis_layout import (
    LETTERS,
    Keys,
    encode,
    put_arguments,
    read_events,
    read_state,
)
from chatserve.chat.redis_link import Call, RedisLink, Script, one_line, raise_error
from chatserve.chat.redis_listing import SessionListing
from chatserve.chat.redis_schema import bring_up_to_date
from chatserve.chat.redis_workers import RedisWorkers
from chatserve.chat.store import (
    Committed,
    Delta,
    Lease,
    LeaseLostError,
    OwnedElsewhereError,
    SessionPage,
    SessionState,
    Transaction,
)
from chatserve.chat.workers import Owner
from chatserve.errors import ConflictError, NotFoundError, StartupError, StoreUnavailableError
from chatserve.types import SessionId, UserId

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

logger = logging.getLogger(__name__)

OLDEST_SERVER: Final = (6, 2)
OPEN_PAUSE_S: Final = 0.1
REQUEST_TTL_S: Final = 20 * 60
WRITES_TTL_S: Final = 24 * 3600
"""A write whose reply was lost may be sent again when the store is back, after hours."""
WRITES_KEPT: Final = 64
TOMBSTONE_TTL_S: Final = 24 * 3600
KEYS_TO_FOLD: Final = ("session", "generating", "log", "tail")
"""What lua/chunk.lua's `fold` takes."""
EVENTS_TTL_S: Final = 24 * 3600
"""A session that rests gives its events' memory back; whoever then resumes gets a snapshot."""


async def open_store(url: str, *, event_history: int, patience_s: float = 0.0) -> RedisStore:
    """Connect to `redis://`, `rediss://` or `unix://` and check that what is there is ours.

    A server that does not answer is asked again for `patience_s`.

    Raises:
        StartupError: no answer, a server that is too old, or data of a newer schema.
    """
    try:
        link = RedisLink(url)
    except ValueError as error:
        raise StartupError(f"the store's URL is not usable: {one_line(error)}") from error
    give_up_at = time.monotonic() + patience_s
    try:
        while True:
            try:
                await _check_server(link)
                return RedisStore(link, event_history=event_history)
            except StoreUnavailableError as error:
                if time.monotonic() >= give_up_at:
                    raise StartupError(
                        f"no store at {link.name}: {error.detail}; start it, or correct --redis-url"
                    ) from error
            await asyncio.sleep(OPEN_PAUSE_S)
    except BaseException:  # also where whoever opens it is told to end
        await link.close()
        raise


async def _check_server(link: RedisLink) -> None:
    info: dict[str, Any] = await link.command("tell its version", "INFO")
    version = str(info.get("redis_version", "0"))
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST_SERVER:
        raise StartupError(f"the store at {link.name} speaks Redis {version}; 6.2 or newer is needed")
    if info.get("maxmemory") and info.get("maxmemory_policy") != "noeviction":
        logger.warning(
            "the store at %s may throw sessions away when it is full: set its maxmemory-policy to noeviction", link.name
        )
    await bring_up_to_date(link)


class RedisStore:
    """Implements `chatserve.chat.store.Store`; made by `open_store`."""

    def __init__(self, link: RedisLink, *, event_history: int) -> None:
        assert event_history > 0
        self._link = link
        self._event_history = event_history
        self._listing = SessionListing(link)
        self._workers = RedisWorkers(link)
        self._appender = Appender(link, event_history)
        self._commit, self._load, self._events, self._acquire, self._release = (
            Script.read(name, "chunk") for name in ("commit", "load", "events", "acquire", "release")
        )

    @property
    def workers(self) -> RedisWorkers:
        return self._workers

    def open_feed(self, owner: Owner) -> Feed:
        """See `Store.open_feed`."""
        return RedisFeed(self._link, owner)

    async def acquire(
        self, user: UserId, session: SessionId, owner: Owner, *, instead_of: Owner | None = None
    ) -> Lease:
        """See `Store.acquire`."""
        names = Keys(user).session(session, *KEYS_TO_FOLD)
        lost = encode_letter(LeaseTaken(user, session))
        args = (owner.encode(), (instead_of or "").encode(), LETTERS.encode(), lost)
        reply = await self._link.script("take over a session", self._acquire, Call(names, args))
        match reply:
            case [b"ok", int(fence), int(seq)]:
                return Lease(fence, seq)
            case [b"held", bytes(holder)]:
                raise OwnedElsewhereError(Owner(holder.decode()))
            case [b"missing"]:
                raise NotFoundError(f"there is no session {session}")
            case _:
                raise AssertionError(f"not a result of acquire: {reply!r}")

    async def release(self, user: UserId, session: SessionId, fence: int, *, lost_up_to: int = 0) -> None:
        """See `Store.release`."""
        names = Keys(user).session(session, *KEYS_TO_FOLD)
        await self._link.script("give a session back", self._release, Call(names, (fence, lost_up_to)))

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
            case [b"fenced"]:
                raise LeaseLostError
            case [b"quota", bytes(which), int(used)]:
                raise over_quota(change.quota, which.decode(), used)
            case _:
                raise AssertionError(f"not a result of commit: {reply!r}")

    def _commit_call(self, change: Transaction) -> Call:
        assert change.record is not None or not change.create, "a new session needs its record"
        keys = Keys(change.user)
        kinds = ("session", "metas", "texts", "tokens", "order", "log", "tail", "generating", "writes")
        names = keys.session(change.session, *kinds)
        names += (keys.of("index"), keys.of("usage"))
        request_id, digest, answer = b"", b"", b""
        if change.idempotency is not None:
            names += (keys.of("request:", change.idempotency.request_id),)
            request_id = change.idempotency.request_id.encode()
            digest, answer = change.idempotency.digest.encode(), change.idempotency.answer
        record, title, updated_at = b"", b"", 0.0
        if change.record is not None:
            record, title, updated_at = encode(change.record), change.record.title.encode(), change.record.updated_at
        # Without an id of the caller's it still needs one: a retry of ours must not double it.
        write_id = change.write_id or uuid.uuid4().hex
        puts = [tuple(put_arguments(message)) for message in change.puts]
        num_bytes = len(record) + sum(len(part) for put in puts for part in put[3:] if isinstance(part, bytes))
        args: list[bytes | int | float] = [change.seq, num_bytes, change.session.encode(), write_id.encode()]
        args += [int(change.create), int(change.delete), record, title, repr(updated_at).encode(), digest, answer]
        args += [self._event_history, EVENTS_TTL_S, REQUEST_TTL_S, WRITES_TTL_S, TOMBSTONE_TTL_S, WRITES_KEPT]
        args += [change.fence, change.owner.encode(), keys.news(change.session), request_id]
        args += [keys.of("list"), change.announcement]
        quota = change.quota
        args += [-1 if most is None else most for most in (quota.sessions, quota.stored_bytes, quota.generations)]
        args += [len(change.deletes), *(message.encode() for message in change.deletes)]
        args += [len(puts), *itertools.chain.from_iterable(puts)]
        args += [len(change.events), *map(encode, change.events)]
        return Call(names, tuple(args))

    async def append(self, deltas: Sequence[Delta]) -> list[int | None]:
        """See `Store.append`."""
        return await self._appender.append(deltas) if deltas else []

    async def answer(self, user: UserId, request_id: str) -> tuple[str, bytes] | None:
        """See `Store.answer`."""
        key = Keys(user).of("request:", request_id)
        digest, answer = await self._link.command("look up a request", "HMGET", key, "digest", "answer")
        return None if digest is None else (digest.decode(), answer)

    async def load(self, user: UserId, session: SessionId) -> SessionState | None:
        """See `Store.load`."""
        keys = Keys(user)
        names = keys.session(session, "session", "metas", "texts", "tokens", "order", "generating", "log", "tail")
        reply = await self._link.read("read a session", self._load, Call(names, ()))
        return None if reply is None else read_state(*reply)

    async def events(self, user: UserId, session: SessionId, after: int) -> list[AnyEvent] | None:
        """See `Store.events`."""
        if after < 0:
            return None
        names = Keys(user).session(session, "session", "log", "tail")
        reply = await self._link.read("read events", self._events, Call(names, (after,)))
        return None if reply is None else read_events(session, after, *reply)

    async def list_sessions(self, user: UserId, limit: int, cursor: str | None, query: str | None) -> SessionPage:
        """See `Store.list_sessions`."""
        return await self._listing.page(user, limit, cursor, query)

    async def untouched(self, before: float) -> AsyncIterator[tuple[UserId, SessionId]]:
        """See `Store.untouched`."""
        async for pair in self._listing.untouched(before):
            yield pair

    async def unfinished(self, sessions: Sequence[tuple[UserId, SessionId]]) -> list[tuple[UserId, SessionId]]:
        """See `Store.unfinished`."""
        found: list[tuple[UserId, SessionId]] = []
        for start in range(0, len(sessions), 500):
            some = sessions[start : start + 500]
            names = [Keys(user).session(session, "generating")[0] for user, session in some]
            replies = await self._link.commands("list unfinished sessions", [("EXISTS", name) for name in names])
            for pair, reply in zip(some, replies, strict=True):
                raise_error(reply)
                found += [pair] if reply else []
        return found

    async def ping(self) -> None:
        """See `Store.ping`."""
        # A write that changes nothing: refused by whoever takes no writes, such as a server whose disk is full.
        await self._link.command("take a write", "UNLINK", "chatserve:nothing")

    async def close(self) -> None:
        """Wait for what is being written, then close the connections."""
        await self._link.close()
