"""Swaps and copies move exactly the blocks that a plan names, bit for bit, in the order of the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatserve.model.kv_storage import KVStorage
from chatserve.model.shapes import KVShape
from chatserve.sched.plan import BlockCopy, SwapIn, SwapOut, Transfers

if TYPE_CHECKING:
    from collections.abc import Sequence

SHAPE = KVShape(num_layers=2, num_kv_heads=2, head_dim=3, block_size=4)
NUM_BLOCKS = 8


def storage(seed: int = 0) -> KVStorage:
    made = KVStorage(
        SHAPE, num_blocks=NUM_BLOCKS, num_host_blocks=NUM_BLOCKS, dtype=torch.float32, device=torch.device("cpu")
    )
    generator = torch.Generator().manual_seed(seed)
    for pool in (made.device_pool, made.host_pool):
        # Every bit pattern, NaN and infinities included, must survive.
        pool.copy_(
            torch.randint(-(2**31), 2**31, pool.shape, generator=generator, dtype=torch.int32).view(torch.float32)
        )
    return made


def bits(pool: torch.Tensor) -> torch.Tensor:
    return pool.view(torch.int32).clone()


def test_a_block_is_one_contiguous_run() -> None:
    block = storage().device_pool[3]
    assert block.is_contiguous()
    assert block.numel() == SHAPE.block_elements


def test_out_and_in_again_is_bitwise_the_same() -> None:
    kv = storage()
    before = bits(kv.device_pool)
    kv.execute(Transfers(swap_out=tuple(SwapOut(block, 7 - block) for block in (1, 2, 5))))
    kv.device_pool.fill_(torch.nan)
    kv.execute(Transfers(swap_in=tuple(SwapIn(7 - block, block) for block in (1, 2, 5))))
    for block in (1, 2, 5):
        assert torch.equal(bits(kv.device_pool)[block], before[block])


def test_a_copy_moves_the_first_tokens_alone() -> None:
    kv = storage()
    before = bits(kv.device_pool)
    kv.execute(Transfers(copies=(BlockCopy(2, 6, 3),)))
    after = bits(kv.device_pool)
    assert torch.equal(after[6][..., :3, :], before[2][..., :3, :])
    assert torch.equal(after[6][..., 3:, :], before[6][..., 3:, :])
    rest = [block for block in range(NUM_BLOCKS) if block != 6]
    assert torch.equal(after[rest], before[rest])


def test_a_block_swapped_out_may_be_reused_by_a_swap_in_and_a_copy_of_the_same_step() -> None:
    kv = storage()
    device, host = bits(kv.device_pool), bits(kv.host_pool)
    kv.execute(
        Transfers(swap_out=(SwapOut(0, 3), SwapOut(1, 4)), swap_in=(SwapIn(6, 0),), copies=(BlockCopy(0, 1, 4),))
    )
    assert torch.equal(bits(kv.host_pool)[3], device[0])
    assert torch.equal(bits(kv.host_pool)[4], device[1])
    assert torch.equal(bits(kv.device_pool)[0], host[6])
    assert torch.equal(bits(kv.device_pool)[1], host[6])


pairs = st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True).flatmap(
    lambda sources: st.permutations(range(NUM_BLOCKS)).map(lambda targets: list(zip(sources, targets, strict=False)))
)


@given(out=pairs, into=pairs, copies=pairs)
@settings(max_examples=60, deadline=None)
def test_joined_copies_equal_one_copy_a_block(
    out: Sequence[tuple[int, int]], into: Sequence[tuple[int, int]], copies: Sequence[tuple[int, int]]
) -> None:
    kv = storage(1)
    device, host = bits(kv.device_pool), bits(kv.host_pool)
    for src, dst in out:
        host[dst] = device[src]
    for src, dst in into:
        device[dst] = host[src]
    for src, dst in copies:
        device[dst][..., :2, :] = device[src][..., :2, :].clone()
    kv.execute(
        Transfers(
            swap_out=tuple(SwapOut(*pair) for pair in out),
            swap_in=tuple(SwapIn(*pair) for pair in into),
            copies=tuple(BlockCopy(*pair, 2) for pair in copies),
        )
    )
    assert torch.equal(bits(kv.device_pool), device)
    assert torch.equal(bits(kv.host_pool), host)
