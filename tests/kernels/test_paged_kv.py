"""Paged KV goes where its slot says and comes back as it was, on pools of any strides; padding goes nowhere."""

from __future__ import annotations

import pytest
import torch
from chatserve_kernels.paged_kv import gather_kv, store_kv, update_tables
from chatserve_kernels.reference import to_e4m3

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 8, 1), (2, 64, 16), (3, 80, 4), (8, 128, 128)]
NUM_BLOCKS = 9


def pools(num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the middle layer of a block-major pool of three, full of NaN."""
    pool = torch.full((NUM_BLOCKS, 3, 2, num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype, device=DEVICE)
    return pool[:, 1, 0], pool[:, 1, 1]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_row_comes_back_as_it_was_stored(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    num_kv_heads, head_dim, block_size = shape
    keys, values = pools(*shape, dtype)
    num_tokens = min(70, NUM_BLOCKS * block_size - block_size // 2)
    # As a model hands them over: parts of one merged product.
    merged = torch.randn(num_tokens, 2 * num_kv_heads + 1, head_dim, device=DEVICE).to(dtype)
    key, value = merged[:, 1 : 1 + num_kv_heads], merged[:, 1 + num_kv_heads :]
    table = torch.randperm(NUM_BLOCKS, dtype=torch.int32, device=DEVICE)
    positions = torch.arange(num_tokens, device=DEVICE)
    slots = table[positions // block_size].long() * block_size + positions % block_size
    order = torch.randperm(num_tokens, device=DEVICE)
    store_kv(key[order], value[order], keys, values, slots[order])
    room = torch.full((2, num_kv_heads, num_tokens + 3, head_dim), 7.0, dtype=dtype, device=DEVICE)
    gather_kv(room[0], room[1], keys, values, table, num_tokens)
    assert torch.equal(room[0, :, :num_tokens], key.transpose(0, 1))
    assert torch.equal(room[1, :, :num_tokens], value.transpose(0, 1))
    assert not room[:, :, num_tokens:].any()
    assert int(keys.isnan().sum()) == keys.numel() - key.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_pool_of_fp8_holds_what_is_scaled_clamped_and_rounded(dtype: torch.dtype) -> None:
    pool = torch.full((NUM_BLOCKS, 2, 3, 4, 80), 7.0, device=DEVICE).to(torch.float8_e4m3fn)
    key, value = (torch.randn(2, 21, 3, 80, device=DEVICE) * 100).to(dtype)
    key[3, 1, :4] = torch.tensor([torch.inf, -torch.inf, 6e4, -6e4])
    slots = torch.randperm(NUM_BLOCKS * 4, device=DEVICE)[:21]
    slots[5] = -1
    store_kv(key, value, pool[:, 0], pool[:, 1], slots, torch.tensor([0.25, 3.0], device=DEVICE))
    stored = pool.float().permute(1, 0, 3, 2, 4).reshape(2, NUM_BLOCKS * 4, 3, 80)
    kept = slots >= 0
    assert torch.equal(stored[0, slots[kept]], to_e4m3(key, 0.25).float()[kept])
    assert torch.equal(stored[1, slots[kept]], to_e4m3(value, 3.0).float()[kept])
    assert stored[0, slots[3], 1, :4].tolist() == [448.0, -448.0, 448.0, -448.0]
    assert int((stored != 7.0).any(-1).any(-1).sum()) == 2 * int(kept.sum())

    table = torch.arange(NUM_BLOCKS, dtype=torch.int32, device=DEVICE)
    room = torch.empty((2, 3, NUM_BLOCKS * 4, 80), dtype=dtype, device=DEVICE)
    gather_kv(room[0], room[1], pool[:, 0], pool[:, 1], table, NUM_BLOCKS * 4)
    assert torch.equal(room.float(), stored.transpose(1, 2)), "widened, not multiplied"


def test_scales_go_with_pools_of_fp8_alone() -> None:
    keys, values = pools(2, 16, 4, torch.float32)
    key, value = torch.randn(2, 1, 2, 16, device=DEVICE)
    slots = torch.tensor([3], device=DEVICE)
    with pytest.raises(ValueError, match=r"kv_scales with a cache of float8_e4m3fn and no other, got torch.float32"):
        store_kv(key, value, keys, values, slots, torch.ones(2, device=DEVICE))
    keys, values = keys.to(torch.float8_e4m3fn), values.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"kv_scales with a cache of float8_e4m3fn and no other"):
        store_kv(key, value, keys, values, slots)
    with pytest.raises(ValueError, match=r"expected float32 kv_scales \[2\], got torch.float16 \[2\]"):
        store_kv(key, value, keys, values, slots, torch.ones(2, device=DEVICE).half())


def test_padding_is_stored_nowhere() -> None:
    keys, values = pools(2, 16, 4, torch.float32)
    key, value = torch.randn(2, 3, 2, 16, device=DEVICE)
    store_kv(key, value, keys, values, torch.tensor([-1, 6, -1], device=DEVICE))
    assert torch.equal(keys[1, :, 2], key[1])
    assert torch.equal(values[1, :, 2], value[1])
    keys[1, :, 2] = values[1, :, 2] = torch.nan
    assert keys.isnan().all()
    assert values.isnan().all()


@pytest.mark.gpu
def test_a_pool_may_have_more_than_2_31_elements() -> None:
    """Offsets alone are looked at: the tensors are views that overlap, of a stride that 32 bits do not hold.

    Takes 5 GB."""
    pool = torch.empty(2**31 + 4096, dtype=torch.float16, device=DEVICE)
    keys = pool.as_strided((2**20 + 1, 1, 2, 16), (2048, 32, 16, 1))
    value = torch.randn(1, 1, 16, device=DEVICE).half()
    store_kv(value, value, keys, keys, torch.tensor([2 * 2**20], device=DEVICE))
    assert torch.equal(pool[2**31 :][:16], value.view(-1))
    room = torch.zeros(2, 1, 1, 16, dtype=torch.float16, device=DEVICE)
    gather_kv(room[0], room[1], keys, keys, torch.tensor([2**20], dtype=torch.int32, device=DEVICE), 1)
    assert torch.equal(room[1, 0, 0], value.view(-1))


def test_tables_change_where_they_are_told_to() -> None:
    tables = torch.arange(60, dtype=torch.int32, device=DEVICE).view(4, 15)
    update_tables(tables, torch.tensor([59, -1, 16], device=DEVICE), torch.tensor([1000, 5, 2000], device=DEVICE))
    expected = torch.arange(60, dtype=torch.int32)
    expected[59], expected[16] = 1000, 2000
    assert torch.equal(tables.view(-1).cpu(), expected)


def test_what_does_not_fit_together_is_refused() -> None:
    keys, values = pools(2, 16, 4, torch.float32)
    room = torch.zeros(2, 2, 3, 16, device=DEVICE)
    table = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="room for 4 tokens"):
        gather_kv(room[0], room[1], keys, values, table, 4)
    with pytest.raises(ValueError, match="caches of 2 heads of 16"):
        store_kv(room[0].transpose(0, 1), room[1].transpose(0, 1), keys[:, :1], values[:, :1], table.long())
    with pytest.raises(ValueError, match=r"int64 slots \[3\], got torch.int32 \[4\]"):
        store_kv(room[0].transpose(0, 1), room[1].transpose(0, 1), keys, values, table)
    with pytest.raises(ValueError, match="contiguous int32"):
        update_tables(table.long().view(2, 2), table.long(), table.long())
