"""Several tabs on one conversation, each doing as it likes: all end with the same tree, as does whoever comes late."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.blackbox.client import ChatClient, Mirror, RequestFailedError
from tests.blackbox.server import Server
from tests.blackbox.test_stop import idle

Connect = Callable[..., ChatClient]

EXPECTED = {"busy", "bad_params", "conflict", "not_found"}
"""What honest tabs run into when others are faster; nothing else may come."""


async def act(client: ChatClient, session: str, mirror: Mirror, choose: random.Random) -> None:
    """One request on a random message, sensible or not."""
    message = choose.choice([*mirror.messages, "nobody"])
    is_answer = mirror.messages.get(message, {}).get("role") == "assistant"
    requests: list[tuple[str, dict[str, Any]]] = [
        ("message.send", {"parent": message if is_answer else None, "text": "and? " * choose.choice([1, 40])}),
        ("message.edit", {"message": message, "text": "rather this"}),
        ("message.regenerate", {"message": message}),
        ("message.continue", {"message": message, "params": {"max_tokens": 3}}),
        ("branch.select", {"message": message}),
        ("generation.stop", {"message": message}),
        ("session.fork", {"message": message}),
        ("session.update", {"system": choose.choice([None, "S", "T"]), "title": str(choose.random())}),
    ]
    if choose.random() < 0.3:
        requests.append(("message.delete", {"message": message}))
    await client.send({"type": "typing", "session": session, "parent": message, "text": "…"})
    kind, fields = choose.choice(requests)
    await client.request(kind, session=session, **fields)


@pytest.mark.parametrize("seed", [3, 4])
async def test_tabs_that_do_as_they_like_agree_in_the_end(server: Server, connect: Connect, seed: int) -> None:
    refused: Counter[str] = Counter()
    async with AsyncExitStack() as stack:
        tabs = [await stack.enter_async_context(connect()) for _ in range(4)]
        session = await tabs[0].create(params={"max_tokens": 6})
        mirrors = [await tab.watch(session) for tab in tabs]
        await tabs[0].turn(session, "root")

        async def use(number: int) -> None:
            choose = random.Random(f"{seed} {number}")
            for _ in range(30):
                try:
                    await act(tabs[number], session, mirrors[number], choose)
                except RequestFailedError as error:
                    refused[error.code] += 1

        await asyncio.gather(*map(use, range(4)))
        first = mirrors[0]
        await tabs[0].until(lambda: all(m["status"] != "generating" for m in first.messages.values()))
        for tab in tabs:
            await tab.settle()
        assert set(refused) <= EXPECTED, refused
        assert len({id(m) for m in mirrors}) == 4
        assert all(mirror.tree() == first.tree() for mirror in mirrors)
        first.check()
        late = await stack.enter_async_context(connect())
        assert (await late.watch(session)).tree() == first.tree()
        replayed = await stack.enter_async_context(connect(resume=[{"session": session, "after": 0}]))
        mirror = replayed.sessions[session]
        await replayed.until(lambda: mirror.seq >= first.seq)
        assert replayed.snapshots[session] == 0, "every event is still there"
        # What a session was created with is in no event.
        assert {**mirror.tree(), "params": {}} == {**first.tree(), "params": {}}
    await idle(server)


async def test_another_system_prompt_in_mid_answer_counts_from_the_next_answer_on(connect: Connect) -> None:
    async with connect() as client:
        session, mirror = await client.started_session(system="A", params={"temperature": 0, "max_tokens": 12})
        message, before = await client.turn(session, "one two three")
        _, running = await client.say(session, "go on", before, max_tokens=150)
        await client.until(lambda: bool(mirror.messages.get(running, {}).get("text")))
        await client.request("session.update", session=session, system="B, which is a rather different one")
        assert (await client.ended(session, running))["reason"] == "length"
        texts = []
        for system in ("B", "A"):
            if system == "A":
                await client.request("session.update", session=session, system="A")
            ack = await client.request("message.regenerate", session=session, message=message)
            await client.ended(session, ack["reply"])
            texts.append(client.text(session, ack["reply"]))
        assert texts[1] == client.text(session, before) != texts[0]
        alone, _ = await client.started_session(
            system="B, which is a rather different one", params={"temperature": 0, "max_tokens": 12}
        )
        _, other = await client.turn(alone, "one two three")
        assert client.text(alone, other) == texts[0]
        assert client.started(session, ack["reply"])["computed_tokens"] == 1, "what A had computed is still there"


async def test_three_hundred_siblings_are_kept_in_order_shown_and_deleted(connect: Connect) -> None:
    async with connect() as client:
        session, mirror = await client.started_session(params={"max_tokens": 1})
        _, root = await client.turn(session, "root")
        for start in range(0, 300, 50):
            sends = (
                client.request("message.send", session=session, parent=root, text=f"s{n}")
                for n in range(start, start + 50)
            )
            for ack in await asyncio.gather(*sends):
                await client.ended(session, ack["reply"])
        children = mirror.children(root)
        # Sent without waiting for answers, and still done in the order of their frames.
        assert [mirror.messages[m]["text"] for m in children] == [f"s{n}" for n in range(300)]
        await client.request("branch.select", session=session, message=children[7])
        await client.settle()
        async with connect() as late:
            fresh = await late.watch(session)
            assert fresh.children(root) == children
            assert fresh.tree() == mirror.tree()
        assert fresh.leaf == mirror.children(children[7])[0]
        ack = await client.request("message.delete", session=session, message=root)
        assert ack["deleted"] == 601
        await client.until(lambda: len(mirror.messages) == 1)
        assert mirror.leaf == next(iter(mirror.messages))
