"""Whatever one user asks for, another one's single request does not wait for all of it."""

from __future__ import annotations

import asyncio
import threading

from chatserve.config import Limits
from tests.chat.harness import BOB, Encoders, Harness


async def test_one_users_hundred_answers_do_not_keep_another_waiting(encoders: Encoders) -> None:
    limits = Limits(max_generations_per_user=200)
    async with Harness(encoders["chatml"], limits=limits, max_running=2) as harness:
        mine = await harness.create(params={"max_tokens": 20})
        theirs = await harness.create(user=BOB, params={"max_tokens": 20})
        harness.client.pause()
        message, first = await harness.say(mine, "a hundred answers, please")
        replies = [first, *[await harness.regenerate(mine, message) for _ in range(99)]]
        _, one = await harness.say(theirs, "just one", user=BOB)
        harness.client.resume()
        await harness.ended(theirs, one)
        num_ended = sum(reply in harness.mirrors[mine].ends for reply in replies)
        assert num_ended <= 4, "what ran already, and a turn of each"
        for reply in replies:
            await harness.ended(mine, reply)
        await harness.idle()


async def test_one_users_long_texts_do_not_keep_anothers_from_being_read(encoders: Encoders) -> None:
    """Whoever pastes long texts has them encoded one after the other; others have their turns between them."""
    async with Harness(encoders["chatml"], limits=Limits(max_generations_per_user=200)) as harness:
        pool, gate = harness.service._core.pool, threading.Event()
        mine = await harness.create(params={"max_tokens": 1})
        theirs = await harness.create(user=BOB, params={"max_tokens": 1})
        held = [asyncio.create_task(pool.run(BOB, gate.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        sessions = [mine, *[await harness.create(params={"max_tokens": 1}) for _ in range(29)]]
        long = "word " * 600
        many = [asyncio.create_task(harness.say(session, long)) for session in sessions]
        await harness.until(lambda: pool.num_waiting == len(many))
        one = asyncio.create_task(harness.say(theirs, long, user=BOB))
        await harness.until(lambda: pool.num_waiting == len(many) + 1)
        gate.set()
        await one
        assert sum(task.done() for task in many) < 15, "they have their turns while the other one's is stored"
        await asyncio.gather(*many, *held)
        await harness.idle()


async def test_after_a_death_more_may_be_waiting_than_the_queue_takes_at_once(encoders: Encoders) -> None:
    """What ran and what waited is all submitted again, and none of it is refused for the queue's sake."""
    async with Harness(encoders["chatml"], max_running=2, max_queued=2) as harness:
        session = await harness.create(params={"max_tokens": 30})
        message, first = await harness.say(session, "four at once")
        replies = [first, await harness.regenerate(session, message)]
        for reply in replies:
            await harness.writing(session, reply)
        replies += [await harness.regenerate(session, message) for _ in range(2)]
        harness.client.kill()
        await harness.until(lambda: harness.client.info is None)
        harness.client.revive(harness.make_engine())
        ends = [await harness.ended(session, reply) for reply in replies]
        assert [end.reason for end in ends] == ["length"] * 4
        await harness.idle()
