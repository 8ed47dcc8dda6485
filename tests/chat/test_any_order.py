"""Whatever clients ask in whatever order, at once, with stops, deaths and a store that fails now and then: what events
told, what a snapshot shows and what the store holds are one and the same, and every generation ends once.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from chatserve.errors import ChatError
from chatserve.types import SessionId
from tests.chat.bad_stores import FlakyStore
from tests.chat.harness import ANN, Encoders, Harness, Talkative, view_of
from tests.fakes.memory_store import MemoryStore


class Clients:
    """Several clients of one session that choose at random."""

    def __init__(self, harness: Harness, seed: int) -> None:
        self.harness = harness
        self.choose = random.Random(seed)
        self.refusals: list[str] = []
        self.forks: list[SessionId] = []

    async def run(self, session: SessionId, num_requests: int) -> None:
        for _ in range(num_requests):
            try:
                await self.request(session)
            except ChatError as error:
                self.refusals.append(error.code)
            for _ in range(self.choose.randrange(8)):
                await asyncio.sleep(0)

    async def request(self, session: SessionId) -> None:
        harness, choose = self.harness, self.choose
        messages = list(harness.mirrors[session].messages)
        message = choose.choice([*messages, "nobody"])
        params = {"max_tokens": choose.randrange(1, 20), "temperature": 1.0}
        match choose.randrange(12):
            case 0 | 1 | 2:
                parent = choose.choice([None, message])
                await harness.call("send_message", session=session, parent=parent, text="say", params=params)
            case 3:
                await harness.call("edit_message", session=session, message=message, text="edit", params=params)
            case 4 | 5:
                await harness.call("regenerate_message", session=session, message=message, params=params)
            case 6:
                await harness.call("continue_message", session=session, message=message, params=params)
            case 7:
                await harness.call("delete_message", session=session, message=message)
            case 8:
                await harness.call("select_branch", session=session, message=message)
            case 9:
                await harness.call("stop_generation", session=session, message=message)
            case 10:
                system = choose.choice([None, "a", "b"])
                await harness.call("update_session", session=session, title=choose.choice("xyz"), system=system)
            case _:
                ack = await harness.call("fork_session", session=session, message=message)
                self.forks.append(SessionId(ack["session"]))


async def verdict(harness: Harness, session: SessionId) -> None:
    mirror, store = harness.mirrors[session], harness.store
    assert isinstance(store, MemoryStore)

    def last_seq() -> int:
        return max((event.seq for event in store.raw(ANN, session)), default=0)

    await harness.until(lambda: harness.service.num_generations == 0 and last_seq() == mirror.seq)
    await harness.check()
    assert view_of(await store.load(ANN, session)) == mirror.view()
    assert all(m["status"] != "generating" for m in mirror.messages.values())
    begun = {m for m, starts in mirror.starts.items() if starts}
    assert begun <= set(mirror.ends), "what began has ended"


@pytest.mark.parametrize("seed", range(12))
async def test_random_requests_of_three_clients_at_once(encoders: Encoders, seed: int) -> None:
    async with Harness(encoders["chatml"], max_running=4) as harness:
        session = await harness.create()
        clients = Clients(harness, seed)
        await asyncio.gather(*(clients.run(session, 25) for _ in range(3)))
        await verdict(harness, session)
        assert "internal" not in clients.refusals
        await harness.idle()
        for fork in clients.forks:
            state = await harness.service.snapshot(ANN, fork)
            assert len({m.role for m in state.messages}) in {1, 2}
        await harness.call("delete_session", session=session)
        assert harness.mirrors[session].deleted


@pytest.mark.parametrize("seed", range(12))
async def test_random_requests_while_the_store_and_the_engine_fail(encoders: Encoders, seed: int) -> None:
    store = FlakyStore()
    async with Harness(encoders["chatml"], store=store, max_running=4) as harness:
        session = await harness.create()
        clients = Clients(harness, seed)
        over = asyncio.Event()

        async def trouble() -> None:
            choose = random.Random(-seed - 1)
            while not over.is_set():
                for _ in range(choose.randrange(60)):
                    await asyncio.sleep(0)
                if choose.random() < 0.7:
                    store.plan = [choose.choice(["ok", "lost", "done"]) for _ in range(3)]
                elif harness.client.info is not None:
                    harness.client.kill()
                    await harness.until(lambda: harness.health[-1:] and ("engine", False) in harness.health)
                    harness.client.revive(harness.make_engine(Talkative(harness.encoder)))
                    await harness.until(lambda: harness.client.info is not None)
            store.plan = []

        async with asyncio.TaskGroup() as group:
            group.create_task(trouble())
            await asyncio.gather(*(clients.run(session, 20) for _ in range(3)))
            over.set()
        await verdict(harness, session)
        assert "internal" not in clients.refusals
        await harness.idle()
