"""The address that the server listens on: whether it may, whether it can, and whether the page behind it is ready.

Knows nothing of what is served.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit, urlunsplit

from chatserve.errors import StartupError
from chatserve.server import auth
from chatserve.server.origin import is_loopback

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_HEAD_BYTES: Final = 65_536
_PORT_POLL_S: Final = 0.1


class PortTakenError(StartupError):
    """Somebody else listens there."""


def check_exposure(host: str, tokens_file: Path | None) -> None:
    """Refuse to let strangers in: without tokens everyone who can connect is the user `local`.

    Raises:
        StartupError: the host is reachable and no token is set, or the token file is missing or malformed.
    """
    if tokens_file is None:
        if not is_loopback(host):
            raise StartupError(
                f"refusing to listen on {host} without a token; make one with "
                "`chatserve token NAME --tokens-file FILE` and start with --tokens-file FILE, "
                "or stay with --host 127.0.0.1"
            )
    elif not tokens_file.exists():
        raise StartupError(
            f"there is no token file {tokens_file}; `chatserve token NAME --tokens-file {tokens_file}` makes one"
        )
    else:
        auth.read_tokens(tokens_file)


def listen(host: str, port: int) -> socket.socket:
    """A bound, listening socket, which the web workers inherit. Bound while what is slow gets ready, so that a taken
    port is said at once and nobody takes it meanwhile; held as long as we run, so that whoever connects while a worker
    is started again waits a moment rather than being refused.

    Raises:
        PortTakenError: somebody has the port.
        StartupError: the port may not be used, or the host is not this machine's.
    """
    host = host.strip("[]")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise StartupError(f"--host {host}: no such address ({error.strerror})") from error
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        match error.errno:
            case errno.EADDRINUSE:
                taken = f"port {port} is taken by another program; stop it, or choose another --port"
                raise PortTakenError(taken) from error
            case errno.EACCES:
                sentence = f"port {port} may not be used by this user; choose a --port from 1024 up"
            case errno.EADDRNOTAVAIL:
                sentence = f"--host {host} is not an address of this machine"
            case _:
                sentence = f"cannot listen on {host}:{port}: {error.strerror}"
        raise StartupError(sentence) from error
    listener.setblocking(False)
    return listener


async def listen_in_time(host: str, port: int, patience_s: float, say: Callable[[str], None]) -> socket.socket:
    """`listen`, and wait so long for a port that somebody has. Raises what `listen` raises."""
    deadline, said = time.monotonic() + patience_s, False
    while True:
        try:
            return listen(host, port)
        except PortTakenError:
            if time.monotonic() >= deadline:
                raise
        if not said:
            said = True
            say(f"port {port} is still taken, perhaps by what is left of a run that was killed; waiting for it")
        await asyncio.sleep(_PORT_POLL_S)


def reachable_host(host: str) -> str:
    """A host at which this machine itself reaches a server that listens on `host`."""
    bare = host.strip("[]")
    match bare:
        case "0.0.0.0" | "":  # noqa: S104 - recognised, not bound
            return "127.0.0.1"
        case "::":
            return "[::1]"
        case _:
            return f"[{bare}]" if ":" in bare else bare


async def http_status(host: str, port: int, path: str, *, timeout_s: float) -> int | None:
    """The status of `GET path`; None where nothing (yet) answers."""
    with contextlib.suppress(OSError, TimeoutError, ValueError, IndexError):
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(host.strip("[]"), port)
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
                head = await reader.read(_MAX_HEAD_BYTES)
                return int(head.split(None, 2)[1])
            finally:
                writer.close()
    return None


def without_password(url: str) -> str:
    """A URL fit for a log line."""
    parts = urlsplit(url)
    if parts.password is None:
        return url
    netloc = parts.netloc.replace(f":{parts.password}@", ":***@")
    return urlunsplit(parts._replace(netloc=netloc))


async def ping_redis(url: str, *, timeout_s: float = 5.0) -> None:
    """See that a server answers.

    Raises:
        StartupError: it does not.
    """
    # Imported here: it takes a tenth of a second, and only servers with a Redis of their own need it.
    from chatserve.chat.redis_link import RedisLink  # noqa: PLC0415
    from chatserve.errors import StoreUnavailableError  # noqa: PLC0415

    shown = without_password(url)
    try:
        link = RedisLink(url, timeout_s=timeout_s)
    except ValueError as error:
        raise StartupError(f"--redis-url {shown}: {error}") from error
    try:
        await link.command("answer a ping", "PING")
    except StoreUnavailableError as error:
        reason = error.detail.partition(": ")[2].strip().rstrip(".")
        raise StartupError(
            f"cannot reach Redis at {shown} ({reason}); start it, or leave --redis-url out to use the built-in store"
        ) from error
    finally:
        await link.close()
