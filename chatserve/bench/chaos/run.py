"""One chaos run from its first process to its last check."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from chatserve.bench.chaos import audit
from chatserve.bench.chaos.client import RequestFailedError
from chatserve.bench.chaos.line import Line
from chatserve.bench.chaos.mirror import Mirror, ProtocolViolationError
from chatserve.bench.chaos.person import Person
from chatserve.bench.chaos.program import Program
from chatserve.bench.chaos.storm import Storm
from chatserve.bench.chaos.tally import Tally
from chatserve.server.auth import add_token

if TYPE_CHECKING:
    from collections.abc import Callable

_TURNS_A_SESSION: Final = 100
_LONG_WAIT_S: Final = 20.0
_CALM_S: Final = 3.0
"""How long people go on after the last fault, so that its damage can show."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a run is made of."""

    directory: Path
    """Empty; data, logs and tokens go there."""
    model: str
    minutes: float = 2.0
    min_faults: int = 0
    """The storm goes on until so many were done, however long that takes."""
    seed: int = 0
    num_users: int = 50
    every_s: float = 4.0
    """Between two faults, on average."""
    pause_s: float = 1.0
    """Between a user's actions, on average."""
    options: dict[str, Any] = {}
    """More options for `chatserve serve`."""


class Outcome(msgspec.Struct, frozen=True):
    problems: list[str]
    """Broken promises; a run is clean without any."""
    tally: Tally
    seconds: float


