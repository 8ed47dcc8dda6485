"""From the command to a ready page: the time that a person waits, on a machine where all is installed.

Starts the program as its users do, polls `/readyz` and the page, and ends it. Prints seconds for each run.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

_POLL_S: Final = 0.02
_TARGET_S: Final = 15.0
_TIMEOUT_S: Final = 120.0
_SCRIPT: Final = Path(__file__).resolve().parent.parent.parent / "scripts" / "serve"


def main(argv: list[str]) -> int:
    """Exit code 1 where the median misses the target."""
    parser = argparse.ArgumentParser(prog="chatserve bench startup", description=__doc__)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--keep-data", action="store_true", help="later runs find the conversations' store of the first"
    )
    parser.add_argument("serve", nargs="*", help="options for chatserve serve, after --")
    options = parser.parse_args(argv)
    command = [str(_SCRIPT)] if _SCRIPT.exists() else [sys.executable, "-P", "-m", "chatserve", "serve"]
    seconds = []
    with tempfile.TemporaryDirectory(prefix="chatserve-bench-") as made:
        for run in range(options.runs):
            data_dir = Path(made) / ("data" if options.keep_data else f"data{run}")
            seconds.append(_start_once([*command, "--data-dir", str(data_dir), *options.serve]))
            print(f"run {run + 1}: ready page after {seconds[-1]:.2f} s", flush=True)
    median = statistics.median(seconds)
    met = median < _TARGET_S
    print(f"median {median:.2f} s, target under {_TARGET_S:.0f} s: {'met' if met else 'missed'}")
    return int(not met)


def _start_once(command: list[str]) -> float:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = int(probe.getsockname()[1])
    started = time.perf_counter()
    with subprocess.Popen(  # noqa: S603 - our own script
        [*command, "--port", str(port)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "CHATSERVE_HOST": "127.0.0.1"},
    ) as process:
        try:
            while not (_status(port, "/readyz") == _status(port, "/") == http.HTTPStatus.OK):
                if process.poll() is not None:
                    raise RuntimeError(f"it ended with {process.returncode} before it was ready")
                if time.perf_counter() - started > _TIMEOUT_S:
                    raise TimeoutError(f"not ready after {_TIMEOUT_S:.0f} s")
                time.sleep(_POLL_S)
            return time.perf_counter() - started
        finally:
            process.send_signal(signal.SIGTERM)


def _status(port: int, path: str) -> int | None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
        connection.request("GET", path)
        return connection.getresponse().status
    return None
