"""What is written before it is sent: told to the engine in time, as the ids that the message will have, and no more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest

from chatserve.chat import typing
from chatserve.chat.prompt import PromptEncoder
from chatserve.engine.messages import Hint, Inspect
from chatserve.errors import NotFoundError
from chatserve.types import MessageId, SessionId
from tests.chat.harness import ANN, BOB, Encoders, Harness, Talkative, refused
from tests.chat.models import KINDS
from tests.fakes.engines import make_engine
from tests.fakes.inline_engine import InlineEngineClient

DRAFT = (
    "what I would like to know about the lighthouse is how tall it was when they had built it and who lived in there"
)


class Noting(InlineEngineClient):
    """Notes what it was told."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.hints: list[Hint] = []
        self._more = asyncio.Condition()

    def hint(self, hint: Hint) -> None:
        super().hint(hint)
        self.hints.append(hint)
        asyncio.get_running_loop().create_task(self._tell())

    async def _tell(self) -> None:
        async with self._more:
            self._more.notify_all()

    async def told(self, num_hints: int) -> Hint:
        """Wait until it has been told so often; the last. Encoding may have gone to a thread."""
        async with asyncio.timeout(30), self._more:
            await self._more.wait_for(lambda: len(self.hints) >= num_hints)
        return self.hints[num_hints - 1]


class Pauses:
    """The time between two hints, which passes when the test says so."""

    def __init__(self) -> None:
        self._ends = asyncio.Event()

    async def wait(self) -> None:
        await self._ends.wait()

    async def end(self) -> None:
        """Let every pause end that has begun."""
        self._ends.set()
        await settled()
        self._ends.clear()


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


@asynccontextmanager
async def typing_harness(encoder: PromptEncoder) -> AsyncIterator[tuple[Harness, Noting, Pauses]]:
    harness = Harness(encoder)
    runner = Talkative(encoder, num_blocks=512, block_size=4)
    client = harness.client = Noting(make_engine(runner, max_batched_tokens=512))
    harness.service = harness._make_service()
    pauses = Pauses()
    harness.service._typing.pause = pauses.wait
    async with harness:
        yield harness, client, pauses


async def quiet(client: InlineEngineClient) -> None:
    """Until the engine has done what it was told."""
    await settled()
    for _ in range(10_000):
        if client.engine is None or not client.engine.has_work:
            return
        await asyncio.sleep(0)
    raise AssertionError("the engine is busy for ever")


@pytest.mark.parametrize("name", KINDS)
async def test_a_draft_is_computed_before_it_is_sent(encoders: Encoders, name: str) -> None:
    encoder = encoders[name]
    async with typing_harness(encoder) as (harness, client, _):
        session = await harness.create()
        _, reply = await harness.turn(session, "on", max_tokens=5)
        harness.service.typing(ANN, session, reply, DRAFT)
        await quiet(client)
        (hint,) = client.hints
        assert hint.base is not None
        assert hint.num_draft_tokens == len(hint.token_ids) > 10
        _, answer = await harness.turn(session, DRAFT + " then", reply, max_tokens=5)
        started = harness.started(session, answer)
        whole = encoder.encode_turn(DRAFT + " then")
        assert whole[: len(hint.token_ids)] == hint.token_ids
        assert started.computed_tokens == len(whole) - len(hint.token_ids)
        assert started.computed_tokens <= len(whole) // 2
        await harness.idle()
        await harness.check()


async def test_a_first_message_is_drafted_with_its_system_prompt(encoders: Encoders) -> None:
    encoder = encoders["chatml"]
    async with typing_harness(encoder) as (harness, client, _):
        session = await harness.create(system="You know about harbours. " * 20)
        harness.service.typing(ANN, session, None, DRAFT)
        hint = await client.told(1)
        await quiet(client)
        _, answer = await harness.turn(session, DRAFT, max_tokens=5)
        whole = encoder.encode_root("You know about harbours. " * 20, DRAFT)
        assert harness.started(session, answer).computed_tokens == len(whole) - len(hint.token_ids) <= 20


