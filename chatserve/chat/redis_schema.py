"""The version of what lies in Redis, and the steps that bring an older one up to date.

A store is taken from its version to ours one step at a time, by one process while the others wait. The version is
raised after a step is done, and each step may be done again: whoever dies in the middle leaves a store that the next
start finishes. One that stood still for so long that another did its work finds so when it renews its lock, and stops.
Servers of the older version must have been stopped before.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from contextlib import aclosing
from typing import TYPE_CHECKING, Final

import msgspec

from chatserve.chat.redis_layout import SCHEMA, Keys
from chatserve.chat.redis_link import Call, Script, raise_error
from chatserve.chat.redis_workers import held_key, pack_session
from chatserve.chat.workers import owner_name
from chatserve.errors import StartupError
from chatserve.types import SessionId, UserId

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from chatserve.chat.redis_link import RedisLink

log = logging.getLogger(__name__)

KEY: Final = "chatserve:schema"
_LOCK: Final = "chatserve:schema-lock"
_LOCK_TTL_S: Final = 30
"""Whoever migrates renews it after each step of `_AT_ONCE` users or sessions."""
_PAUSE_S: Final = 0.2
_AT_ONCE: Final = 500
_MARK_TTL_S: Final = 3600
"""Longer than it takes to measure one user."""


_IF_EQUAL: Final = Script.read("if_equal")


class _LockLostError(Exception):
    """Another process is at it, or was."""


class Migration(msgspec.Struct, frozen=True):
    """From version `before` to the next; `run` may be repeated."""

    before: int
    run: Callable[[RedisLink, Callable[[], Awaitable[None]]], Awaitable[None]]
    """Calls its second argument, which renews the lock, at least every few seconds, and before each write that must not
    be done over what servers of the newer version wrote. It raises where the lock is another's; that ends the step.
    """


async def bring_up_to_date(link: RedisLink, migrations: tuple[Migration, ...] | None = None) -> None:
    """Mark an empty store with our version, and migrate an older one.

    Raises:
        StartupError: it is newer than this program, or not a version that it knows.
        StoreUnavailableError: it does not answer.
    """
    steps = {step.before: step for step in (MIGRATIONS if migrations is None else migrations)}
    newest = max([SCHEMA, *(before + 1 for before in steps)])
    await link.command("mark its schema", "SET", KEY, str(newest), "NX")
    while (version := await _version(link, newest)) < newest:
        if (step := steps.get(version)) is None:
            raise StartupError(
                f"the store at {link.name} has schema {version}, and this version can bring schemas {min(steps)} to "
                f"{newest - 1} up to date: give it another store"
            )
        me = uuid.uuid4().hex
        if not await link.command("lock its schema", "SET", _LOCK, me, "NX", "EX", _LOCK_TTL_S):
            await asyncio.sleep(_PAUSE_S)  # another server is at it
            continue

        async def renew(me: str = me) -> None:
            if not await _if_equal(link, "lock its schema", _LOCK, me, "EXPIRE", _LOCK_TTL_S):
                raise _LockLostError

        try:
            if await _version(link, newest) != version:
                continue
            log.warning("bringing the store at %s from schema %d to %d", link.name, version, version + 1)
            await step.run(link, renew)
            await _if_equal(link, "mark its schema", KEY, str(version), "SET", version + 1)
        except _LockLostError:
            log.warning("this server stood still while it brought the store up to date; another one goes on with it")
        finally:
            await _if_equal(link, "unlock its schema", _LOCK, me, "DEL")


async def _if_equal(link: RedisLink, what: str, key: str, value: str, command: str, *args: int) -> object:
    """The reply to a command on a key; None where the key has another value."""
    return await link.script(what, _IF_EQUAL, Call((key.encode(),), (value.encode(), command.encode(), *args)))


async def _version(link: RedisLink, newest: int) -> int:
    found: bytes = await link.command("tell its schema", "GET", KEY)
    if not found.isdigit() or int(found) > newest:
        raise StartupError(
            f"the store at {link.name} has schema {found.decode(errors='replace')} and this version knows {newest}: "
            "upgrade chatserve, or give it another store"
        )
    return int(found)


async def _users(link: RedisLink, at_once: int) -> AsyncGenerator[list[UserId], None]:
    """All users, about so many at a time."""
    cursor = 0
    while True:
        next_cursor, names = await link.command("list users", "SSCAN", "chatserve:users", cursor, "COUNT", at_once)
        yield [UserId(name.decode()) for name in names]
        cursor = int(next_cursor)
        if cursor == 0:
            return


async def _leases(link: RedisLink, renew: Callable[[], Awaitable[None]]) -> None:
    """Version 1 had one server at a time, and noted sessions with unfinished answers by user. From version 2 on they
    are noted by the process that may generate them: here one that is dead, so that they are taken over.
    """
    old = owner_name("schema-1", "migrated")
    async with aclosing(_users(link, _AT_ONCE)) as groups:
        async for users in groups:
            keys = [Keys(user).of("unfinished") for user in users]
            replies = await link.commands("list unfinished sessions", [("SMEMBERS", key) for key in keys])
            for user, key, reply in zip(users, keys, replies, strict=True):
                raise_error(reply)
                for session in reply:
                    packed = pack_session(user, SessionId(session.decode()))
                    await link.command("note a session", "SADD", "chatserve:workers", old)
                    await link.command("note a session", "SADD", held_key(old), packed)
                if reply:
                    await link.command("forget a list", "DEL", key)
            await renew()


async def _usage(link: RedisLink, renew: Callable[[], Awaitable[None]]) -> None:
    """From version 3 on it is counted what each session takes, and each user."""
    me = uuid.uuid4().hex.encode()
    async with aclosing(_users(link, 10)) as groups:
        async for users in groups:
            for user in users:
                await _measure(link, user, me, renew)


async def _measure(link: RedisLink, user: UserId, me: bytes, renew: Callable[[], Awaitable[None]]) -> None:
    measure = Script.read("measure")
    keys, num_bytes, num_generating = Keys(user), 0, 0
    # The lock is in another slot than what is written: whoever stands still after renewing it finds the mark another's.
    mark = keys.of("measuring")
    await link.command("mark a user", "SET", mark, me, "EX", _MARK_TTL_S)
    for session in await link.command("list sessions", "ZRANGE", keys.of("index"), 0, -1):
        of_session = keys.session(session.decode(), "session", "metas", "texts", "tokens", "generating")
        took, generating = await link.script("measure a session", measure, Call(of_session, ()))
        num_bytes, num_generating = num_bytes + took, num_generating + generating
        await renew()
    if num_bytes:
        usage = (b"bytes", num_bytes, b"generating", num_generating)
        call = Call((mark, keys.of("usage")), (me, b"HSET", *usage))
        if await link.script("note what a user has", _IF_EQUAL, call) is None:
            raise _LockLostError
    await link.script("unmark a user", _IF_EQUAL, Call((mark,), (me, b"DEL")))


async def _chunks(link: RedisLink, renew: Callable[[], Awaitable[None]]) -> None:
    """Up to version 3 what was appended to an answer lay in two keys of its own, and every delta in a stream of events.
    That stream goes: whoever resumes gets a snapshot.
    """
    async with aclosing(_users(link, 10)) as groups:
        async for users in groups:
            for user in users:
                found = await link.command("list sessions", "ZRANGE", Keys(user).of("index"), 0, -1)
                for first in range(0, len(found), _AT_ONCE):
                    await renew()
                    await _settle(link, user, [session.decode() for session in found[first : first + _AT_ONCE]])


async def _settle(link: RedisLink, user: UserId, sessions: Sequence[str]) -> None:
    settle, keys = Script.read("settle"), Keys(user)
    commands = [("HKEYS", keys.of("generating:", session)) for session in sessions]
    replies = await link.commands("list unfinished answers", commands)
    for session, messages in zip(sessions, replies, strict=True):
        raise_error(messages)
        of_session = keys.session(SessionId(session), "session", "generating", "texts", "tokens")
        for message in messages:
            name = f"{session}:{message.decode()}"
            live = keys.of("live-text:", name), keys.of("live-tokens:", name)
            await link.script("settle an answer", settle, Call((*of_session, keys.of("usage"), *live), (message,)))
    for reply in await link.commands("drop events", [("UNLINK", keys.of("events:", s)) for s in sessions]):
        raise_error(reply)


MIGRATIONS: Final = (Migration(1, _leases), Migration(2, _usage), Migration(3, _chunks))
