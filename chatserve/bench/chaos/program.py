"""The whole program as its users run it: `chatserve serve` in a process of its own, on a port and data of its own.

Owns that process and knows its children by what they run, so that one of them can be killed or stopped. Synchronous;
call it from a thread where something else must go on.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

START_TIMEOUT_S: Final = 180.0
STOP_TIMEOUT_S: Final = 45.0
_POLL_S: Final = 0.05
_KINDS: Final = {
    "chatserve.engine.process": "engine",
    "chatserve.server.worker": "web",
    "valkey-server": "store",
    "redis-server": "store",
}


class ProcessInfo(NamedTuple):
    kind: str
    """engine, web or store."""
    pid: int


def free_port() -> int:
    """A port of 127.0.0.1 that nobody has just now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


class Program:
    """One `chatserve serve`; `options` are its command line's. Its output goes to `log_path`."""

    def __init__(self, data_dir: Path, **options: Any) -> None:
        self.data_dir = data_dir
        self.port: int = options.pop("port", None) or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.ws_url = f"ws://127.0.0.1:{self.port}/ws"
        self.options = {"data_dir": data_dir, "port": self.port, **options}
        self.log_path = data_dir.parent / f"{data_dir.name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    # --- life ---------------------------------------------------------------------------------------------------------

    def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start it and wait until it is ready.

        Raises:
            RuntimeError: it ended instead; the message has the end of its log.
            TimeoutError: it is not ready in time.
        """
        self.spawn()
        try:
            self.wait_ready(timeout_s)
        except BaseException:
            self.kill_all()  # nobody else knows of it
            raise

    def spawn(self) -> None:
        """Start it."""
        options = [f"--{name.replace('_', '-')}={value}" for name, value in self.options.items()]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CHATSERVE_")}
        if cache_dir := os.environ.get("CHATSERVE_CACHE_DIR"):
            environment["CHATSERVE_CACHE_DIR"] = cache_dir
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self.process = subprocess.Popen(  # noqa: S603 - our own program
                [sys.executable, "-m", "chatserve", "serve", *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """See `start`."""
        assert self.process is not None
        deadline = time.monotonic() + timeout_s
        pause = threading.Event()
        while time.monotonic() < deadline:
            if (status := self.process.poll()) is not None:
                raise RuntimeError(f"the program ended with {status}:\n{self.log()[-4000:]}")
            # What answers may be left over from a run before, on its way out.
            if self._has_announced() and self.is_ready():
                return
            pause.wait(_POLL_S)
        raise TimeoutError(f"not ready after {timeout_s:g} s:\n{self.log()[-4000:]}")

    def _has_announced(self) -> bool:
        """It has said that it is ready, since it was started."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            return b"ChatServe is ready at" in log.read()

    def is_ready(self) -> bool:
        try:
            return self.get("/readyz")[0] == http.HTTPStatus.OK
        except OSError:
            return False

    def stop(self) -> int:
        """SIGTERM, and the exit status.

        Raises:
            subprocess.TimeoutExpired: it does not end.
        """
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_TIMEOUT_S)

    def kill(self, kind: str) -> None:
        """SIGKILL one process of a kind."""
        send(next(found.pid for found in self.processes() if found.kind == kind), signal.SIGKILL)

    def kill_supervisor(self) -> None:
        """SIGKILL the supervisor alone."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def kill_all(self) -> None:
        """SIGKILL the supervisor and all that it started, as when the machine dies."""
        started = self.processes()
        self.kill_supervisor()
        for _, pid in started:
            send(pid, signal.SIGKILL)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            try:
                self.stop()
            finally:
                self.process.kill()

    # --- looking at it ------------------------------------------------------------------------------------------------

    def processes(self) -> list[ProcessInfo]:
        """What the supervisor has started and what lives."""
        if self.process is None or self.process.poll() is not None:
            return []
        listed = subprocess.run(
            ["ps", "-A", "-ww", "-o", "pid=,ppid=,stat=,command="],  # noqa: S607 - where ps lies differs
            capture_output=True,
            text=True,
            check=True,
        )
        found = []
        for line in listed.stdout.splitlines():
            pid, parent, state, command = (*line.split(maxsplit=3), "")[:4]
            if int(parent) == self.process.pid and not state.startswith("Z"):
                found += [ProcessInfo(kind, int(pid)) for mark, kind in _KINDS.items() if mark in command][:1]
        return found

    def log(self) -> str:
        """All that it has printed."""
        return self.log_path.read_text(errors="replace")

    def get(self, path: str, headers: dict[str, str] | None = None, timeout_s: float = 10.0) -> tuple[int, bytes]:
        """Status and body of a request to any of its web workers.

        Raises:
            OSError: nobody answers.
        """
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        with contextlib.closing(connection):
            try:
                connection.request("GET", path, headers=headers or {})
                answer = connection.getresponse()
                return answer.status, answer.read()
            except http.client.HTTPException as error:
                raise ConnectionResetError(f"cut off in the answer to {path}") from error

    def json(self, path: str, headers: dict[str, str] | None = None) -> Any:
        """Raises:
        RuntimeError: the status is not 200.
        """
        status, body = self.get(path, headers)
        if status != http.HTTPStatus.OK:
            raise RuntimeError(f"{path} answered {status}: {body[:500]!r}")
        return json.loads(body)

    def metric(self, name: str) -> float:
        """A metric without labels, or with exactly those written in `name`.

        Raises:
            LookupError: there is no such metric.
        """
        _, body = self.get("/metrics")
        found = re.search(rf"^{re.escape(name)} (\S+)$", body.decode(), re.MULTILINE)
        if found is None:
            raise LookupError(f"{name} is not among the metrics")
        return float(found[1])


def send(pid: int, number: signal.Signals) -> bool:
    """Send a signal; False where the process is gone."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
