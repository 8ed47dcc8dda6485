"""What a conversation costs: sharing, branching and swapping as the receipts and the cache's own counts tell it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.blackbox.client import ChatClient
from tests.blackbox.server import Server
from tests.blackbox.test_stop import idle

SYSTEM = "You answer questions about the history of small harbours. " * 40
"""Above 400 tokens."""


async def test_ten_sessions_under_one_system_prompt_compute_it_once(start_server: Callable[..., Server]) -> None:
    server = start_server(kv_cache_memory="1024blocks")
    async with ChatClient(server.ws_url) as client:
        sessions = [(await client.started_session(system=SYSTEM))[0] for _ in range(10)]
        replies = [(await client.say(session, f"question {n}", max_tokens=4))[1] for n, session in enumerate(sessions)]
        ends = [await client.ended(session, reply) for session, reply in zip(sessions, replies, strict=True)]
        costs = [client.started(s, r) for s, r in zip(sessions, replies, strict=True)]
        assert min(c["prompt_tokens"] for c in costs) > 400
        whole = [c for c in costs if c["computed_tokens"] > 100]
        assert len(whole) == 1
        assert all(c["computed_tokens"] <= 40 for c in costs if c is not whole[0])
    cache = await idle(server)
    size = cache["block_size"]
    # What the tree says: the ten questions part at their number, so blocks before it exist once and each session has
    # the rest of its path for itself. The last token of an answer that was cut at its length was never read.
    common = max(c["cached_tokens"] for c in costs) // size
    lengths = [
        c["prompt_tokens"] + e["usage"]["completion_tokens"] - (e["reason"] == "length")
        for c, e in zip(costs, ends, strict=True)
    ]
    end_of_public_text = 1  # the template's own beginning, which all users share, ends inside a block
    assert cache["device"]["cached"] == common + sum(-(-n // size) - common for n in lengths) + end_of_public_text


async def test_regenerate_computes_one_token_and_an_edit_only_its_text(server: Server) -> None:
    async with ChatClient(server.ws_url) as client:
        session, mirror = await client.started_session(params={"max_tokens": 21, "temperature": 0})
        _, one = await client.turn(session, "tell me about the lighthouse at the end of the northern pier")
        message, two = await client.turn(session, "and who built it in the first place", one)
        ack = await client.request("message.regenerate", session=session, message=two)
        await client.ended(session, ack["reply"])
        assert client.started(session, ack["reply"])["computed_tokens"] == 1
        assert mirror.messages[ack["reply"]]["text"] == mirror.messages[two]["text"]
        ack = await client.request("message.edit", session=session, message=message, text="stop: who painted it")
        await client.ended(session, ack["reply"])
        edited = client.started(session, ack["reply"])
        _, bare = await client.turn((await client.started_session())[0], "stop: who painted it", max_tokens=1)
        assert edited["computed_tokens"] <= 24
        assert edited["cached_tokens"] > 50
        assert bare


async def test_the_next_turn_hits_the_cache_to_the_last_token(server: Server) -> None:
    async with ChatClient(server.ws_url) as client:
        session, _ = await client.started_session(params={"temperature": 0})
        _, one = await client.turn(session, "first turn with some words", max_tokens=37)
        usage = (await client.ended(session, one))["usage"]
        _, two = await client.turn(session, "second", one, max_tokens=3)
        started = client.started(session, two)
        assert started["cached_tokens"] >= usage["prompt_tokens"] + usage["completion_tokens"] - 1


async def test_a_fork_in_mid_block_copies_one_block_and_both_sides_go_on_as_if_alone(server: Server) -> None:
    async with ChatClient(server.ws_url) as client:
        params = {"params": {"temperature": 0, "max_tokens": 25}}
        session, _ = await client.started_session(**params)
        _, one = await client.turn(session, "a trunk to fork from, of no particular length")
        copies_before = server.metric("chatserve_copies_total")
        fork = (await client.request("session.fork", session=session, message=one))["session"]
        forked = await client.watch(fork)
        _, left = await client.say(session, "go left", one)
        _, right = await client.say(fork, "go right", forked.leaf)
        await client.ended(session, left)
        await client.ended(fork, right)
        assert server.metric("chatserve_copies_total") - copies_before <= 2
        for where, reply in ((session, left), (fork, right)):
            assert client.started(where, reply)["computed_tokens"] <= 16
        alone, _ = await client.started_session(**params)
        _, again = await client.turn(alone, "a trunk to fork from, of no particular length")
        assert client.text(alone, again) == client.text(session, one)
        _, lone = await client.turn(alone, "go right", again)
        assert client.text(alone, lone) == client.text(fork, right)


async def test_swapped_out_sessions_come_back_with_the_same_text(start_server: Callable[..., Server]) -> None:
    """Greedy texts under a pool that holds two of six sessions equal those under a roomy one; receipts add up."""
    texts: dict[str, list[str]] = {}
    swapped = 0
    for name, options in (
        ("roomy", {"kv_cache_memory": "1024blocks"}),
        ("tight", {"kv_cache_memory": "40blocks", "host_cache_memory": "400blocks"}),
        ("no host", {"kv_cache_memory": "40blocks", "host_cache_memory": "0blocks"}),
    ):
        server = start_server(**options)
        said = texts.setdefault(name, [])
        async with ChatClient(server.ws_url) as client:
            made = []
            for n in range(6):
                session, _ = await client.started_session(params={"temperature": 0, "max_tokens": 12})
                _, reply = await client.turn(session, f"{n}. " + "tell me of ships and winds " * 8)
                made.append((session, reply))
                said.append(client.text(session, reply))
            for session, reply in made:
                _, answer = await client.turn(session, "and then", reply)
                said.append(client.text(session, answer))
                if name == "tight":
                    swapped += client.started(session, answer)["swapped_in_tokens"]
        await idle(server)
        server.stop()
    assert texts["tight"] == texts["roomy"] == texts["no host"]
    assert swapped > 0


@pytest.mark.timeout(300)
async def test_a_burst_of_a_thousand_one_off_chats_does_not_evict_the_shared_system_prompt(
    start_server: Callable[..., Server], store_options: dict[str, str]
) -> None:
    server = start_server(kv_cache_memory="96blocks", host_cache_memory="0blocks", **store_options)
    costs = []

    async def chat(client: ChatClient, n: int) -> None:
        session, mirror = await client.started_session(system=SYSTEM[: len(SYSTEM) // 3])
        _, reply = await client.turn(session, f"one-off {n} " + str(n * 7919) * 8, max_tokens=2)
        costs.append(client.started(session, reply)["cached_tokens"])
        await client.request("session.close", session=session)
        mirror.log.clear()

    async with ChatClient(server.ws_url) as client:
        await chat(client, 0)
        for start in range(1, 1000, 8):
            await asyncio.gather(*(chat(client, n) for n in range(start, min(start + 8, 1000))))
    assert len(costs) == 1000
    assert sum(cached < 100 for cached in costs) == 1, "the system prompt is computed once"


async def test_twenty_at_once_under_a_swapped_prefix_start_alike(start_server: Callable[..., Server]) -> None:
    server = start_server(kv_cache_memory="160blocks", host_cache_memory="400blocks")
    async with ChatClient(server.ws_url) as client:
        session, _ = await client.started_session(system=SYSTEM)
        await client.turn(session, "warm", max_tokens=2)
        for n in range(4):
            other, _ = await client.started_session()
            await client.turn(other, f"{n} fill " + "the pool with other words " * 120, max_tokens=2)
        made = [(await client.started_session(system=SYSTEM))[0] for _ in range(20)]
        replies = [(await client.say(s, f"q{n}", max_tokens=2))[1] for n, s in enumerate(made)]
        ends = [await client.ended(s, r) for s, r in zip(made, replies, strict=True)]
        assert sum(e["usage"]["computed_tokens"] > 100 for e in ends) == 0
        assert sum(e["usage"]["swapped_in_tokens"] > 100 for e in ends) >= 1


async def test_after_a_restart_with_a_snapshot_the_next_turn_computes_what_is_new(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    """A session of 2,000 tokens, ended by SIGTERM and taken up by a server of its own data directory."""
    texts = {}
    for name, options in (("kept", {"kv_snapshot": tmp_path / "kv"}), ("lost", {})):
        options |= {"data_dir": tmp_path / name, "kv_cache_memory": "400blocks", "host_cache_memory": "400blocks"}
        server = start_server(**options)
        async with ChatClient(server.ws_url) as client:
            session, _ = await client.started_session(params={"temperature": 0, "max_tokens": 12})
            _, one = await client.turn(session, "a long tale of a small harbour " * 270)
            usage = (await client.ended(session, one))["usage"]
            assert usage["prompt_tokens"] > 1_900
        assert server.stop() == 0
        server = start_server(**options)
        async with ChatClient(server.ws_url) as client:
            await client.watch(session)
            _, two = await client.turn(session, "and then", one)
            started = client.started(session, two)
            texts[name] = client.text(session, two)
        new = started["prompt_tokens"] - usage["prompt_tokens"] - usage["completion_tokens"]
        if name == "kept":
            # What is new, and the last token of an answer that was cut at its length: it was never read.
            assert started["computed_tokens"] <= new + 1
            assert server.metric("chatserve_restored_blocks_total") >= 1_900 // 16
        else:
            assert started["computed_tokens"] == started["prompt_tokens"]
        server.stop()
    assert texts["kept"] == texts["lost"]


async def test_what_is_typed_ahead_is_computed_ahead(start_server: Callable[..., Server]) -> None:
    """A conversation that went to the host, and a draft of some length: the turn brings back nothing and computes what
    the draft did not have.
    """
    draft = "what I would like to know about this harbour is how tall the lighthouse was " * 6
    server = start_server(kv_cache_memory="160blocks", host_cache_memory="800blocks")
    async with ChatClient(server.ws_url) as client:
        for name in ("typed", "sent at once"):
            session, _ = await client.started_session(params={"temperature": 0, "max_tokens": 8})
            _, one = await client.turn(session, f"{name} " + "a long tale of a small harbour " * 100)
            for n in range(3):
                other, _ = await client.started_session()
                await client.turn(other, f"{name} {n} fill " + "the pool with other words " * 120, max_tokens=2)
            ahead = server.metric("chatserve_hinted_tokens_total")
            if name == "typed":
                await client.send({"type": "typing", "session": session, "parent": one, "text": draft + "and"})
                for _ in range(600):
                    if server.metric("chatserve_hinted_tokens_total") - ahead > 60:
                        break
                    await client.settle()
                await idle(server)
            _, two = await client.turn(session, draft + "and how wide", one)
            started = client.started(session, two)
            if name == "typed":
                assert started["swapped_in_tokens"] == 0
                assert started["computed_tokens"] <= 20
            else:
                assert started["swapped_in_tokens"] > 600
                assert started["computed_tokens"] > 80
