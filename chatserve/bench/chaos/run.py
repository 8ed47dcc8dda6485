"""One chaos run from its first process to its last check."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from chatserve.bench.chaos import audit
from chatserve.bench.chaos.aftermath import Aftermath
from chatserve.bench.chaos.client import RequestFailedError
from chatserve.bench.chaos.line import Line
from chatserve.bench.chaos.mirror import Mirror, ProtocolViolationError
from chatserve.bench.chaos.own_store import OwnStore
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
    min_kills: int = 0
    """The storm goes on until so many processes were killed, however long that takes."""
    seed: int = 0
    num_users: int = 50
    every_s: float = 4.0
    """Between two faults, on average."""
    pause_s: float = 1.0
    """Between a user's actions, on average."""
    num_servers: int = 1
    """More than one share a store that belongs to none of them."""
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
        self.line = line
        self.turns: list[tuple[float, float]] = []
        """Begin and end of each, of `time.monotonic`."""
        self._hushed = False

    async def sing(self) -> None:
        """Until `hush`."""
        while not self._hushed:
            session = (await self.line.request("session.create", title="canary"))["session"]
            mirror = await self.line.open(session)
            for _ in range(_TURNS_A_SESSION):
                if self._hushed:
                    break
                await self._turn(session, mirror)
                await asyncio.sleep(0.1)
            self.line.gone.add(session)
            await self.line.request("session.delete", session=session)

    def hush(self) -> None:
        self._hushed = True

    def first_end_after(self, began_s: float) -> float | None:
        """When the first turn that began after `began_s` was answered."""
        return next((end for began, end in self.turns if began >= began_s), None)

    async def _turn(self, session: str, mirror: Mirror) -> None:
        began = time.monotonic()
        fields = {"session": session, "parent": None, "text": "ping", "params": {"max_tokens": 1, "temperature": 0}}
        reply = (await self.line.request("message.send", **fields))["reply"]
        await self.line.until(lambda: mirror.has_ended(reply), "the canary's answer")
        self.turns.append((began, time.monotonic()))


class ChaosRun:
    """`run` once."""

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._say = say
        self._tally = Tally()
        self._problems: list[str] = []
        tokens = plan.directory / "tokens"
        shared = plan.num_servers > 1
        self._store = OwnStore(plan.directory / "store") if shared else None
        options = {"redis_url": self._store.url} if self._store else {}
        self._programs = [
            Program(
                plan.directory / f"server{number}",
                model=plan.model,
                tokens_file=tokens,
                kv_cache_memory="512blocks",
                host_cache_memory="512blocks",
                threads=1,
                kv_snapshot=plan.directory / f"snapshot{number}",
                **options,
                **plan.options,
            )
            for number in range(plan.num_servers)
        ]
        urls = [program.ws_url for program in self._programs]
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
        self._canaries = [
            Canary(Line([url], add_token(tokens, f"canary{n}"), random.Random(f"{plan.seed} canary {n}"), self._tally))
            for n, url in enumerate(urls)
        ]

    async def run(self) -> Outcome:
        """The whole run."""
        started = time.monotonic()
        try:
            if self._store is not None:
                await asyncio.to_thread(self._store.start)
            for program in self._programs:
                self._say(f"starting {program.url} in {program.data_dir}")
                await asyncio.to_thread(program.start)
            await self._live_through_it()
            await Aftermath(self._programs, self._store, self._people, self._note).check()
        finally:
            for program in self._programs:
                if program.process is not None and program.process.poll() is None:
                    await asyncio.to_thread(program.kill_all)
            if self._store is not None:
                await asyncio.to_thread(self._store.stop)
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
        tabs = [line for person in self._people for line in person.lines]
        choose = random.Random(f"{plan.seed} storm")
        storm = Storm(self._programs, self._store, tabs, choose, self._tally, every_s=plan.every_s)
        lines = [*tabs, *(canary.line for canary in self._canaries)]
        runners = [asyncio.create_task(line.run()) for line in lines]
        songs = [asyncio.create_task(self._guarded("a canary", canary.sing())) for canary in self._canaries]
        lives = [asyncio.create_task(self._guarded(person.name, person.live())) for person in self._people]
        blowing = asyncio.create_task(storm.blow())
        reporting = asyncio.create_task(self._report(storm))
        try:
            await asyncio.wait([blowing], timeout=plan.minutes * 60)
            while self._tally.kills < plan.min_kills and not blowing.done():
                await asyncio.wait([blowing], timeout=0.5)
            storm.calm()
            await blowing
            for program in self._programs:
                await asyncio.to_thread(program.wait_ready)
            self._say("the storm is over")
            await asyncio.sleep(_CALM_S)
            for person in self._people:
                person.rest()
            for canary in self._canaries:
                canary.hush()
            await asyncio.gather(*lives, *songs)
            await asyncio.gather(*(self._guarded(person.name, person.settle()) for person in self._people))
            for person in self._people:
                url = choose.choice(self._programs).ws_url
                await self._guarded(person.name, audit.check_person(person, url, self._tally))
        finally:
            storm.thaw()
            reporting.cancel()
            for line in lines:
                await line.close()
            tasks = [*runners, *lives, *songs, blowing]
            for task in tasks:
                task.cancel()
            for result in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(result, Exception):
                    self._note(f"the run itself failed: {result!r}")
        self._measure(storm)

    def _measure(self, storm: Storm) -> None:
        """Until every server has answered a turn that was begun after the fault."""
        for fault in storm.faults:
            ends = [canary.first_end_after(fault.began_s) for canary in self._canaries]
            if None not in ends:
                took = max(end for end in ends if end is not None) - fault.over_s
                self._tally.recoveries_s[fault.kind].append(max(0.0, took))

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
