"""The web worker's process: `python -m chatserve.server.worker --settings JSON`, where JSON is a `WebSettings`.

Owns the listening socket, signals and logging. It exits when its standard input closes (whoever started it is gone),
and says in one line why it cannot start. It must not import torch.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from chatserve.config import WebSettings, decode_settings
from chatserve.errors import StartupError
from chatserve.server.app import build_app
from chatserve.server.context import Context
from chatserve.server.http_transport import PatientHttpTransport
from chatserve.server.sockets import ChatSocketTransport

_log = logging.getLogger(__name__)

SHUTDOWN_S: Final = 5
"""How long open connections may take to end."""


class WebServer(uvicorn.Server):
    """Leaves signals alone: whoever runs it says when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_server(app: Any, max_frame_bytes: int) -> WebServer:
    """A server for an application whose lifespan the caller runs."""
    config = uvicorn.Config(
        app,
        http=PatientHttpTransport,
        ws=ChatSocketTransport,
        ws_max_size=max_frame_bytes,
        # The heartbeat is `chat.v1`'s own. Compression would cost memory a socket and time a token.
        ws_ping_interval=None,
        ws_per_message_deflate=False,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    return WebServer(config)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        StartupError: the address is taken, or not ours.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StartupError(f"cannot listen on {host}:{port}: {reason}; choose another with --host or --port") from error


async def serve(
    app: Starlette,
    listener: socket.socket,
    max_frame_bytes: int,
    stop: asyncio.Event,
    orphaned: asyncio.Event | None = None,
) -> None:
    """Run the application's lifespan, and in it a server until `stop` is set and what it was answering has ended. Once
    it is `orphaned` nothing is waited for: whoever comes next wants the address. Stopped before it has started, it
    gives up the start and the address.

    Raises:
        StartupError: whatever the lifespan cannot open.
    """
    starting = asyncio.current_task()
    assert starting is not None

    async def give_up() -> None:
        await stop.wait()
        listener.close()
        starting.cancel()

    giving_up = asyncio.create_task(give_up(), name="end of the start")
    try:
        async with app.router.lifespan_context(app) as state:
            giving_up.cancel()
            await _serve(app, state, listener, max_frame_bytes, stop, orphaned)
    except asyncio.CancelledError:
        if not giving_up.done() or giving_up.cancelled():
            raise
        starting.uncancel()
        _log.info("asked to end before it had started")
    finally:
        giving_up.cancel()


async def _serve(
    app: Starlette,
    state: Mapping[str, Any] | None,
    listener: socket.socket,
    max_frame_bytes: int,
    stop: asyncio.Event,
    orphaned: asyncio.Event | None,
) -> None:
    """From the started application on."""
    context: Context | None = (state or {}).get("context")

    async def with_state(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"] = dict(state or {})
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:
            if not server.should_exit:
                raise
            # A long answer that outlived its grace: not worth a traceback.
            _log.info("%s was cut off by the end of the server", scope.get("path"))

    server = make_server(with_state, max_frame_bytes)

    async def end() -> None:
        await stop.wait()
        if context is not None:
            waiting: list[asyncio.Task[Any]] = [asyncio.create_task(context.service.drain(context.settings.drain_s))]
            if orphaned is not None:
                waiting.append(asyncio.create_task(orphaned.wait()))
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
        server.should_exit = True

    ender = asyncio.create_task(end(), name="end of the server")
    try:
        await server.serve(sockets=[listener])
    finally:
        ender.cancel()


async def _main(settings: WebSettings) -> None:
    loop, stop, orphaned = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    _watch_parent(loop, stop, orphaned)
    app = build_app(settings)
    fd = settings.listen_fd
    with bind(settings.serve.host, settings.serve.port) if fd is None else socket.socket(fileno=fd) as listener:
        await serve(app, listener, settings.serve.limits.max_frame_bytes, stop, orphaned)


def _watch_parent(loop: asyncio.AbstractEventLoop, stop: asyncio.Event, orphaned: asyncio.Event) -> None:
    """Stop at once when the pipe on standard input closes; any other standard input is left alone."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        with contextlib.suppress(RuntimeError):  # the loop has ended first
            loop.call_soon_threadsafe(orphaned.set)
            loop.call_soon_threadsafe(stop.set)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m chatserve.server.worker", description=__doc__)
    parser.add_argument("--settings", required=True, help="WebSettings as JSON, or @FILE")
    options = parser.parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format="%(asctime)s web %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    try:
        settings = decode_settings(options.settings, WebSettings)
    except (msgspec.MsgspecError, OSError) as error:
        sys.stderr.write(f"chatserve: the web worker's settings cannot be read: {error}\n")
        return 2
    try:
        asyncio.run(_main(settings))
    except StartupError as error:
        sys.stderr.write(f"chatserve: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
