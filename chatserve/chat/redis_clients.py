"""The clients behind a store's URL: one server, the present primary of several (Sentinel), or a cluster.

    redis://[user:password@]host:port/db   rediss:// with TLS   unix:///path/to/socket
    redis+sentinel://[user:password@]host:port,host:port/service   the addresses are the sentinels'
    redis+cluster://[user:password@]host:port,host:port             any of the nodes

Owns connections and their time-outs; knows no command but those that differ from one kind to the other. In a cluster
all keys of a user are in one slot, which lies on one node; the keys that belong to no user may be on any.
"""

from __future__ import annotations

import random
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import SplitResult, unquote, urlsplit

from redis import exceptions
from redis.asyncio import BlockingConnectionPool, Connection, Redis, SSLConnection
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_CONNECTIONS: Final = 64
MAX_READ_CONNECTIONS: Final = 16
READ_PATIENCE: Final = 5
"""How many times longer a reply that may be as large as a session may take."""
UNREACHED: Final = (OSError, EOFError, exceptions.RedisError, exceptions.RedisClusterException)
"""The last, which is no `RedisError`, means that no node of a cluster can be reached."""


class Clients(Protocol):
    """What `RedisLink` needs of whatever is behind a URL."""

    is_cluster: bool
    """Whether a script may only touch keys of one hash tag."""
    main: Any
    """`Redis` or `RedisCluster`, for what is small."""
    reader: Any
    """For replies that may be as large as a session."""

    async def load(self, script: bytes) -> None:
        """Make a script known wherever it may be called."""
        ...

    async def num_subscribers(self, channel: bytes) -> int: ...

    async def feed_connection(self, silence_s: float) -> Connection:
        """A connection of its own, not connected yet, on which nothing may be heard for so long."""
        ...

    async def drop_idle(self) -> None:
        """Whatever broke one connection has often broken the idle ones too."""
        ...

    async def close(self) -> None: ...


def open_clients(url: str, timeout_s: float) -> Clients:
    """Nothing is connected yet.

    Raises:
        ValueError: the URL is none of ours.
    """
    parts = urlsplit(url)
    scheme, _, kind = parts.scheme.partition("+")
    if not kind:
        return _Pooled(lambda size, reply_s: _pool(url, size, timeout_s, reply_s), timeout_s)
    if scheme not in {"redis", "rediss"} or kind not in {"sentinel", "cluster"}:
        raise ValueError(f"{parts.scheme}:// is none of redis, rediss, unix, redis+sentinel and redis+cluster")
    options: dict[str, Any] = {
        "username": unquote(parts.username) if parts.username else None,
        "password": unquote(parts.password) if parts.password else None,
    }
    if scheme == "rediss":
        options["ssl"] = True
    default_port = 26379 if kind == "sentinel" else 6379
    addresses = _addresses(parts, default_port)
    if kind == "cluster":
        return _Clustered(addresses, timeout_s, options)
    service = parts.path.strip("/")
    if not service:
        raise ValueError("redis+sentinel:// needs the name of the service: redis+sentinel://host:26379/NAME")
    to_sentinels = _timeouts(timeout_s, timeout_s) | options
    sentinel = Sentinel(addresses, sentinel_kwargs=to_sentinels)  # type: ignore[no-untyped-call]

    def make_pool(size: int, reply_s: float) -> BlockingConnectionPool:
        return _BlockingSentinelPool(  # type: ignore[no-untyped-call]
            service, sentinel, max_connections=size, timeout=reply_s, **_timeouts(timeout_s, reply_s), **options
        )

    return _Pooled(make_pool, timeout_s, sentinel.sentinels)


def _addresses(parts: SplitResult, default_port: int) -> list[tuple[str, int]]:
    found: list[tuple[str, int]] = []
    for address in parts.netloc.rpartition("@")[2].split(","):
        one = urlsplit(f"//{address}")
        if not one.hostname:
            raise ValueError(f"{address!r} is no address of a server")
        found.append((one.hostname, one.port or default_port))
    return found


# --- one server, or the one that is the primary just now --------------------------------------------------------------


def _timeouts(timeout_s: float, reply_s: float) -> dict[str, Any]:
    return {
        "socket_timeout": reply_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        "decode_responses": False,
    }


