"""When the storm is over and every user is content: what is left over, and whether all survives an orderly restart."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

from chatserve.bench.chaos import audit
from chatserve.bench.chaos.client import RequestFailedError
from chatserve.bench.chaos.line import Line
from chatserve.bench.chaos.mirror import ProtocolViolationError
from chatserve.bench.chaos.tally import Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from chatserve.bench.chaos.own_store import OwnStore
    from chatserve.bench.chaos.person import Person
    from chatserve.bench.chaos.program import Program


class Aftermath:
    """`note` is told of everything that is wrong. Every client has left. `store`: the one that the programs share."""

    def __init__(
        self,
        programs: Sequence[Program],
        store: OwnStore | None,
        people: Sequence[Person],
        note: Callable[[str], None],
    ) -> None:
        self._programs = programs
        self._store = store
        self._people = people
        self._note = note

    async def check(self) -> None:
        """Look at everything, restart in order, and look for every message again. Nothing runs afterwards."""
        tasks = await self._check_left_over()
        await self._end_in_order()
        for program, count in zip(self._programs, tasks, strict=True):
            await asyncio.to_thread(program.start)
            fresh = await asyncio.to_thread(program.metric, "chatserve_tasks")
            if count > fresh:
                self._note(f"{count:g} tasks were left in a web worker, and a new one has {fresh:g}")
        for person in self._people:
            try:
                await self._check_again(person)
            except (ProtocolViolationError, RequestFailedError) as error:
                self._note(f"after a restart, {person.name}: {error}")
        await self._end_in_order()
        if self._store is not None:
            self._note_all(await audit.check_store(self._store.url, self._people, 0))
        for program in self._programs:
            self._note_all(audit.check_log(program))

    async def _check_left_over(self) -> list[float]:
        """The number of tasks in a web worker of each program."""
        living = []
        for program in self._programs:
            self._note_all(await audit.check_idle(program))
            living += await asyncio.to_thread(program.processes)
        url = self._store.url if self._store else f"unix://{self._programs[0].data_dir / 'run' / 'store.sock'}"
        num_workers = sum(found.kind == "web" for found in living)
        self._note_all(await audit.check_store(url, self._people, num_workers))
        return [await asyncio.to_thread(program.metric, "chatserve_tasks") for program in self._programs]

    async def _check_again(self, person: Person) -> None:
        """Over a new line that knows what the old one saw."""
        tally, url = Tally(), self._programs[0].ws_url
        line = Line([url], person.token, random.Random(0), tally)
        line.mirrors, line.gone = person.line.mirrors, person.line.gone
        person.line = line
        runner = asyncio.create_task(line.run())
        try:
            await audit.check_person(person, url, tally)
        finally:
            await line.close()
            await runner

    async def _end_in_order(self) -> None:
        for program in self._programs:
            started = await asyncio.to_thread(program.processes)
            status = await asyncio.to_thread(program.stop)
            if status != 0:
                self._note(f"the program ended with {status} after SIGTERM")
            self._note_all(audit.check_ended(started))

    def _note_all(self, problems: Iterable[str]) -> None:
        for problem in problems:
            self._note(problem)
