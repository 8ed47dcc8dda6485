"""An engine that stands still with its socket open is noticed, and so is its coming back."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from chatserve.chat.engine_watch import EngineWatch
from chatserve.errors import EngineUnavailableError
from tests.chat.harness import Encoders, Harness


class Link:
    """As much of an `EngineLink` as is watched, with an engine that answers when it is let."""

    def __init__(self) -> None:
        self.num_heard = 0
        self.engine = SimpleNamespace(info="connected", inspect=self._inspect)
        self.answers = asyncio.Event()
        self.num_asked = 0
        self.is_gone = False

    async def _inspect(self) -> None:
        self.num_asked += 1
        await self.answers.wait()
        if self.is_gone:
            raise EngineUnavailableError("gone")


@pytest.fixture
def link() -> Link:
    return Link()


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def ticks(watch: EngineWatch, count: int) -> None:
    for _ in range(count):
        watch.tick()
        await turns()


async def test_silence_is_told_once_and_so_is_its_end(link: Link) -> None:
    told: list[bool] = []
    watch = EngineWatch(link, silence_s=10.0, on_change=lambda: told.append(watch.is_silent))
    await ticks(watch, 9)
    assert told == []
    assert link.num_asked == 1, "one question is enough"
    await ticks(watch, 30)
    assert told == [True]
    link.answers.set()
    await turns()
    await ticks(watch, 2)
    assert told == [True, False]


async def test_whoever_speaks_is_not_asked(link: Link) -> None:
    watch = EngineWatch(link, silence_s=10.0, on_change=lambda: pytest.fail("it is not silent"))
    for _ in range(50):
        link.num_heard += 1
        await ticks(watch, 1)
    assert link.num_asked == 0


async def test_an_idle_engine_that_answers_is_not_silent(link: Link) -> None:
    link.answers.set()
    watch = EngineWatch(link, silence_s=10.0, on_change=lambda: pytest.fail("it is not silent"))
    await ticks(watch, 50)


async def test_a_question_that_dies_with_its_engine_is_no_sign_of_life(link: Link) -> None:
    told: list[bool] = []
    watch = EngineWatch(link, silence_s=10.0, on_change=lambda: told.append(watch.is_silent))
    await ticks(watch, 20)
    link.is_gone, link.engine.info = True, None
    link.answers.set()
    await ticks(watch, 20)
    assert told == [True], "whether it is back is said by the next engine"
    link.engine.info = "connected"
    link.num_heard += 1
    await ticks(watch, 1)
    assert told == [True, False]


async def test_clients_are_told_of_a_silent_engine_and_its_answer_goes_on(encoders: Encoders) -> None:
    async with Harness(encoders["chatml"], engine_silence_s=0.1) as harness:
        session = await harness.create()
        _, reply = await harness.say(session, "on", max_tokens=500)
        await harness.writing(session, reply, 5)
        harness.client.hang()
        await harness.until(lambda: harness.health == [("engine", False)])
        assert harness.service.engine_is_silent
        harness.client.unhang()
        await harness.until(lambda: harness.health == [("engine", False), ("engine", True)])
        assert (await harness.ended(session, reply)).reason == "length"


async def test_an_engine_that_is_killed_while_silent_is_away_until_the_next_one(encoders: Encoders) -> None:
    async with Harness(encoders["chatml"], engine_silence_s=0.1) as harness:
        harness.client.hang()
        await harness.until(lambda: harness.health == [("engine", False)])
        harness.client.kill()
        await harness.until(lambda: harness.client.info is None)
        harness.client.unhang()
        harness.client.revive(harness.make_engine())
        await harness.until(lambda: harness.health == [("engine", False), ("engine", True)])
        session = await harness.create()
        await harness.turn(session, "it works", max_tokens=2)
