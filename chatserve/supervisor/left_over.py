"""Processes that are none of our children: what they are, and whether they have ended."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Final

_POLL_S: Final = 0.02


def command_line(pid: int) -> str:
    """What a process was started with; empty where there is none, or one that waits to be collected."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="surrogateescape")
    except OSError:
        if Path("/proc/self/cmdline").exists():
            return ""
    shown = subprocess.run(["ps", "-o", "command=", "-p", str(pid)], capture_output=True, text=True, check=False)  # noqa: S603, S607  fixed words and a number; where ps lies differs
    return shown.stdout


def wait_for_exit(pid: int, timeout_s: float) -> bool:
    """Whether a process that is none of our children ended in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if not command_line(pid):  # also of a zombie that its parent has not collected
            return True
        time.sleep(_POLL_S)
    return False
