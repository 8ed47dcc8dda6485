"""What is deleted leaves the engine's cache too, whoever it was that generated it and whenever."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from chatserve.chat import forgetting
from chatserve.chat.prompt import PromptEncoder
from tests.chat.harness import ANN, Encoders, Harness, Talkative
from tests.fakes.engines import make_engine
from tests.fakes.inline_engine import InlineEngineClient


@asynccontextmanager
async def with_two_branches(encoder: PromptEncoder) -> AsyncIterator[tuple[Harness, InlineEngineClient, str, str]]:
    """A conversation of three turns, the last of which has two answers; the first of them is the message."""
    harness = Harness(encoder)
    client = harness.client = InlineEngineClient(make_engine(Talkative(encoder, num_blocks=512), kv_snapshot=None))
    harness.service = harness._make_service()
    async with harness:
        session = await harness.create()
        _, reply = await harness.turn(session, "on and on", max_tokens=20)
        _, first = await harness.turn(session, "and more of it", reply, max_tokens=20)
        _, last = await harness.turn(session, "and more of that", first, max_tokens=20)
        again = await harness.regenerate(session, last, max_tokens=30, seed=5)
        await harness.ended(session, again)
        await harness.idle()
        yield harness, client, session, last


def num_private(client: InlineEngineClient) -> int:
    assert client.engine is not None
    return sum(not node.is_public for node in client.engine._kv._tree.walk())


@pytest.mark.parametrize("knows_paths", [True, False])
async def test_a_deleted_conversation_leaves_nothing_in_the_cache(encoders: Encoders, knows_paths: bool) -> None:
    async with with_two_branches(encoders["chatml"]) as (harness, client, session, _):
        if not knows_paths:  # as if it had been generated before this process began
            live = harness.service._core.sessions.peek(ANN, session)
            assert live is not None
            live.paths.clear()
        assert num_private(client) > 4
        await harness.call("delete_session", session=session)
        await harness.until(lambda: num_private(client) == 0)


async def test_a_deleted_message_leaves_what_comes_before_it(encoders: Encoders) -> None:
    async with with_two_branches(encoders["chatml"]) as (harness, client, session, last):
        live = harness.service._core.sessions.peek(ANN, session)
        assert live is not None
        live.paths.clear()
        parent = live.tree.get(last).parent
        before = num_private(client)
        await harness.call("delete_message", session=session, message=parent)
        await harness.until(lambda: num_private(client) < before)
        kept = sum(len(m.token_ids) for m in live.tree)
        assert num_private(client) >= kept // 16 - 2


async def test_what_is_deleted_while_the_engine_is_away_is_forgotten_when_it_is_back(
    encoders: Encoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_two_branches(encoders["chatml"]) as (harness, client, session, _):
        other = await harness.create()
        await harness.turn(other, "something else", max_tokens=20)
        await harness.idle()
        engine, waiting = client.engine, harness.service._core.forgetting
        assert engine is not None
        client.kill()
        await harness.call("delete_session", session=session)
        assert waiting._num_waiting_tokens > 0
        client.revive(engine)  # with all that it had, as from a snapshot
        await harness.until(lambda: not waiting._waiting)
        left = num_private(client)
        assert left > 0
        client.kill()
        monkeypatch.setattr(forgetting, "MAX_WAITING_TOKENS", 5)
        await harness.call("delete_session", session=other)
        assert waiting._num_waiting_tokens == 0, "no more than there is room for"
        client.revive(engine)
        await harness.until(lambda: client.info is not None)
