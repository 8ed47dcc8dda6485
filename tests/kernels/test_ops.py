"""The operator says the truth about itself, computes what the kernels do, and compiles in one graph with its
neighbours."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from chatserve_kernels.device_plan import DevicePlan, make_planner, make_prefill_planner
from chatserve_kernels.forest import CostModel
from chatserve_kernels.forest_decode import DecodeWorkspace
from chatserve_kernels.ops import PagedAttention, store_and_attend
from chatserve_kernels.reference import prefill_attention, to_e4m3

from tests.kernels.decode_cases import DEVICE, SMALL_CONFIGS, Case, Heads, assert_close, flat

HEADS = Heads(4, 2, 16)
FP8 = Heads(4, 2, 16, kv_dtype=torch.float8_e4m3fn)
ENDS = [40, 17, 5]
TILES = {"num_processors": 4, "num_heads": 4, "num_kv_heads": 2, "block_size": HEADS.block_size}


class Batch:
    """Rows whose last tokens are new, one each or several, and the operator's arguments for them."""

    def __init__(self, lengths: list[int], heads: Heads = HEADS) -> None:
        self.lengths = lengths
        self.scales = None if heads.kv_dtype is None else torch.tensor([0.5, 3.0], device=DEVICE)
        self.starts = [end - length for end, length in zip(ENDS, lengths, strict=True)]
        case = Case(flat(ENDS, heads.block_size), heads)
        self.cache = case.pool[:, 1]
        self.tables = case.tables
        num_tokens = sum(lengths)
        self.query = torch.randn(num_tokens, 4, 16, device=DEVICE)
        self.key, self.value = torch.randn(2, num_tokens, 2, 16, device=DEVICE)
        where = [(row, start + index) for row, start in enumerate(self.starts) for index in range(lengths[row])]
        slots = [int(self.tables[row, token // 16]) * 16 + token % 16 for row, token in where]
        self.slots = torch.tensor(slots, device=DEVICE)
        if max(lengths) == 1:
            decode = make_planner(SMALL_CONFIGS, max_rows=3, max_context=64, cost=CostModel(), **TILES)
            layout, plan = decode.layout, decode.plan(case.forest.tables, np.array(ENDS))
        else:
            prefill = make_prefill_planner(SMALL_CONFIGS, max_tokens=num_tokens, max_rows=3, **TILES)
            layout, plan = prefill.layout, prefill.plan(np.array(self.starts), np.array(lengths))
        device_plan = DevicePlan(layout, SMALL_CONFIGS, DEVICE)
        device_plan.send(plan)
        self.attention = PagedAttention(device_plan, DecodeWorkspace(layout, 4, 2, 16, DEVICE))

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.query, self.key, self.value, self.cache, self.slots, self.tables

    def expected(self) -> torch.Tensor:
        """After the store."""
        starts, lengths = torch.tensor(self.starts), torch.tensor(self.lengths)
        keys, values = self.cache.unbind(1)
        key_scale, value_scale = (None, None) if self.scales is None else self.scales.split(1)
        return prefill_attention(
            self.query, keys, values, self.tables, starts, lengths,
            scale=0.2, softcap=3.0, key_scale=key_scale, value_scale=value_scale,
        )  # fmt: skip


@pytest.mark.parametrize("lengths", [[1, 1, 1], [6, 1, 5]])
def test_it_stores_and_attends(lengths: list[int]) -> None:
    batch = Batch(lengths)
    batch.cache.view(-1, 2, 2, 16, 16)[batch.slots // 16, :, :, batch.slots % 16] = torch.nan
    out = batch.attention(*batch.tensors(), scale=0.2, softcap=3.0)
    assert_close(out, batch.expected())


@pytest.mark.parametrize("lengths", [[1, 1, 1], [6, 1, 5]])
def test_it_stores_8_bits_and_attends_to_them(lengths: list[int]) -> None:
    batch = Batch(lengths, FP8)
    before = batch.cache.float()
    batch.key.mul_(2000)  # some are more than e4m3 holds
    out = batch.attention(*batch.tensors(), scale=0.2, softcap=3.0, kv_scales=batch.scales)
    stored = batch.cache.float()[batch.slots // 16, :, :, batch.slots % 16]
    assert torch.equal(stored[:, 0], to_e4m3(batch.key, 0.5).float())
    assert torch.equal(stored[:, 1], to_e4m3(batch.value, 3.0).float())
    assert int((batch.cache.float().nan_to_num(7.0) != before.nan_to_num(7.0)).any(-1).sum()) <= 4 * sum(lengths)
    assert_close(out, batch.expected())
    with pytest.raises(ValueError, match="kv_scales with a cache of float8_e4m3fn"):
        batch.attention(*batch.tensors(), scale=0.2)


@pytest.mark.parametrize("heads", [HEADS, FP8], ids=["float32", "fp8"])
@pytest.mark.parametrize("lengths", [[1, 1, 1], [6, 1, 5]])
def test_torch_finds_no_fault_with_it(lengths: list[int], heads: Heads) -> None:
    batch = Batch(lengths, heads)
    # The check compares copies, and NaN equals nothing.
    batch.cache = batch.cache.float().nan_to_num(0.5).to(batch.cache.dtype)
    attention = batch.attention
    plan = (attention.plan.packed, attention.handle, 0.2, None, batch.scales)
    # One of its checks compares by arithmetic that torch does not have for 8-bit floats.
    utils = {} if heads is HEADS else {"test_utils": ("test_autograd_registration", "test_faketensor")}
    torch.library.opcheck(store_and_attend, (*batch.tensors(), *plan), **utils)


def test_it_is_part_of_one_compiled_graph() -> None:
    batch = Batch([6, 1, 5])

    def layer(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        out = batch.attention(query * 2, key, value + 1, *rest, scale=0.1, softcap=3.0)
        return out.flatten(1).relu() + rest[0][0, 0, 0, 0, 0]

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    got = compiled(*batch.tensors())
    stored = batch.cache.clone()
    batch.value = batch.value + 1
    expected = batch.expected().flatten(1).relu() + batch.cache[0, 0, 0, 0, 0]
    assert_close(got, expected)
    layer(*batch.tensors()[:2], batch.value - 1, *batch.tensors()[3:])
    assert torch.equal(stored.nan_to_num(7.0), batch.cache.nan_to_num(7.0))


def test_a_handle_ends_with_its_owner() -> None:
    batch = Batch([1, 1, 1])
    packed, handle = batch.attention.plan.packed, batch.attention.handle
    del batch.attention
    gc.collect()
    with pytest.raises(ValueError, match=f"handle of a PagedAttention, got {handle}"):
        torch.ops.chatserve.store_and_attend(*batch.tensors(), packed, handle, 0.2, None)
