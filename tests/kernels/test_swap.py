"""Blocks move in as few copies as their places allow, and in order with the work around them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from chatserve_kernels.host_pool import HostPool
from chatserve_kernels.swap import BlockMover, block_runs
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=30), st.sampled_from([None, 1, 4, 5]))
def test_runs_are_the_pairs_in_their_order(pairs, slab_blocks):
    host, device = ([pair[index] for pair in pairs] for index in range(2))
    runs = block_runs(np.array(host, dtype=np.int64), np.array(device, dtype=np.int64), slab_blocks)
    moved = [(first + i, to + i) for first, to, length in runs.tolist() for i in range(length)]
    assert moved == pairs
    for (first, to, length), (next_first, next_to, _) in zip(runs.tolist(), runs.tolist()[1:], strict=False):
        joins = (first + length, to + length) == (next_first, next_to)
        assert not joins or (slab_blocks is not None and next_first % slab_blocks == 0)
    if slab_blocks is not None:
        assert all(first // slab_blocks == (first + length - 1) // slab_blocks for first, _, length in runs.tolist())


def test_neighbours_are_one_run():
    assert block_runs([3, 4, 5, 9], [7, 8, 9, 10]).tolist() == [[3, 7, 3], [9, 10, 1]]
    assert block_runs([3, 4, 5], [7, 8, 9], slab_blocks=4).tolist() == [[3, 7, 1], [4, 8, 2]]
    assert block_runs([], []).shape == (0, 3)


def test_pools_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="contiguous"):
        BlockMover(torch.zeros(4, 8).T, torch.zeros(4, 8))
    with pytest.raises(ValueError, match="expected host blocks of 32 bytes, got 28"):
        BlockMover(torch.zeros(4, 8), torch.zeros(4, 7))
    with pytest.raises(ValueError, match="a CUDA device and the host, got cpu, cpu"):
        BlockMover(torch.zeros(4, 8), torch.zeros(4, 8))


@pytest.mark.parametrize(("shape", "slab_blocks"), [((1024,), 4), ((3, 1000), 128), ((5,), 1024), ((2**20,), 1)])
def test_a_host_pools_slabs_begin_at_pages_and_blocks(shape, slab_blocks):
    pool = HostPool(7, shape, torch.float32, slab_bytes=16_384)
    assert pool.slab_blocks == slab_blocks
    assert pool.blocks.shape == (7, *shape)
    assert pool.blocks.data_ptr() % 4096 == 0
    assert pool.slab_blocks * pool.blocks[0].nbytes % 4096 == 0
    assert pool.num_pinned == 0
    pool.blocks[6] = 1.0
    assert pool.blocks.sum() == pool.blocks[6].numel()
    with pytest.raises(ValueError, match="at most 7 blocks, got 8"):
        pool.pin(8)
    with pytest.raises(ValueError, match="at least one block"):
        HostPool(0, shape, torch.float32)


@pytest.fixture
def pools():
    host = HostPool(40, (3, 4096), torch.float32, slab_bytes=2**19)
    host.pin(40)
    assert host.slab_blocks < 20
    host.blocks.normal_()
    device = torch.randn(40, 3, 4096, device="cuda")
    yield device, host, BlockMover(device, host.blocks, slab_blocks=host.slab_blocks)
    torch.cuda.synchronize()
    host.close()


@pytest.mark.gpu
def test_blocks_arrive_where_they_should_and_no_others_change(pools):
    device, host, mover = pools
    rng = np.random.default_rng(0)
    for has_batches in (True, False):
        mover._runtime.has_batches &= has_batches
        for into in (True, False):
            # Some scattered, and a run that crosses slabs.
            sources = np.r_[rng.permutation(8), 10:39]
            targets = np.r_[rng.permutation(8), 11:40]
            before = device.cpu() if into else host.blocks.clone()
            read = host.blocks.clone() if into else device.cpu()
            (mover.into if into else mover.out)(sources, targets).synchronize()
            before[targets] = read[sources]
            assert torch.equal(device.cpu() if into else host.blocks, before)
    mover.out([], []).synchronize()
    for move in (mover.out, mover.into):
        with pytest.raises(ValueError, match="blocks from 0 to 39, got 40 to 40"):
            move([40], [0])
        with pytest.raises(ValueError, match="blocks from 0 to 39, got -1 to -1"):
            move([0], [-1])


@pytest.mark.gpu
def test_moves_are_in_order_with_the_step_that_is_running(pools):
    """A block moves out after the step that fills it, in after the step that reads what it replaces, and back after it
    has moved out; the next step waits for the event."""
    device, host, mover = pools
    for turn in range(5):
        old = device[1].clone()
        torch.cuda._sleep(20_000_000)
        device[0] = float(turn)
        seen = device[1] * 1.0
        out = mover.out([0], [5])
        into = mover.into([5], [1], after=[out])
        torch.cuda.current_stream().wait_event(into)
        moved = device[1] * 1.0
        torch.cuda.synchronize()
        assert torch.equal(seen, old)
        assert (host.blocks[5] == turn).all()
        assert (moved == turn).all()
