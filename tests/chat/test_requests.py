"""A request is done once, however often and over however many sockets it is sent."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from chatserve.errors import ConflictError, NotFoundError
from chatserve.types import SessionId, UserId
from tests.chat.harness import ANN, BOB, Encoders, Harness, refused
from tests.fakes.memory_store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


async def test_three_times_at_once_makes_one_message_and_gives_one_answer(harness: Harness) -> None:
    session = await harness.create()
    fields = {"session": session, "parent": None, "text": "click", "params": {"max_tokens": 3}}
    answers = await asyncio.gather(*(harness.call("send_message", id_="same", **fields) for _ in range(3)))
    assert answers[0] == answers[1] == answers[2]
    await harness.ended(session, answers[0]["reply"])
    assert await harness.call("send_message", id_="same", **fields) == answers[0]
    assert len(harness.mirrors[session].messages) == 2


async def test_all_who_sent_it_are_answered_before_its_events(harness: Harness) -> None:
    session = await harness.create()
    seen: list[int] = []
    fields = {"session": session, "parent": None, "text": "click", "params": {"max_tokens": 1}}
    calls = [
        harness.service.send_message(ANN, "same", answer=lambda _: seen.append(harness.mirrors[session].seq), **fields)
        for _ in range(3)
    ]
    await asyncio.gather(*calls)
    assert seen == [0, 0, 0]


@pytest.mark.parametrize("in_flight", [True, False])
async def test_the_same_id_with_another_body_is_a_conflict(harness: Harness, in_flight: bool) -> None:
    session = await harness.create()
    first = asyncio.ensure_future(harness.call("update_session", id_="same", session=session, title="one"))
    await (asyncio.sleep(0) if in_flight else first)
    for name, fields in (
        ("update_session", {"session": session, "title": "two"}),
        ("update_session", {"session": session, "system": "one"}),
        ("delete_session", {"session": session}),
        ("create_session", {}),
    ):
        assert isinstance(await refused(harness.call(name, id_="same", **fields)), ConflictError)
    await first
    assert harness.mirrors[session].title == "one"


async def test_ids_are_each_users_own(harness: Harness) -> None:
    mine = await harness.call("create_session", id_="same")
    theirs = await harness.call("create_session", id_="same", user=BOB)
    assert mine != theirs


async def test_every_kind_of_request_gets_the_same_answer_again(harness: Harness) -> None:
    session = await harness.create(params={"max_tokens": 2})
    message, reply = await harness.turn(session, "a")
    spare, _ = await harness.turn(session, "b")
    for name, fields in (
        ("create_session", {"title": "x"}),
        ("update_session", {"session": session, "title": "y"}),
        ("fork_session", {"session": session, "message": reply}),
        ("send_message", {"session": session, "parent": reply, "text": "c"}),
        ("edit_message", {"session": session, "message": message, "text": "d"}),
        ("regenerate_message", {"session": session, "message": reply}),
        ("select_branch", {"session": session, "message": reply}),
        ("delete_message", {"session": session, "message": spare}),
        ("stop_generation", {"session": session, "message": reply}),
        ("delete_session", {"session": session}),
    ):
        once = await harness.call(name, id_=f"again {name}", **fields)
        if "reply" in once:
            await harness.ended(session, once["reply"])
        num_messages, seq = len(harness.mirrors[session].messages), harness.mirrors[session].seq
        assert await harness.call(name, id_=f"again {name}", **fields) == once
        assert (len(harness.mirrors[session].messages), harness.mirrors[session].seq) == (num_messages, seq)


async def test_a_client_that_hangs_up_leaves_nothing_half_done(harness: Harness) -> None:
    session = await harness.create()
    fields = {"session": session, "parent": None, "text": "bye", "params": {"max_tokens": 2}}
    for turns in range(6):
        call = asyncio.ensure_future(harness.call("send_message", id_=f"hang up {turns}", **fields))
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        ack = await harness.call("send_message", id_=f"hang up {turns}", **fields)
        await harness.ended(session, ack["reply"])
    assert len(harness.mirrors[session].messages) in {10, 12}, "cancelled before it began, or done once"


async def test_a_failed_request_may_be_sent_again(harness: Harness) -> None:
    session = await harness.create()
    message, _ = await harness.turn(session, "a", max_tokens=1)
    fields = {"session": session, "message": message}
    assert await harness.call("delete_message", id_="d1", **fields) == {"deleted": 2}
    assert isinstance(await refused(harness.call("delete_message", id_="d2", **fields)), NotFoundError)
    assert await harness.call("delete_message", id_="d1", **fields) == {"deleted": 2}


async def test_an_answer_outlives_the_process(encoders: Encoders) -> None:
    async with Harness(encoders["chatml"]) as before:
        session = await before.create()
        fields = {"session": session, "parent": None, "text": "once", "params": {"max_tokens": 2}}
        ack = await before.call("send_message", id_="same", **fields)
        await before.ended(session, ack["reply"])
    async with Harness(encoders["chatml"], store=before.store) as after:
        assert await after.call("send_message", id_="same", **fields) == ack
        assert len((await after.service.snapshot(ANN, session)).messages) == 2


class AnsweringBackwards(MemoryStore):
    """Of so many requests it says last of the first one whether it is new."""

    def __init__(self) -> None:
        super().__init__()
        self.num_together = 0
        self._waiting: list[asyncio.Event] = []

    async def answer(self, user: UserId, request_id: str) -> tuple[str, bytes] | None:
        if self.num_together:
            mine = asyncio.Event()
            self._waiting.append(mine)
            if len(self._waiting) == self.num_together:
                for waiting in reversed(self._waiting):
                    waiting.set()
            await mine.wait()
        return await super().answer(user, request_id)


async def test_requests_begin_in_the_order_in_which_they_came(encoders: Encoders) -> None:
    store = AnsweringBackwards()
    async with Harness(encoders["chatml"], store=store) as harness:
        session = await harness.create()
        titles = [str(n) for n in range(5)]
        store.num_together = len(titles)
        answers = await asyncio.gather(*(harness.call("update_session", session=session, title=t) for t in titles))
        versions = [answer["version"] for answer in answers]
        assert versions == sorted(versions)
        assert harness.mirrors[session].title == titles[-1]


class Looking(MemoryStore):
    """Lets something happen just after a server has looked for a request's answer."""

    def __init__(self) -> None:
        super().__init__()
        self.then: Callable[[], Awaitable[Any]] | None = None

    async def answer(self, user: UserId, request_id: str) -> tuple[str, bytes] | None:
        found = await super().answer(user, request_id)
        then, self.then = self.then, None
        if then is not None:
            await then()
        return found


@pytest.mark.parametrize("kind", ["delete_session", "delete_message"])
async def test_a_second_attempt_that_the_first_one_has_made_impossible_gets_its_answer(
    encoders: Encoders, kind: str
) -> None:
    """The first one's socket is lost in the middle, and the client comes back to another server."""
    store = Looking()
    async with (
        Harness(encoders["chatml"], store=store, place="a") as a,
        Harness(encoders["chatml"], store=store, place="b") as b,
    ):
        session = await a.create(params={"max_tokens": 2})
        message, _ = await a.turn(session, "soon gone")
        fields = {"session": session} | ({"message": message} if kind == "delete_message" else {})
        first: list[dict[str, Any]] = []

        async def do_first() -> None:
            first.append(await a.call(kind, id_="same", **fields))

        store.then = do_first
        assert await b.call(kind, id_="same", **fields) == first[0]
        assert isinstance(await refused(b.call(kind, id_="another", **fields)), NotFoundError)
        conflicting = {**fields, "session": SessionId("another")}
        assert isinstance(await refused(b.call(kind, id_="same", **conflicting)), ConflictError)