async def test_an_empty_field_brings_the_conversation_back_and_ends_the_draft(encoders: Encoders) -> None:
    async with typing_harness(encoders["chatml"]) as (harness, client, pauses):
        session = await harness.create()
        _, reply = await harness.turn(session, "on", max_tokens=5)
        state = await harness.service.snapshot(ANN, session)
        for text in (DRAFT, "", None):
            harness.service.typing(ANN, session, reply, text)
            await quiet(client)
            await pauses.end()
        assert [h.num_draft_tokens > 0 for h in client.hints] == [True, False, False]
        assert {h.base.num_tokens for h in client.hints if h.base} == {sum(len(m.token_ids) for m in state.messages)}
        _, answer = await harness.turn(session, DRAFT, reply, max_tokens=5)
        assert harness.started(session, answer).computed_tokens > 10, "the draft's KV outlived the draft"


async def test_a_flood_is_one_hint_a_moment_and_the_last_word_counts(encoders: Encoders) -> None:
    async with typing_harness(encoders["chatml"]) as (harness, client, pauses):
        session = await harness.create()
        _, reply = await harness.turn(session, "on", max_tokens=5)
        for end in range(1, len(DRAFT)):
            harness.service.typing(ANN, session, reply, DRAFT[:end])
            await asyncio.sleep(0)
        await quiet(client)
        assert len(client.hints) == 1
        await pauses.end()
        assert len(client.hints) == 2
        expected = encoders["chatml"].encode_turn_draft(DRAFT[:-1])
        assert client.hints[-1].token_ids == expected
        await pauses.end()
        assert len(client.hints) == 2
        assert harness.service._typing._typists[ANN, session].task is None


async def test_a_client_that_names_ever_new_sessions_is_not_listened_to(encoders: Encoders) -> None:
    async with typing_harness(encoders["chatml"]) as (harness, client, pauses):
        loads: list[SessionId] = []
        load = harness.store.load

        async def counting(user: Any, session: SessionId) -> Any:
            loads.append(session)
            return await load(user, session)

        harness.store.load = counting  # type: ignore[method-assign]
        for n in range(100):
            harness.service.typing(ANN, SessionId(f"nowhere{n}"), MessageId("nobody"), "x")
        await settled()
        assert len(loads) == typing.MAX_TYPISTS_PER_USER
        await pauses.end()
        assert not harness.service._typing._typists
        assert client.hints == []


async def test_leaving_the_session_ends_the_draft(encoders: Encoders) -> None:
    async with typing_harness(encoders["chatml"]) as (harness, client, _):
        session = await harness.create()
        _, reply = await harness.turn(session, "on", max_tokens=5)
        harness.service.set_subscribers(session, 1)
        harness.service.typing(ANN, session, reply, DRAFT)
        await quiet(client)
        assert client.engine is not None
        with_draft = client.engine.report(Inspect(0)).device.cached
        harness.service.set_subscribers(session, 0)
        await quiet(client)
        assert client.hints[-1] == Hint(user=ANN, key=session, base=None, token_ids=())
        assert client.engine.report(Inspect(0)).device.cached < with_draft - 5


async def test_deleting_the_session_leaves_nothing_of_it_or_its_draft(encoders: Encoders) -> None:
    async with typing_harness(encoders["chatml"]) as (harness, client, pauses):
        session = await harness.create()
        _, reply = await harness.turn(session, "on", max_tokens=5)
        harness.service.typing(ANN, session, reply, DRAFT)
        await quiet(client)
        harness.service.typing(ANN, session, reply, DRAFT + " and more of the same")
        await harness.call("delete_session", session=session)
        await pauses.end()
        await quiet(client)
        assert client.engine is not None
        assert all(node.is_public for node in client.engine._kv._tree.walk())


async def test_another_users_session_is_nobodys_business(encoders: Encoders) -> None:
    async with typing_harness(encoders["chatml"]) as (harness, client, pauses):
        session = await harness.create()
        _, reply = await harness.turn(session, "on", max_tokens=5)
        harness.service.typing(BOB, session, reply, DRAFT)
        await quiet(client)
        await pauses.end()
        assert client.hints == []
        harness.service.typing(ANN, session, reply, DRAFT)
        await quiet(client)
        harness.service.typing(BOB, session, reply, "mine")
        await pauses.end()
        assert [h.user for h in client.hints] == [ANN]
        harness.service.typing(ANN, session, reply, DRAFT + " too")
        assert isinstance(await refused(harness.say(session, "mine", reply, user=BOB)), NotFoundError)
        assert isinstance(await refused(harness.call("delete_session", user=BOB, session=session)), NotFoundError)
        await pauses.end()
        await quiet(client)
        assert len(client.hints) == 2, "another user's requests leave a draft alone"
        assert client.hints[1].token_ids


