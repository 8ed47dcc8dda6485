"""The way to a Redis or Valkey server: connections, time-outs, retries, scripts, and what failure means.

Knows nothing of sessions. Everything that goes through `RedisLink` may be sent twice when a connection breaks, so
callers send only what is safe to repeat. A call ends with the server's answer or with `StoreUnavailableError`.

Each call runs in a task of its own that its caller's cancellation does not reach: a reply is always read by the command
that it belongs to, and a connection is never given back in mid-conversation.
"""

from __future__ import annotations

import asyncio
import hashlib
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit, urlunsplit

import msgspec
from redis import exceptions
from redis.asyncio import Connection
from redis.asyncio.sentinel import MasterNotFoundError

from chatserve.chat.redis_clients import UNREACHED, open_clients
from chatserve.errors import StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

T = TypeVar("T")

TIMEOUT_S: Final = 1.0
"""For connecting, for sending, for each reply, and for a free connection."""
RETRY_DELAYS_S: Final = (0.05, 0.3)
_TRANSIENT: Final = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,
    exceptions.RedisClusterException,
)
"""Broken or refused connections, BUSY LOADING, no answer in time, a primary that has just become a replica, a cluster
of which no node answers."""
_HOPELESS: Final = (exceptions.AuthenticationError, exceptions.AuthorizationError)


class Script(msgspec.Struct, frozen=True):
    """A Lua script, and the SHA-1 by which a server that has seen it knows it."""

    text: bytes
    sha: str

    @classmethod
    def read(cls, name: str, *before: str) -> Script:
        """The script of that name in lua/, after others whose functions it calls."""
        directory = files("chatserve.chat") / "lua"
        text = b"".join((directory / f"{part}.lua").read_bytes() for part in (*before, name))
        return cls(text, hashlib.sha1(text, usedforsecurity=False).hexdigest())


class Call(msgspec.Struct, frozen=True):
    """One script call; its keys all carry the same hash tag."""

    keys: tuple[bytes, ...]
    args: tuple[bytes | int | float, ...]


class RedisLink:
    """Bounded connections to a store."""

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self.name: Final = hide_password(url)
        self._clients = open_clients(url, timeout_s)
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def is_cluster(self) -> bool:
        """Whether a script may only touch keys of one hash tag."""
        return self._clients.is_cluster

    async def command(self, what: str, *args: bytes | str | int) -> Any:
        """Send one command; `what` completes the sentence "could not …"."""
        return await self._call(what, lambda: self._clients.main.execute_command(*args))

    async def commands(self, what: str, commands: Sequence[tuple[bytes | str | int, ...]]) -> list[Any]:
        """Send all commands in one write and read all replies, any of which may be a `ResponseError`."""

        async def run() -> list[Any]:
            async with self._clients.main.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                replies: list[Any] = await pipeline.execute(raise_on_error=False)
            return replies

        return await self._call(what, run)

    async def script(self, what: str, script: Script, call: Call) -> Any:
        return await self._call(what, lambda: _evaluate(self._clients.main, script, call))

    async def read(self, what: str, script: Script, call: Call) -> Any:
        """Call a script that changes nothing and whose reply may be large."""
        return await self._call(what, lambda: _evaluate(self._clients.reader, script, call))

    async def scripts(self, what: str, calls: Sequence[tuple[Script, Call]]) -> list[Any]:
        """Send all calls in one write and read all replies. A reply may be a `ResponseError` that the script itself
        returned.
        """

        async def run() -> list[Any]:
            replies = await self._pipeline(calls)
            if any(isinstance(reply, exceptions.NoScriptError) for reply in replies):
                for script in {script for script, _ in calls}:
                    await self._clients.load(script.text)
                replies = await self._pipeline(calls)
            return replies

        return await self._call(what, run)

    async def num_subscribers(self, channel: bytes) -> int:
        """Of one channel, on all connections to the store."""
        return await self._call("count subscribers", lambda: self._clients.num_subscribers(channel))

    async def feed_connection(self, silence_s: float) -> Connection:
        """A connection for one caller alone, not connected yet, on which nothing may be heard for so long."""
        return await self._clients.feed_connection(silence_s)

    async def _pipeline(self, calls: Sequence[tuple[Script, Call]]) -> list[Any]:
        async with self._clients.main.pipeline(transaction=False) as pipeline:
            for script, call in calls:
                pipeline.execute_command("EVALSHA", script.sha, len(call.keys), *call.keys, *call.args)
            replies: list[Any] = await pipeline.execute(raise_on_error=False)
        return replies

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
            except UNREACHED as error:
                delay = next(delays, None) if is_transient(error) else None
                if delay is None:
                    raise StoreUnavailableError(f"the store could not {what}: {one_line(error)}") from error
                await self._clients.drop_idle()
            await asyncio.sleep(delay)

    async def close(self) -> None:
        """Let what is under way end (each command is bounded by its time-outs), then close the connections."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))
        await self._clients.close()


async def _evaluate(client: Any, script: Script, call: Call) -> Any:
    arguments = (len(call.keys), *call.keys, *call.args)
    try:
        return await client.execute_command("EVALSHA", script.sha, *arguments)
    except exceptions.NoScriptError:
        return await client.execute_command("EVAL", script.text, *arguments)


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
    if isinstance(error, MasterNotFoundError):  # its own text shows the insides of each sentinel's client
        return "no sentinel that answers names a primary of this service"
    if "NOREPLICAS" in str(error):
        return "it takes no writes just now, because its disk is full or it has lost its replicas"
    return " ".join(str(error).split()) or type(error).__name__


def hide_password(url: str) -> str:
    """The URL for a log line."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return urlunsplit((parts.scheme, host, parts.path, "", ""))
