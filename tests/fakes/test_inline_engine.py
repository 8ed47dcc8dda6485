"""The inline client keeps the real one's promises."""

from __future__ import annotations

import asyncio

import pytest

from chatserve.engine.messages import EngineDown, Hello, StepOutput
from chatserve.errors import EngineUnavailableError
from tests.fakes.engines import Transcript, make_engine, make_submit
from tests.fakes.fake_runner import FakeRunner
from tests.fakes.inline_engine import InlineEngineClient


async def test_it_runs_requests_and_survives_a_death_as_the_real_client_does() -> None:
    client = InlineEngineClient(make_engine(FakeRunner()))
    await client.connect()
    events = client.events()
    assert isinstance(await anext(events), Hello)
    client.submit(make_submit("a", range(20)))
    transcript = Transcript()
    while "a" not in transcript.finished:
        event = await anext(events)
        assert isinstance(event, StepOutput)
        transcript.add(event)
    assert (await client.inspect()).running == 0
    client.kill()
    for expected in (EngineDown, Hello):
        with pytest.raises(EngineUnavailableError):
            client.submit(make_submit("b", range(20)))
        if expected is Hello:
            client.revive(make_engine(FakeRunner()))
        assert isinstance(await anext(events), expected)
    client.submit(make_submit("b", range(20)))
    while "b" not in transcript.finished:
        event = await anext(events)
        assert isinstance(event, StepOutput)
        transcript.add(event)
    assert transcript.text("a") == transcript.text("b")
    await client.close()
    assert [event async for event in events] == []


async def test_a_paused_engine_takes_commands_and_makes_no_step() -> None:
    engine = make_engine(FakeRunner())
    client = InlineEngineClient(engine)
    await client.connect()
    client.pause()
    client.submit(make_submit("a", range(20)))
    for _ in range(10):
        await asyncio.sleep(0)
    assert (await client.inspect()).waiting == 1
    client.resume()
    await client.drain()
    assert engine.is_drained
    await client.close()
