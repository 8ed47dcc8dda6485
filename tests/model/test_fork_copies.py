"""The copies of a step by a kernel: as if they were made one after the other, however they depend on each other."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatserve.model.fork_copies import MOST_COPIES, ForkCopies, independent
from chatserve.sched.plan import BlockCopy

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NUM_BLOCKS, BLOCK_SIZE = 6, 4

block_copies = st.builds(
    BlockCopy, st.integers(0, NUM_BLOCKS - 1), st.integers(0, NUM_BLOCKS - 1), st.integers(0, BLOCK_SIZE)
)


@given(copies=st.lists(block_copies, max_size=8))
@settings(max_examples=30, deadline=None)
def test_copies_are_made_one_after_the_other(copies: list[BlockCopy]) -> None:
    numbers = torch.arange(NUM_BLOCKS * 2 * BLOCK_SIZE * 4, dtype=torch.float32)
    pool = numbers.view(NUM_BLOCKS, 2, BLOCK_SIZE, 4).to(DEVICE)
    expected = pool.clone()
    for copy in copies:
        expected[copy.dst, :, : copy.num_tokens] = expected[copy.src, :, : copy.num_tokens].clone()
    ForkCopies(pool).make(copies)
    assert torch.equal(pool, expected)


@given(copies=st.lists(block_copies, max_size=12))
def test_parts_are_in_order_and_independent_in_themselves(copies: list[BlockCopy]) -> None:
    parts = list(independent(copies))
    assert [copy for part in parts for copy in part] == [copy for copy in copies if copy.src != copy.dst]
    for part in parts:
        written = [copy.dst for copy in part]
        assert len(set(written)) == len(part) > 0
        assert not set(written) & {copy.src for copy in part}


def test_forks_of_one_block_are_launched_together() -> None:
    forks = [BlockCopy(0, block, 1) for block in range(1, MOST_COPIES + 2)]
    assert [len(part) for part in independent(forks)] == [MOST_COPIES, 1]


def test_making_an_instance_changes_no_block() -> None:
    pool = torch.randn(2, 1, BLOCK_SIZE, 4, device=DEVICE)
    before = pool.clone()
    ForkCopies(pool)
    assert torch.equal(pool, before)
