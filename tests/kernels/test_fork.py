"""Copy-on-write by the kernels alone: a fork inside a block, and both sides decoding on in blocks of their own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from chatserve_kernels.device_plan import DevicePlan, make_planner
from chatserve_kernels.forest import CostModel
from chatserve_kernels.forest_decode import DecodeWorkspace, forest_decode
from chatserve_kernels.fused import copy_blocks
from chatserve_kernels.paged_kv import store_kv
from chatserve_kernels.reference import decode_attention

from tests.kernels.decode_cases import DEVICE, SMALL_CONFIGS, assert_close

BLOCK, HEADS, KV_HEADS, HEAD_DIM = 16, 2, 1, 32
GENERATOR = torch.Generator(device=DEVICE)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=GENERATOR, device=DEVICE)


def late() -> None:
    """What is launched before is done late, where launches fail to wait for each other."""
    if DEVICE.type == "cuda":
        torch.cuda._sleep(int(torch.randint(200_000, ()).item()))


@pytest.mark.parametrize("shared", [5, 46])
def test_both_sides_of_a_fork_read_what_an_unforked_run_would(shared):
    """`shared` tokens in common, of which the last block's are copied, while both sides go on into new blocks."""
    GENERATOR.manual_seed(shared)
    pool = torch.full((16, 2, KV_HEADS, BLOCK, HEAD_DIM), torch.nan, device=DEVICE)
    keys, values = pool.unbind(1)
    history = randn(shared, 2, KV_HEADS, HEAD_DIM)
    full, partial = divmod(shared, BLOCK)
    blocks = [11, 4, 7][: full + 1]
    slots = [blocks[token // BLOCK] * BLOCK + token % BLOCK for token in range(shared)]
    store_kv(history[:, 0], history[:, 1], keys, values, torch.tensor(slots, device=DEVICE))
    tables = np.array([[*blocks, 2, 9], [*blocks[:full], 13, 1, 8]], dtype=np.int32)
    late()
    copy_blocks(pool, *(torch.tensor([number], device=DEVICE) for number in (blocks[full], 13, partial)))
    assert partial, "the fork is inside a block"

    planner = make_planner(
        SMALL_CONFIGS,
        num_processors=6,
        max_rows=2,
        max_context=tables.shape[1] * BLOCK,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        block_size=BLOCK,
        cost=CostModel(min_tokens=16),
    )
    plan = DevicePlan(planner.layout, SMALL_CONFIGS, DEVICE)
    workspace = DecodeWorkspace(planner.layout, HEADS, KV_HEADS, HEAD_DIM, DEVICE)
    on_device = torch.from_numpy(tables).to(DEVICE)
    unforked = torch.stack([history, history])  # a copy of the history for each side
    for step in range(20 if DEVICE.type == "cuda" else 4):
        new = randn(2, 2, KV_HEADS, HEAD_DIM)
        query = randn(2, HEADS, HEAD_DIM)
        position = shared + step
        at = torch.from_numpy(tables[:, position // BLOCK].astype(np.int64) * BLOCK + position % BLOCK).to(DEVICE)
        late()
        store_kv(new[:, 0], new[:, 1], keys, values, at)
        plan.send(planner.plan(tables, np.full(2, position + 1), same_rows=step > 0))
        late()
        out = forest_decode(query, keys, values, on_device, plan, workspace, scale=0.2)
        unforked = torch.cat([unforked, new[:, None]], 1)
        contiguous = unforked.transpose(2, 3).transpose(1, 3)  # [rows, 2, heads, tokens, head_dim]: a block a row
        alone = decode_attention(
            query,
            contiguous[:, 0],
            contiguous[:, 1],
            torch.arange(2)[:, None],
            torch.full((2,), position + 1),
            scale=0.2,
        )
        assert_close(out, alone)