async def test_who_names_anothers_session_holds_up_nothing(encoders: Encoders) -> None:
    async with typing_harness(encoders["chatml"]) as (harness, client, _):
        session = await harness.create()
        _, reply = await harness.turn(session, "on", max_tokens=5)
        harness.service.typing(BOB, session, reply, DRAFT)
        await settled()  # and he is silent for a moment
        harness.service.typing(ANN, session, reply, DRAFT)
        await quiet(client)
        assert [h.user for h in client.hints] == [ANN]
        assert set(harness.service._typing._typists) == {(ANN, session), (BOB, session)}


async def test_ids_of_conversations_are_kept_up_to_a_bound_and_found_again(
    encoders: Encoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with typing_harness(encoders["chatml"]) as (harness, client, pauses):
        replies: dict[str, str] = {}
        for _ in range(typing.MAX_TYPISTS_PER_USER):
            session = await harness.create()
            _, replies[session] = await harness.turn(session, "on " * 20, max_tokens=5)
        state = await harness.store.load(ANN, SessionId(session))
        assert state is not None
        one = 4 * sum(len(m.token_ids) for m in state.messages)
        monkeypatch.setattr(typing, "MAX_BASE_BYTES", 2 * one)
        told = harness.service._typing
        for text in ("a", "b"):
            for session, reply in replies.items():
                harness.service.typing(ANN, session, reply, text)
                await quiet(client)
                kept = [len(typist.base) * 4 for typist in told._typists.values() if typist.base is not None]
                assert 0 < sum(kept) <= 2 * one
                assert told._num_base_bytes == sum(kept)
            await pauses.end()
        assert [h.key for h in client.hints] == 2 * list(replies)
        assert {h.base.num_tokens for h in client.hints if h.base} == {one // 4}
        for session in replies:
            harness.service.set_subscribers(session, 0)
        assert told._num_base_bytes == 0
        assert [h.token_ids for h in client.hints[8:]] == [()] * 4


async def test_nothing_that_cannot_be_hinted_fails(encoders: Encoders) -> None:
    async with typing_harness(encoders["chatml"]) as (harness, client, pauses):
        session = await harness.create()
        message, reply = await harness.say(session, "on", max_tokens=300)
        for parent in (MessageId("nobody"), message, reply):  # no message, no answer, not finished
            harness.service.typing(ANN, session, parent, DRAFT)
            await settled()
            await pauses.end()
        assert client.hints == []
        await harness.call("stop_generation", session=session, message=reply)
        client.kill()
        harness.service.typing(ANN, session, reply, DRAFT)
        await settled()
        await pauses.end()
        assert client.hints == []


async def test_after_a_new_engine_came_all_ids_are_told(encoders: Encoders) -> None:
    encoder = encoders["chatml"]
    async with typing_harness(encoder) as (harness, client, _):
        session = await harness.create()
        _, reply = await harness.turn(session, "on", max_tokens=5)
        client.kill()
        client.revive(make_engine(Talkative(encoder, num_blocks=512, block_size=4), max_batched_tokens=512))
        await settled()
        harness.service.typing(ANN, session, reply, DRAFT)
        await quiet(client)
        (hint,) = client.hints
        assert hint.base is None
        _, answer = await harness.turn(session, DRAFT, reply, max_tokens=5)
        assert harness.started(session, answer).computed_tokens <= 12


LETTERS = "ab é,.\n你好😀<|"


@pytest.mark.parametrize("name", KINDS)
def test_ids_of_a_draft_begin_those_of_what_it_becomes(encoders: Encoders, name: str) -> None:
    """Nearly: a text without spaces may be cut otherwise once it goes on, which costs the KV of its last token."""
    encoder = encoders[name]
    random = Random(0)
    total, wrong = 1000, 0
    for _ in range(total):
        begun, rest = ("".join(random.choices(LETTERS, k=random.randrange(30))) for _ in range(2))
        text = f"so {begun} and"
        ids = encoder.encode_turn_draft(text)
        whole = encoder.encode_turn(text + rest)
        assert len(ids) > 0
        assert whole[: len(ids) - 1] == ids[:-1]
        wrong += whole[: len(ids)] != ids
    assert wrong <= total // 50
