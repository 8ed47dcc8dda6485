"""The engine's process: `python -m chatserve.engine.process --settings JSON` (an `EngineSettings`).

Owns start and end: the socket, the model, signals, exit codes. Writes log lines to stderr, and one when it is ready.
Exits when a pipe on stdin closes, because then its parent is gone; any other stdin is left alone.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import stat
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from chatserve.config import EngineSettings, decode_settings
from chatserve.engine.build import SizedRunner, build_engine
from chatserve.engine.garbage import IdleCollector
from chatserve.engine.orphan import ends_with_parent
from chatserve.engine.server import EngineServer
from chatserve.errors import StartupError
from chatserve.options import check_options

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_log: Final = logging.getLogger("chatserve.engine")

_LEFT_OVER_S: Final = 10.0
_POLL_S: Final = 0.05
_MAX_SOCKET_PATH_BYTES: Final = 107
"""`sun_path` of the kernel, less its end."""
EXIT_STARTUP: Final = 1
EXIT_BROKEN: Final = 70
"""The runner cannot go on; the parent starts a new process."""


def listen(path: Path, patience_s: float = _LEFT_OVER_S) -> socket.socket:
    """A listening Unix socket that only its owner can reach: mode 0600, in a directory of mode 0700.

    A directory that is wider is narrowed, where it is ours alone; a socket left by a dead process is replaced, and one
    that lives is given `patience_s` to end.

    Raises:
        StartupError: the path is too long, is not ours, or is served by a process that goes on living.
    """
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH_BYTES:
        raise StartupError(
            f"the engine's socket path is longer than the {_MAX_SOCKET_PATH_BYTES} bytes that the system allows: "
            f"{path}; choose a shorter data directory"
        )
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_private(path.parent)
        _remove_stale(path, patience_s)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(os.fspath(path))
            path.chmod(0o600)
            listener.listen(64)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise StartupError(f"the engine cannot listen on {path}: {error.strerror or error}") from error
    return listener


def _make_private(directory: Path) -> None:
    found = directory.stat()
    if stat.S_IMODE(found.st_mode) & 0o077 == 0:
        return
    if found.st_uid != os.getuid() or found.st_mode & stat.S_ISVTX:
        raise StartupError(f"{directory} is open to other users, and the engine's socket may not lie there")
    directory.chmod(0o700)


def _remove_stale(path: Path, patience_s: float) -> None:
    """Replace what a dead process left. One that lives is on its way out: its supervisor was killed, for there is one
    at a time.
    """
    deadline = time.monotonic() + patience_s
    while path.exists():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(os.fspath(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
                return
            except FileNotFoundError:
                return
        if time.monotonic() >= deadline:
            raise StartupError(f"another engine is listening on {path}")
        time.sleep(_POLL_S)


def serve(settings: EngineSettings, build_runner: Callable[[EngineSettings], SizedRunner]) -> int:
    """Load, listen, run until told to stop; the exit code. Errors at the start are one line on stderr."""
    try:
        check_options(settings)
        # Clients may connect while the model loads; they are greeted when it is there.
        listener = listen(settings.socket_path)
    except StartupError as error:
        _log.error("%s", error)
        return EXIT_STARTUP
    try:
        pipe = _parent_pipe()
        with ends_with_parent(pipe):
            engine = build_engine(settings, build_runner(settings))
        server = EngineServer(engine, listener, parent_fd=pipe, on_idle=IdleCollector().collect)
        server.stop_on_signals()
        info = engine.info
        _log.info(
            "ready: %s on %s, context %d tokens, epoch %s, socket %s",
            *(info.model, info.device, info.context_tokens, info.epoch, settings.socket_path),
        )
        server.run()
        if server.was_stopped:
            engine.save_snapshot()
    except StartupError as error:
        _log.error("%s", error)
        return EXIT_STARTUP
    except Exception:  # noqa: BLE001 - logged with its traceback; whatever it is, this process ends
        _log.exception("the engine cannot go on")
        return EXIT_BROKEN
    finally:
        listener.close()
        settings.socket_path.unlink(missing_ok=True)
    return 0


def _parent_pipe() -> int | None:
    """Stdin's descriptor, if it is a pipe or a socket, as a parent that wants to be missed hands it over."""
    try:
        mode = os.fstat(0).st_mode
    except OSError:
        return None
    return 0 if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) else None


def read_settings(arguments: Sequence[str] | None = None) -> EngineSettings:
    """The settings from the command line; exits with a usage line where they are not valid."""
    parser = argparse.ArgumentParser(prog="chatserve.engine.process", description="The inference engine of ChatServe.")
    parser.add_argument("--settings", required=True, help="EngineSettings as JSON, or @FILE")
    given = parser.parse_args(arguments).settings
    try:
        return decode_settings(given, EngineSettings)
    except (msgspec.MsgspecError, OSError) as error:
        parser.error(f"--settings: {error}")


def start_logging() -> None:
    """Log lines go to stderr."""
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s engine %(levelname)s %(message)s")


def main() -> int:
    """Entry of the process."""
    settings = read_settings()
    start_logging()
    with ends_with_parent(_parent_pipe()):
        from chatserve.model.runner import build_runner  # noqa: PLC0415 - torch is loaded here and nowhere above

    return serve(settings, build_runner)


if __name__ == "__main__":
    sys.exit(main())
