"""What goes wrong in a chaos run, and when: a seeded stream of faults against real processes.

Each fault is a row of `Storm.kinds`. Processes are chosen from those that live at that moment. A process that the
supervisor would only start again after its long pause (three deaths within a minute) is left alone meanwhile: what is
being looked for is lost work, and a program that waits does none.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Final, NamedTuple

from chatserve.bench.chaos.program import Program, send

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from chatserve.bench.chaos.line import Line
    from chatserve.bench.chaos.own_store import OwnStore
    from chatserve.bench.chaos.tally import Tally

STORE_PAUSE_S: Final = 10.0
STOP_S: Final = 5.0
_MOST_DEATHS: Final = 2
_WINDOW_S: Final = 62.0
_START_S: Final = 600.0


class Fault(NamedTuple):
    """One that was done. Times are of `time.monotonic`."""

    kind: str
    began_s: float
    over_s: float
    """When what was taken away was given back; of a kill, when it was done."""


class Storm:
    """`blow` makes faults until it is told to `calm` down. Counts go to the tally. `store`: the one that the programs
    share; None where the only program has its own.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        store: OwnStore | None,
        lines: Sequence[Line],
        choose: random.Random,
        tally: Tally,
        *,
        every_s: float,
    ) -> None:
        self._store = store
        self._starting_store = asyncio.Lock()
        self._programs = programs
        self._lines = lines
        self._choose = choose
        self._tally = tally
        self._every_s = every_s
        self._calm = asyncio.Event()
        self._deaths: dict[tuple[int, str], list[float]] = defaultdict(list)
        self._starting = [asyncio.Lock() for _ in programs]
        self._stopped: set[int] = set()
        self._running: set[asyncio.Task[None]] = set()
        self.faults: list[Fault] = []
        # Each row: how often, and what does it to the program of that number. Done: when what was taken away was given
        # back, and of a kill, when it was done. None: it could not be done just now.
        kinds: dict[str, tuple[int, Callable[[int], Awaitable[float | None]]]] = {
            "kill engine": (5, lambda n: self._kill(n, "engine")),
            "kill web worker": (9, lambda n: self._kill(n, "web")),
            "kill store": (7, self._kill_store),
            "kill supervisor": (1, self._kill_supervisor),
            "kill everything": (1, self._kill_everything),
            "restart": (1, self._restart),
            "pause store": (2, lambda n: self._pause(n, "store", STORE_PAUSE_S)),
            "stop engine": (2, lambda n: self._pause(n, "engine", STOP_S)),
            "stop web worker": (2, lambda n: self._pause(n, "web", STOP_S)),
            "cut sockets": (4, self._cut),
        }
        self.kinds: Final = kinds

    async def blow(self) -> None:
        """Make faults, each after a random pause, some while others last."""
        names = list(self.kinds)
        weights = [weight for weight, _ in self.kinds.values()]
        while not self._calm.is_set():
            [kind] = self._choose.choices(names, weights)
            number = self._choose.randrange(len(self._programs))
            task = asyncio.create_task(self._make(kind, number), name=kind)
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            if self._choose.random() < 0.5:
                await task
            else:
                await asyncio.sleep(self._choose.random())
            await self._sleep(self._choose.expovariate(1 / self._every_s))
        await asyncio.gather(*self._running)

    def calm(self) -> None:
        """No new faults."""
        self._calm.set()

    def thaw(self) -> None:
        """Let go on whatever is still stopped; for the end of a run that failed."""
        for pid in self._stopped:
            send(pid, signal.SIGCONT)

    async def _make(self, kind: str, number: int) -> None:
        began = time.monotonic()
        _, make = self.kinds[kind]
        over = None if self._starting[number].locked() else await make(number)
        if over is not None:
            self._tally.faults[kind] += 1
            self.faults.append(Fault(kind, began, over))

    async def _sleep(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._calm.wait()
        except TimeoutError:
            pass

    async def _victim(self, number: int, kind: str) -> int | None:
        if kind == "store" and self._store is not None:
            return None if self._starting_store.locked() else self._store.pid
        living = await asyncio.to_thread(self._programs[number].processes)
        pids = sorted(found.pid for found in living if found.kind == kind)
        return self._choose.choice(pids) if pids else None

    async def _kill(self, number: int, kind: str) -> float | None:
        now = time.monotonic()
        deaths = self._deaths[number, kind]
        deaths[:] = [at for at in deaths if at > now - _WINDOW_S]
        if len(deaths) >= _MOST_DEATHS:
            return None
        pid = await self._victim(number, kind)
        if pid is None or not send(pid, signal.SIGKILL):
            return None
        deaths.append(now)
        self._tally.kills += 1
        return time.monotonic()

    async def _kill_store(self, number: int) -> float | None:
        if self._store is None:
            return await self._kill(number, "store")
        if self._starting_store.locked():
            return None
        async with self._starting_store:
            pid = self._store.pid
            if pid is None or not send(pid, signal.SIGKILL):
                return None
            killed = time.monotonic()
            self._tally.kills += 1
            await asyncio.to_thread(self._store.start_again)
        return killed

    async def _pause(self, number: int, kind: str, seconds: float) -> float | None:
        pid = await self._victim(number, kind)
        if pid is None or not send(pid, signal.SIGSTOP):
            return None
        self._stopped.add(pid)
        try:
            await asyncio.sleep(seconds)
        finally:
            self._stopped.discard(pid)
            send(pid, signal.SIGCONT)
        return time.monotonic()

    async def _cut(self, _number: int) -> float:
        for line in self._choose.sample(self._lines, max(1, len(self._lines) // 3)):
            line.cut()
        return time.monotonic()

    async def _kill_supervisor(self, number: int) -> float:
        async with self._starting[number]:
            await asyncio.to_thread(self._programs[number].kill_supervisor)
            killed = time.monotonic()
            self._tally.kills += 1
            await self._start(number)
        return killed

    async def _kill_everything(self, number: int) -> float:
        async with self._starting[number]:
            living = await asyncio.to_thread(self._programs[number].processes)
            await asyncio.to_thread(self._programs[number].kill_all)
            killed = time.monotonic()
            self._tally.kills += 1 + len(living)
            await self._start(number)
        return killed

    async def _restart(self, number: int) -> float:
        async with self._starting[number]:
            status = await asyncio.to_thread(self._programs[number].stop)
            ended = time.monotonic()
            if status != 0:
                raise RuntimeError(f"the program ended with {status} after SIGTERM")
            await self._start(number)
        return ended

    async def _start(self, number: int) -> None:
        """As a service manager does: again until it runs, for what was stopped may still hold the port."""
        program = self._programs[number]
        deadline = time.monotonic() + _START_S
        while True:
            self._forget_deaths(number)
            try:
                await asyncio.to_thread(program.start)
                return
            except (RuntimeError, TimeoutError):
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(1.0)

    def _forget_deaths(self, number: int) -> None:
        """A new supervisor counts anew."""
        for key in [key for key in self._deaths if key[0] == number]:
            del self._deaths[key]