class Canary:
    """One turn after another, for ever: how long until the program works again is how long until one is answered."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self.turns: list[tuple[float, float]] = []
        """Begin and end of each, of `time.monotonic`."""
        self._hushed = False

    async def sing(self) -> None:
        """Until `hush`."""
        while not self._hushed:
            session = (await self._line.request("session.create", title="canary"))["session"]
            mirror = await self._line.open(session)
            for _ in range(_TURNS_A_SESSION):
                if self._hushed:
                    break
                await self._turn(session, mirror)
                await asyncio.sleep(0.1)
            self._line.gone.add(session)
            await self._line.request("session.delete", session=session)

    def hush(self) -> None:
        self._hushed = True

    async def _turn(self, session: str, mirror: Mirror) -> None:
        began = time.monotonic()
        fields = {"session": session, "parent": None, "text": "ping", "params": {"max_tokens": 1}}
        reply = (await self._line.request("message.send", **fields))["reply"]
        await self._line.until(lambda: mirror.has_ended(reply), "the canary's answer")
        self.turns.append((began, time.monotonic()))


class ChaosRun:
    """`run` once."""

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._say = say
        self._tally = Tally()
        self._problems: list[str] = []
        tokens = plan.directory / "tokens"
        self._program = Program(
            plan.directory / "data",
            model=plan.model,
            tokens_file=tokens,
            kv_cache_memory="512blocks",
            host_cache_memory="512blocks",
            threads=1,
            **plan.options,
        )
        urls = [self._program.ws_url]
        self._people = [
            Person(
                f"user{number}",
                add_token(tokens, f"user{number}"),
                urls,
                f"{plan.seed} {number}",
                self._tally,
                pause_s=plan.pause_s,
                watches=number % 2 == 0,
            )
            for number in range(plan.num_users)
        ]
        self._canary_line = Line(urls, add_token(tokens, "canary"), random.Random(f"{plan.seed} canary"), self._tally)

    async def run(self) -> Outcome:
        """The whole run."""
        started = time.monotonic()
        self._say(f"starting {self._program.url} in {self._plan.directory}")
        await asyncio.to_thread(self._program.start)
        try:
            await self._live_through_it()
            await self._check_end()
        finally:
            if self._program.process is not None and self._program.process.poll() is None:
                await asyncio.to_thread(self._program.kill_all)
        return Outcome(self._problems, self._tally, time.monotonic() - started)

    def _note(self, problem: str) -> None:
        self._problems.append(problem)
        self._say(f"FAULT: {problem}")

    async def _guarded(self, who: str, work: Any) -> None:
        """Let one user's trouble be his own."""
        try:
            await work
        except (ProtocolViolationError, RequestFailedError) as error:
            self._note(f"{who}: {error}")

    # --- the storm ----------------------------------------------------------------------------------------------------

    async def _live_through_it(self) -> None:
        plan = self._plan
        lines = [line for person in self._people for line in person.lines]
        canary = Canary(self._canary_line)
        storm = Storm([self._program], lines, random.Random(f"{plan.seed} storm"), self._tally, every_s=plan.every_s)
        runners = [asyncio.create_task(line.run()) for line in (*lines, self._canary_line)]
        singing = asyncio.create_task(self._guarded("the canary", canary.sing()))
        lives = [asyncio.create_task(self._guarded(person.name, person.live())) for person in self._people]
        blowing = asyncio.create_task(storm.blow())
        reporting = asyncio.create_task(self._report(storm))
        try:
            await asyncio.wait([blowing], timeout=plan.minutes * 60)
            while len(storm.faults) < plan.min_faults and not blowing.done():
                await asyncio.wait([blowing], timeout=0.5)
            storm.calm()
            await blowing
            await asyncio.to_thread(self._program.wait_ready)
            self._say("the storm is over")
            await asyncio.sleep(_CALM_S)
            for person in self._people:
                person.rest()
            canary.hush()
            await asyncio.gather(*lives, singing)
            await asyncio.gather(*(self._guarded(person.name, person.settle()) for person in self._people))
            for person in self._people:
                await self._guarded(person.name, audit.check_person(person, self._program.ws_url, self._tally))
        finally:
            storm.thaw()
            reporting.cancel()
            for line in (*lines, self._canary_line):
                await line.close()
            for task in (*runners, *lives, singing, blowing):
                task.cancel()
            for result in await asyncio.gather(*runners, *lives, singing, blowing, return_exceptions=True):
                if isinstance(result, Exception):
                    self._note(f"the run itself failed: {result!r}")
        self._measure(storm, canary)

    def _measure(self, storm: Storm, canary: Canary) -> None:
        for fault in storm.faults:
            ends = [end for began, end in canary.turns if began >= fault.began_s]
            if ends:
                self._tally.recoveries_s[fault.kind].append(max(0.0, ends[0] - fault.over_s))

    async def _report(self, storm: Storm) -> None:
        while True:
            await asyncio.sleep(15)
            tally = self._tally
            self._say(
                f"{len(storm.faults)} faults, {tally.kills} kills, {tally.requests.total()} requests answered, "
                f"{tally.resent} sent again, {len(tally.reconnects_s)} reconnects, {len(self._problems)} problems"
            )
            self._say_waits()

    def _say_waits(self) -> None:
        """Who has waited long, and for what."""
        now = time.monotonic()
        lines = [(person.name, line) for person in self._people for line in person.lines]
        waits = [(now - since, name, what) for name, line in lines for what, since in line.waits.items()]
        for age_s, name, what in sorted(waits, reverse=True)[:2]:
            if age_s > _LONG_WAIT_S:
                self._say(f"{name} has waited {age_s:.0f} s for {what}")

    # --- after it -----------------------------------------------------------------------------------------------------

    async def _check_end(self) -> None:
        """What is left over, and whether all is still there after an orderly restart."""
        program = self._program
        for problem in await audit.check_idle(program):
            self._note(problem)
        store_url = f"unix://{program.data_dir / 'run' / 'store.sock'}"
        for problem in await audit.check_store(store_url, [*self._people]):
            self._note(problem)
        tasks = await asyncio.to_thread(program.metric, "chatserve_tasks")
        await self._end_in_order()
        await asyncio.to_thread(program.start)
        fresh = await asyncio.to_thread(program.metric, "chatserve_tasks")
        if tasks > fresh:
            self._note(f"{tasks:g} tasks were left in the web worker, and a new one has {fresh:g}")
        for person in self._people:
            await self._guarded(person.name, self._check_again(person))
        await self._end_in_order()
        for problem in audit.check_log(program):
            self._note(problem)

    async def _check_again(self, person: Person) -> None:
        """The same once more, over a new line that knows what the old one saw."""
        tally = Tally()
        line = Line([self._program.ws_url], person.token, random.Random(0), tally)
        line.mirrors, line.gone = person.line.mirrors, person.line.gone
        person.line = line
        runner = asyncio.create_task(line.run())
        try:
            await audit.check_person(person, self._program.ws_url, tally)
        finally:
            await line.close()
            await runner

    async def _end_in_order(self) -> None:
        started = await asyncio.to_thread(self._program.processes)
        status = await asyncio.to_thread(self._program.stop)
        if status != 0:
            self._note(f"the program ended with {status} after SIGTERM")
        for problem in audit.check_ended(started):
            self._note(problem)
