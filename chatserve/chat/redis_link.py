"""The way to a Redis or Valkey server: connections, time-outs, retries, scripts, and what failure means.

Knows nothing of sessions. Everything that goes through `RedisLink` may be sent twice when a connection breaks, so
callers send only what is safe to repeat. A call ends with the server's answer or with `StoreUnavailableError`.

Each call runs in a task of its own that its caller's cancellation does not reach: a reply is always read by the command
that it belongs to, and a connection is never given back in mid-conversation.
"""

from __future__ import annotations

import asyncio
import hashlib
from contextlib import suppress
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit, urlunsplit

import msgspec
from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Connection, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from chatserve.errors import StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

T = TypeVar("T")

TIMEOUT_S: Final = 1.0
"""For connecting, for sending, for each reply, and for a free connection."""
RETRY_DELAYS_S: Final = (0.05, 0.3)
MAX_CONNECTIONS: Final = 64
READ_PATIENCE: Final = 5
"""How many times longer a reply that may be as large as a session may take."""
MAX_READ_CONNECTIONS: Final = 16

_TRANSIENT: Final = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.ReadOnlyError)
"""Broken or refused connections, BUSY LOADING, no answer in time, a primary that has just become a replica."""
_HOPELESS: Final = (exceptions.AuthenticationError, exceptions.AuthorizationError)
_UNREACHED: Final = (OSError, EOFError, exceptions.RedisError)


class Script(msgspec.Struct, frozen=True):
    """A Lua script, and the SHA-1 by which a server that has seen it knows it."""

    text: bytes
    sha: str

    @classmethod
    def read(cls, name: str) -> Script:
        text = (files("chatserve.chat") / "lua" / f"{name}.lua").read_bytes()
        return cls(text, hashlib.sha1(text, usedforsecurity=False).hexdigest())


class Call(msgspec.Struct, frozen=True):
    """One script call; its keys all carry the same hash tag."""

    keys: tuple[bytes, ...]
    args: tuple[bytes | int | float, ...]


class RedisLink:
    """Bounded connections to one server."""

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self.name: Final = hide_password(url)
        self.is_cluster: Final = False
        """Whether a script may only touch keys of one hash tag."""
        self._redis = _client(url, MAX_CONNECTIONS, timeout_s, timeout_s)
        self._reader = _client(url, MAX_READ_CONNECTIONS, timeout_s, timeout_s * READ_PATIENCE)
        self._url = url
        self._timeout_s = timeout_s
        self._tasks: set[asyncio.Task[Any]] = set()

    async def command(self, what: str, *args: bytes | str | int) -> Any:
        """Send one command; `what` completes the sentence "could not …"."""
        return await self._call(what, lambda: _execute(self._redis, *args))

    async def commands(self, what: str, commands: Sequence[tuple[bytes | str | int, ...]]) -> list[Any]:
        """Send all commands in one write and read all replies, any of which may be a `ResponseError`."""

        async def run() -> list[Any]:
            async with self._redis.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                replies: list[Any] = await pipeline.execute(raise_on_error=False)
            return replies

        return await self._call(what, run)

    async def script(self, what: str, script: Script, call: Call) -> Any:
        return await self._call(what, lambda: _evaluate(self._redis, script, call))

    async def read(self, what: str, script: Script, call: Call) -> Any:
        """Call a script that changes nothing and whose reply may be large."""
        return await self._call(what, lambda: _evaluate(self._reader, script, call))

    async def scripts(self, what: str, script: Script, calls: Sequence[Call]) -> list[Any]:
        """Send all calls in one write and read all replies. A reply may be a `ResponseError` that the script itself
        returned.
        """

        async def run() -> list[Any]:
            replies = await self._pipeline(script, calls, load=False)
            if any(isinstance(reply, exceptions.NoScriptError) for reply in replies):
                replies = await self._pipeline(script, calls, load=True)
            return replies

        return await self._call(what, run)

    async def num_subscribers(self, channel: bytes) -> int:
        """Of one channel, on all connections to the store."""
        reply = await self.command("count subscribers", "PUBSUB", "NUMSUB", channel)
        return int(reply[1])

    async def feed_connection(self, silence_s: float) -> Connection:
        """A connection for one caller alone, not connected yet, on which nothing may be heard for so long."""
        pool = _client(self._url, 1, self._timeout_s, silence_s).connection_pool
        connection: Connection = pool.make_connection()  # type: ignore[no-untyped-call]
        return connection

    async def _pipeline(self, script: Script, calls: Sequence[Call], *, load: bool) -> list[Any]:
        async with self._redis.pipeline(transaction=False) as pipeline:
            if load:
                pipeline.execute_command("SCRIPT LOAD", script.text)
            for call in calls:
                pipeline.execute_command("EVALSHA", script.sha, len(call.keys), *call.keys, *call.args)
            replies: list[Any] = await pipeline.execute(raise_on_error=False)
        return replies[1:] if load else replies

    async def _call(self, what: str, operation: Callable[[], Awaitable[T]]) -> T:
        task = asyncio.create_task(self._with_retries(what, operation))
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return await asyncio.shield(task)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen: where its caller was cancelled, nobody is left to get it

    async def _with_retries(self, what: str, operation: Callable[[], Awaitable[T]]) -> T:
        delays = iter(RETRY_DELAYS_S)
        while True:
            try:
                return await operation()
            except _UNREACHED as error:
                delay = next(delays, None) if is_transient(error) else None
                if delay is None:
                    raise StoreUnavailableError(f"the store could not {what}: {one_line(error)}") from error
                # What broke one connection has often broken the idle ones too.
                for client in (self._redis, self._reader):
                    with suppress(*_UNREACHED):
                        await client.connection_pool.disconnect(inuse_connections=False)
            await asyncio.sleep(delay)

    async def close(self) -> None:
        """Let what is under way end (each command is bounded by its time-outs), then close the connections."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        for client in (self._redis, self._reader):
            with suppress(*_UNREACHED):
                await client.aclose()
                await client.connection_pool.disconnect()


def _client(url: str, max_connections: int, timeout_s: float, reply_timeout_s: float) -> Redis:
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=max_connections,
        timeout=reply_timeout_s,
        socket_timeout=reply_timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
        decode_responses=False,
    )
    return Redis(connection_pool=pool)


async def _execute(client: Redis, *args: bytes | str | float) -> Any:
    return await client.execute_command(*args)  # type: ignore[no-untyped-call]


async def _evaluate(client: Redis, script: Script, call: Call) -> Any:
    arguments = (len(call.keys), *call.keys, *call.args)
    try:
        return await _execute(client, "EVALSHA", script.sha, *arguments)
    except exceptions.NoScriptError:
        return await _execute(client, "EVAL", script.text, *arguments)


def is_transient(error: BaseException) -> bool:
    return isinstance(error, (*_TRANSIENT, OSError, EOFError)) and not isinstance(error, _HOPELESS)


def raise_error(reply: object) -> None:
    """One reply of many may be an error that the server gave instead of an answer.

    Raises:
        StoreUnavailableError: it is.
    """
    if isinstance(reply, Exception):
        raise StoreUnavailableError(f"the store refused: {one_line(reply)}") from reply


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def hide_password(url: str) -> str:
    """The URL for a log line."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))
