"""A block is free, private, cached or vacated, and is never handed out under a copy."""

from __future__ import annotations

import pytest

from chatserve.cache.block_pool import BlockPool
from chatserve.types import BlockId


def pool_of(num_blocks: int) -> BlockPool[BlockId]:
    return BlockPool(num_blocks)


def test_all_blocks_can_be_had_once_and_come_back() -> None:
    pool = pool_of(5)
    taken = [pool.acquire() for _ in range(5)]
    assert taken == [0, 1, 2, 3, 4]
    assert pool.num_free == 0
    for block_id in taken:
        pool.release(block_id)
        pool.check()
    assert pool.num_free == 5


def test_a_released_block_waits_for_every_copy_that_uses_it() -> None:
    pool = pool_of(1)
    block_id = pool.acquire()
    pool.hold(block_id)
    pool.hold(block_id)
    pool.release(block_id)
    pool.check()
    assert pool.num_free == 0
    pool.unhold(block_id)
    assert pool.num_free == 0
    assert pool.counts(pinned=0).transit == 1
    pool.unhold(block_id)
    pool.check()
    assert pool.num_free == 1


def test_a_block_that_is_swapped_out_serves_the_same_step_at_once() -> None:
    pool = pool_of(1)
    pool.cache(pool.acquire())
    pool.vacate(BlockId(0))
    pool.check()
    assert pool.acquire() == 0
    assert pool.close_step() == ()
    pool.check()


def test_a_block_that_is_swapped_out_serves_later_steps_once_it_has_been_read() -> None:
    pool = pool_of(1)
    pool.cache(pool.acquire())
    pool.vacate(BlockId(0))
    assert pool.close_step() == (0,)
    pool.check()
    assert (pool.num_free, pool.num_free_soon) == (0, 1)
    pool.unhold(BlockId(0))
    pool.check()
    assert pool.num_free == 1


def test_counts_and_letters_name_every_block_once() -> None:
    pool = pool_of(5)
    private, cached, held, vacated = (pool.acquire() for _ in range(4))
    for block_id in (cached, vacated):
        pool.cache(block_id)
    pool.hold(held)
    pool.vacate(vacated)
    counts = pool.counts(pinned=2)
    assert (counts.total, counts.free, counts.private, counts.cached, counts.transit) == (5, 1, 1, 1, 2)
    assert [pool.letter(block_id) for block_id in (private, cached, held, vacated, BlockId(4))] == list("pcttf")


@pytest.mark.parametrize("misuse", ["release", "cache", "uncache", "hold", "unhold", "vacate"])
def test_a_free_block_can_only_be_acquired(misuse: str) -> None:
    pool = pool_of(1)
    with pytest.raises(AssertionError):
        getattr(pool, misuse)(BlockId(0))
