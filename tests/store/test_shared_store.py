"""Two services in this process on one real server, each with connections of its own."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import AsyncIterator
from typing import Any

import pytest

from chatserve.chat.events import MessageAdded
from chatserve.chat.prompt import PromptEncoder
from chatserve.chat.redis_store import open_store
from chatserve.supervisor.embedded_store import EmbeddedStore
from chatserve.types import SessionId, UserId
from tests.chat.harness import Harness, view_of
from tests.chat.models import make_model_dir


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> PromptEncoder:
    return PromptEncoder(make_model_dir(tmp_path_factory.mktemp("model"), "chatml"))


@contextlib.asynccontextmanager
async def service(encoder: PromptEncoder, server: EmbeddedStore, place: str) -> AsyncIterator[Harness]:
    store = await open_store(server.url, event_history=4096)
    try:
        async with Harness(encoder, store=store, place=place, beat_s=0.1) as harness:
            yield harness
    finally:
        await store.close()


async def test_two_services_share_a_session_and_each_hears_all_of_it(
    encoder: PromptEncoder, server: EmbeddedStore, user: UserId
) -> None:
    a_place, b_place = uuid.uuid4().hex, uuid.uuid4().hex
    async with service(encoder, server, a_place) as a, service(encoder, server, b_place) as b:
        session = await a.create(user=user, params={"max_tokens": 3000})
        await b.follow(session, user=user)
        b.service.user_came(user)
        _, running = await a.say(session, "go on", user=user)
        await b.writing(session, running, 20)
        for turn in range(10):
            order: list[str] = []
            ack: dict[str, Any] = {}

            def answer(fields: dict[str, Any], order: list[str] = order, ack: dict[str, Any] = ack) -> None:
                ack.update(fields)
                order.append("ack")

            took = b.mirrors[session].take

            def take(event: Any, order: list[str] = order, took: Any = took) -> None:
                if isinstance(event, MessageAdded):
                    order.append("event")
                took(event)

            b.mirrors[session].take = take  # type: ignore[method-assign]
            await b.service.send_message(
                user, f"r{turn}", answer=answer, session=session, parent=None, text="?", params={"max_tokens": 3}
            )
            await b.ended(session, ack["reply"])
            await a.ended(session, ack["reply"])
            b.mirrors[session].take = took  # type: ignore[method-assign]
            assert order == ["ack", "event", "event"]
        await b.call("stop_generation", user=user, session=session, message=running)
        assert b.mirrors[session].ends[running][0].reason == "cancelled"
        await b.call("update_session", user=user, session=session, title="by b")
        await a.until(lambda: a.mirrors[session].title == "by b")
        await b.until(lambda: (session, "by b", False) in b.changed)
        stored = view_of(await a.service.snapshot(user, session))
        assert a.mirrors[session].view() == b.mirrors[session].view() == stored
        assert view_of(await b.service.snapshot(user, session)) == stored


async def test_a_service_that_died_is_inherited_from_with_the_same_text(
    encoder: PromptEncoder, server: EmbeddedStore, user: UserId
) -> None:
    place = uuid.uuid4().hex
    params = {"temperature": 1.0, "seed": 7, "max_tokens": 200}
    async with service(encoder, server, uuid.uuid4().hex) as b:
        async with service(encoder, server, place) as a:
            session = await a.create(user=user, params=params)
            _, wanted = await a.say(session, "on", user=user)
            await a.ended(session, wanted)
            await b.follow(session, user=user)
            _, reply = await a.say(session, "on", user=user)
            await b.writing(session, reply, 40)
            await a.crash()
        # Somebody takes the dead one's place; whoever is first of the two goes on.
        async with service(encoder, server, place) as heir:
            end = await b.ended(session, reply)
            assert b.text(session, reply) == b.text(session, wanted)
            assert end.usage.completion_tokens == 200
            held = [h.service._core.sessions.peek(user, SessionId(session)) is not None for h in (b, heir)]
            assert sum(held) == 1
            assert len(b.mirrors[session].starts[reply]) == 1
