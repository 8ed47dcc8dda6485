"""Who gets blocks, what leaves for them, and what an idle block costs."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest

from chatserve.types import UserId
from tests.cache.conversations import PROMPT
from tests.cache.token_storage import Cache


def test_admission_and_growth_take_all_they_need_or_nothing() -> None:
    cache = Cache(8)
    cache.admit("one", PROMPT)
    assert cache.grow("one", 20)
    cache.chat(list(range(50, 58)))
    before = cache.kv.block_map()
    assert not cache.grow("one", 36)
    assert cache.kv.block_map() == before
    assert cache.grow("one", 32)
    assert cache.admit("two", [70]) is not None
    assert not cache.grow("two", 1)
    assert len(cache.running["one"].table) == 8


def test_a_request_that_fills_the_pool_can_be_regenerated() -> None:
    cache = Cache(8)
    token_ids = list(range(32))
    cache.chat(token_ids)
    # The block to copy from and the copy do not fit together: the last block is computed again instead.
    running = cache.chat(token_ids)
    assert running.num_matched == 28


@pytest.mark.parametrize("num_host_blocks", [0, 3, 100])
def test_with_any_host_pool_what_is_read_is_right_and_all_blocks_come_back(num_host_blocks: int) -> None:
    """CASES: conversations resident, swapped, forked and cold, under a pool of a few blocks."""
    cache = Cache(8, num_host_blocks)
    rng = random.Random(3)
    conversations = [[index] for index in range(6)]
    for _ in range(120):
        conversation = rng.choice(conversations)
        if rng.random() < 0.2 or len(conversation) > 24:
            del conversation[rng.randint(1, 20) :]
        conversation += [rng.randrange(3) for _ in range(rng.randint(1, 6))]
        running = cache.chat(conversation, chunk=5)
        assert running.num_cached + running.num_swapped_in < len(conversation)
    cache.expect_idle()
    swapped_in = cache.kv.counters["swapped_in_blocks"]
    assert (swapped_in > 0) == (num_host_blocks > 0)


def test_only_idle_leaves_are_evicted() -> None:
    cache = Cache(8)
    cache.admit("pinned", PROMPT[:8])
    assert cache.grow("pinned", 8)
    cache.step({"pinned": 8})
    for index in range(20):
        cache.chat([100 + index] * 12)
    assert cache.match([*PROMPT[:8], 1]) == 8
    cache.read_back()


@pytest.mark.parametrize("num_host_blocks", [0, 8])
def test_a_burst_of_one_off_chats_leaves_the_system_prompt(num_host_blocks: int) -> None:
    """1,000 distinct chats through a small pool: their system prompt is computed once."""
    cache = Cache(16, num_host_blocks)
    system = list(range(1000, 1012))
    for index in range(3):
        cache.chat([*system, index, 1, 2])
    for index in range(1000):
        cache.chat([5000 + index, 1, 2, 3, 4, 5])
    assert cache.kv.match([*system, 9], UserId("ann")).num_cached == len(system)


def test_chats_that_follow_one_another_under_a_system_prompt_compute_it_once() -> None:
    cache = Cache(8)
    system = list(range(1000, 1010))
    for index in range(1000):
        running = cache.chat([*system, 5000 + index, 1, 2, 3], user=f"user {index % 7}", shared=len(system))
        assert running.num_matched == (len(system) if index else 0)


def test_what_is_shared_may_not_take_more_than_half_the_pool() -> None:
    cache = Cache(8)
    for prompt in range(6):
        for tail in range(2):
            cache.chat([prompt] * 8 + [100 + tail])
    assert cache.kv._tree.num_protected <= 8 // 2 + 2
    recent = cache.chat([7, 8, 9, 10, 11, 12])
    assert cache.match([*recent.token_ids, 1]) == 6


def test_users_of_whom_nothing_is_cached_cost_nothing() -> None:
    cache = Cache(8)
    for index in range(50):
        cache.chat(PROMPT[:10], user=f"user {index}")
    cached = {node.tag for node in cache.kv._tree.walk()}
    assert len(cache.kv._tree.tags) == len(cached) < 8
    assert cache.match([*PROMPT[:10], 1], user="user 49") == 10
    assert cache.match([*PROMPT[:10], 1], user="user 0") == 0


def test_waste_is_the_last_block_of_each_sequence() -> None:
    cache = Cache(20)
    cache.admit("one", PROMPT[:6])
    assert cache.grow("one", 6)
    assert cache.kv.wasted_slots() == 8
    cache.step({"one": 5})
    assert cache.kv.wasted_slots() == 3
    cache.finish("one")
    cache.chat([90] * 9)
    assert cache.kv.wasted_slots() == 3 + 3


@pytest.mark.parametrize(("num_chats", "length"), [(4, 1600), (400, 20)])
def test_an_idle_block_costs_less_than_a_kilobyte(num_chats: int, length: int) -> None:
    cache = Cache(1000, block_size=16)
    kv, rng = cache.kv, random.Random(5)
    gc.collect()
    tracemalloc.start()
    try:
        for index in range(num_chats):
            name, token_ids = f"r{index}", [rng.randrange(50_000) for _ in range(length)]
            kv.admit(name, token_ids, UserId("ann"), 0)  # type: ignore[arg-type]
            kv.grow(name, length)  # type: ignore[arg-type]
            kv.commit(name, token_ids)  # type: ignore[arg-type]
            kv.finish(name)  # type: ignore[arg-type]
        del token_ids
        gc.collect()
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes / kv.counts()[0].cached < 1024