def _pool(url: str, size: int, timeout_s: float, reply_s: float) -> BlockingConnectionPool:
    pool = BlockingConnectionPool.from_url(url, max_connections=size, timeout=reply_s, **_timeouts(timeout_s, reply_s))
    try:
        pool.make_connection()  # type: ignore[no-untyped-call]  # connects nothing
    except TypeError as error:  # an option in the URL's query that no connection has
        raise ValueError(f"its query has an option that is not known: {error}") from error
    return pool


class _BlockingSentinelPool(SentinelConnectionPool, BlockingConnectionPool):
    """Connections to the primary; whoever finds all in use waits for one."""


class _Pooled:
    """Implements `Clients`."""

    def __init__(
        self,
        make_pool: Callable[[int, float], BlockingConnectionPool],
        timeout_s: float,
        sentinels: Sequence[Redis] = (),
    ) -> None:
        """`make_pool` takes the most connections and the seconds that a reply may take."""
        self.is_cluster = False
        self._make_pool = make_pool
        self._feed_pool: BlockingConnectionPool | None = None
        self._sentinels = sentinels
        """Only asked who the primary is."""
        self.main = Redis(connection_pool=make_pool(MAX_CONNECTIONS, timeout_s))
        self.reader = Redis(connection_pool=make_pool(MAX_READ_CONNECTIONS, timeout_s * READ_PATIENCE))

    async def load(self, script: bytes) -> None:
        await self.main.execute_command("SCRIPT LOAD", script)  # type: ignore[no-untyped-call]

    async def num_subscribers(self, channel: bytes) -> int:
        reply = await self.main.execute_command("PUBSUB", "NUMSUB", channel)  # type: ignore[no-untyped-call]
        return int(reply[1])

    async def feed_connection(self, silence_s: float) -> Connection:
        if self._feed_pool is None:
            self._feed_pool = self._make_pool(1, silence_s)
        connection: Connection = self._feed_pool.make_connection()  # type: ignore[no-untyped-call]
        return connection

    async def drop_idle(self) -> None:
        for client in (self.main, self.reader):
            with suppress(*UNREACHED):
                await client.connection_pool.disconnect(inuse_connections=False)

    async def close(self) -> None:
        for client in (self.main, self.reader, *self._sentinels):
            with suppress(*UNREACHED):
                await client.aclose()
                await client.connection_pool.disconnect()


# --- a cluster --------------------------------------------------------------------------------------------------------


class _Clustered:
    """Implements `Clients`."""

    def __init__(self, addresses: Sequence[tuple[str, int]], timeout_s: float, options: dict[str, Any]) -> None:
        self.is_cluster = True
        self._timeout_s = timeout_s
        self._options = options
        self._addresses = addresses
        self.main = self._client(MAX_CONNECTIONS, timeout_s)
        self.reader = self._client(MAX_READ_CONNECTIONS, timeout_s * READ_PATIENCE)

    def _client(self, size: int, reply_s: float) -> RedisCluster:
        return RedisCluster(
            startup_nodes=[ClusterNode(host, port) for host, port in self._addresses],
            max_connections=size,
            **_timeouts(self._timeout_s, reply_s),
            **self._options,
        )

    async def load(self, script: bytes) -> None:
        await self.main.execute_command("SCRIPT LOAD", script, target_nodes=RedisCluster.PRIMARIES)

    async def num_subscribers(self, channel: bytes) -> int:
        await self.main.initialize()
        counts = [await node.execute_command("PUBSUB", "NUMSUB", channel) for node in self.main.get_nodes()]
        return sum(int(reply[1]) for reply in counts)

    async def feed_connection(self, silence_s: float) -> Connection:
        """To any node: what is published on one is heard on all."""
        await self.main.initialize()
        node = random.choice(self.main.get_nodes())
        kind = SSLConnection if self._options.get("ssl") else Connection
        options = {name: value for name, value in self._options.items() if name != "ssl"}
        return kind(host=node.host, port=node.port, **_timeouts(self._timeout_s, silence_s), **options)

    async def drop_idle(self) -> None:
        """The client does so by itself: it asks the nodes anew which of them has what."""

    async def close(self) -> None:
        for client in (self.main, self.reader):
            with suppress(*UNREACHED):
                await client.aclose()
