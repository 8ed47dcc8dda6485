"""Runs the whole program as its users do: `chatserve serve` in a process of its own, on a port and a data directory of
its own, with a tiny random model that has the default model's tokenizer."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any, Self

START_TIMEOUT_S = 60


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """A running `chatserve serve`."""

    def __init__(self, data_dir: Path, model: Path, **options: Any) -> None:
        self.data_dir = data_dir
        self.port = options.pop("port", None) or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.ws_url = f"ws://127.0.0.1:{self.port}/ws"
        self.options = {"model": model, "data_dir": data_dir, "port": self.port, **options}
        self.log_path = data_dir.parent / f"{data_dir.name}.log"
        self.process: subprocess.Popen[str] | None = None

    def command(self) -> list[str]:
        options = [f"--{name.replace('_', '-')}={value}" for name, value in self.options.items()]
        return [sys.executable, "-m", "chatserve", "serve", *options]

    def start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("CHATSERVE_")}
        environment["CHATSERVE_CACHE_DIR"] = os.environ.get("CHATSERVE_CACHE_DIR", "")
        environment = {name: value for name, value in environment.items() if value}
        with self.log_path.open("a") as log:
            self.process = subprocess.Popen(
                self.command(), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
            )
        self.wait_ready()

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        deadline = time.monotonic() + timeout_s
        pause = threading.Event()
        while time.monotonic() < deadline:
            assert self.process is not None
            assert self.process.poll() is None, f"the server exited with {self.process.returncode}:\n{self.log()}"
            with contextlib.suppress(OSError):
                if self.get("/readyz")[0] == 200:
                    return
            pause.wait(0.05)
        raise TimeoutError(f"not ready after {timeout_s} s:\n{self.log()}")

    def log(self) -> str:
        return self.log_path.read_text()[-4000:]

    def get(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
        request = urllib.request.Request(self.url + path, headers=headers or {})
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                return answer.status, answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def json(self, path: str) -> Any:
        status, body = self.get(path)
        assert status == 200, body
        return json.loads(body)

    def metric(self, name: str) -> float:
        """The value of a metric without labels, or with exactly those written in `name`."""
        _, body = self.get("/metrics")
        found = re.search(rf"^{re.escape(name)} (\S+)$", body.decode(), re.MULTILINE)
        assert found, f"{name} is not among the metrics"
        return float(found[1])

    def children(self) -> dict[str, int]:
        """Process ids of the program's own processes by what they are: engine, web, store."""
        assert self.process is not None
        found: dict[str, int] = {}
        kinds = {"chatserve.engine.process": "engine", "chatserve.server.worker": "web", "valkey": "store"}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                status = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                if int(status[1]) != self.process.pid or status[0] == "Z":
                    continue
                command = (entry / "cmdline").read_bytes().decode()
                found.update({kind: int(entry.name) for mark, kind in kinds.items() if mark in command})
        return found

    def kill(self, child: str) -> None:
        os.kill(self.children()[child], signal.SIGKILL)

    def kill_all(self) -> None:
        """SIGKILL the program and all that it started."""
        children = self.children()
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        for pid in children.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=40)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            try:
                self.stop()
            finally:
                self.process.kill()
