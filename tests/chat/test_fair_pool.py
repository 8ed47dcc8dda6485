"""Threads that users take turns at."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatserve.chat.fair_pool import FairPool
from chatserve.types import UserId

ANN, BOB, EVE = UserId("ann"), UserId("bob"), UserId("eve")


@pytest.fixture
async def pool() -> AsyncIterator[FairPool]:
    pool = FairPool(1, "test")
    yield pool
    pool.close()


async def test_one_users_hundred_do_not_keep_another_waiting(pool: FairPool) -> None:
    gate, done = threading.Event(), []
    tasks = [asyncio.create_task(pool.run(ANN, gate.wait))]
    tasks += [asyncio.create_task(pool.run(ANN, lambda n=n: done.append(("ann", n)))) for n in range(100)]
    tasks += [asyncio.create_task(pool.run(BOB, lambda: done.append(("bob", 0))))]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*tasks)
    assert done.index(("bob", 0)) <= 1
    assert [n for user, n in done if user == "ann"] == list(range(100)), "one user's work in the order of its arrival"


@given(st.lists(st.sampled_from([ANN, BOB, EVE]), max_size=30))
def test_between_two_turns_of_a_user_everyone_who_waits_has_one(arrivals: list[UserId]) -> None:
    async def run() -> None:
        pool, gate, order = FairPool(1, "test"), threading.Event(), []
        first = asyncio.create_task(pool.run(UserId("first"), gate.wait))
        await asyncio.sleep(0)
        tasks = [asyncio.create_task(pool.run(user, lambda user=user: order.append(user))) for user in arrivals]
        await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(first, *tasks)
        left = {user: arrivals.count(user) for user in set(arrivals)}
        while left:
            turn, order = order[: len(left)], order[len(left) :]
            assert set(turn) == left.keys()
            left = {user: count - 1 for user, count in left.items() if count > 1}
        assert order == []
        pool.close()

    asyncio.run(run())


async def test_an_error_is_its_callers_alone(pool: FairPool) -> None:
    def fail() -> None:
        raise ValueError("no text")

    with pytest.raises(ValueError, match="no text"):
        await pool.run(ANN, fail)
    assert await pool.run(ANN, lambda: 7) == 7


async def test_who_is_cancelled_while_waiting_is_not_served_and_holds_nobody_up(pool: FairPool) -> None:
    gate, done = threading.Event(), []
    first = asyncio.create_task(pool.run(ANN, gate.wait))
    second = asyncio.create_task(pool.run(ANN, lambda: done.append("second")))
    third = asyncio.create_task(pool.run(ANN, lambda: done.append("third")))
    await asyncio.sleep(0)
    second.cancel()
    gate.set()
    await asyncio.gather(first, third)
    assert done == ["third"]


async def test_who_is_cancelled_while_being_served_gives_the_thread_back(pool: FairPool) -> None:
    gate = threading.Event()
    first = asyncio.create_task(pool.run(ANN, gate.wait))
    await asyncio.sleep(0)
    first.cancel()
    gate.set()
    assert await pool.run(BOB, lambda: 7) == 7


async def test_closing_cancels_what_waits(pool: FairPool) -> None:
    gate = threading.Event()
    first = asyncio.create_task(pool.run(ANN, gate.wait))
    second = asyncio.create_task(pool.run(ANN, lambda: None))
    await asyncio.sleep(0)
    pool.close()
    with pytest.raises(asyncio.CancelledError):
        await second
    gate.set()
    await first
