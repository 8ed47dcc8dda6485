"""Child processes: spawned, tied to us by a pipe, and ended within a bounded time.

Owns one process a `Child`, and the rule by which a dead one is started again. Knows nothing of what the children do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec

_PYTHON: Final = (sys.executable, "-P", "-m")
"""-P: a file in the working directory must not stand in for a module of ours."""


class Commands(msgspec.Struct, frozen=True, kw_only=True):
    """What is run for each child; tests put fakes here."""

    engine: tuple[str, ...] = (*_PYTHON, "chatserve.engine.process")
    web: tuple[str, ...] = (*_PYTHON, "chatserve.server.worker")
    model: tuple[str, ...] = (*_PYTHON, "chatserve", "model", "pull")


class Child:
    """A process that ends when we do.

    It holds the reading end of a pipe as its standard input and exits at end of file, so nothing outlives a supervisor,
    not even one killed by SIGKILL. It has a process group of its own, so a Ctrl-C in the terminal reaches the
    supervisor alone and the order of an orderly end is ours.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._process = process

    @classmethod
    async def spawn(cls, name: str, command: Sequence[str], pass_fds: Sequence[int] = ()) -> Child:
        """Start it; of our open files it gets `pass_fds` alone."""
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.PIPE, process_group=0, pass_fds=tuple(pass_fds)
        )
        return cls(name, process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """Negative: the signal that ended it. None: it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    async def stop(self, timeout_s: float) -> None:
        """Ask it to end, and after `timeout_s` end it, with whatever it has in its process group. Its pipe stays open:
        that we are there tells it that it may take its time.
        """
        if self.exit_code is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)


async def pause(stopping: asyncio.Event, delay_s: float) -> None:
    """Wait, but no longer than until asked to stop."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(delay_s):
            await stopping.wait()


def describe_exit(exit_code: int) -> str:
    """For a person: `exit code 3`, or `signal SIGKILL`."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"signal {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"signal {-exit_code}"


class RestartPolicy:
    """When a child that died is started again: soon at first, twice as late each time, and slowly once it has died
    `deaths` times within `window_s`. A pure function of the times of death.
    """

    def __init__(
        self, *, deaths: int = 3, window_s: float = 60.0, first_delay_s: float = 0.25, slow_delay_s: float = 30.0
    ) -> None:
        self.deaths = deaths
        self.window_s = window_s
        self._first_delay_s = first_delay_s
        self._slow_delay_s = slow_delay_s
        self._recent: deque[float] = deque()

    def died(self, now: float) -> float:
        """Note a death; seconds to wait before the next start."""
        self._recent.append(now)
        while self._recent[0] <= now - self.window_s:
            self._recent.popleft()
        if self.failing:
            return self._slow_delay_s
        return min(self._slow_delay_s, self._first_delay_s * 2.0 ** (len(self._recent) - 1))

    @property
    def failing(self) -> bool:
        """It keeps dying: at the last death there were `deaths` within the window."""
        return len(self._recent) >= self.deaths
