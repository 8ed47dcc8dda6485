"""Forest decode attention equals its float64 reference, whatever the shapes, the sharing and the memory around it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from chatserve_kernels.device_plan import DevicePlan, make_planner
from chatserve_kernels.forest import CostModel
from chatserve_kernels.forest_decode import DecodeWorkspace, forest_decode
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.decode_cases import DEVICE, SMALL_CONFIGS, Case, Heads, assert_close, flat, forest
from tests.kernels.test_plan import forests

AWKWARD = [1, 15, 16, 17, 31, 32, 33, 63, 64, 65]
SHARED = [[("system", 128), (f"trunk {row // 5}", 128), (str(row), 5 + row)] for row in range(9)]
"""A prefix for wide tiles under trunks for small ones, over own tails."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_awkward_lengths(dtype):
    Case(flat(AWKWARD, 16), Heads(dtype=dtype)).check()


def test_rows_without_tokens_are_zero():
    out = Case(flat([0, 40, 0], 16)).check()
    assert not out[[0, 2]].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_rows_share_is_read_once_with_the_same_result(dtype):
    case = Case(forest(SHARED, 16), Heads(dtype=dtype))
    assert_close(case.check(share=True), case.check(share=False).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_scales", [0, 1, 2])
def test_keys_and_values_of_8_bits_are_widened_and_scaled(dtype, num_scales):
    case = Case(forest(SHARED[:6], 16), Heads(dtype=dtype, kv_dtype=torch.float8_e4m3fn), softcap=9.0)
    if num_scales:
        case.key_scale = torch.tensor([1.7, 0.4], device=DEVICE)[:num_scales].contiguous()
        case.value_scale = torch.tensor([0.6, 2.5], device=DEVICE)[:num_scales].contiguous()
    assert_close(case.check(share=True), case.check(share=False).double())


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 2), (9, 3), (7, 1), (16, 1)])
def test_head_sizes_and_groups(head_dim, num_heads, num_kv_heads):
    case = Case(forest(SHARED[:5], 16), Heads(num_heads, num_kv_heads, head_dim))
    case.check()


@pytest.mark.parametrize("block_size", [8, 32, 64])
def test_block_sizes_below_and_above_a_tile(block_size):
    paths = [[("system", 192), (str(row), 50 * row + 1)] for row in range(6)]
    Case(forest(paths, block_size), Heads(block_size=block_size)).check()


@pytest.mark.parametrize("window", [1, 16, 17, 100, 1000])
def test_a_sliding_window_hides_what_lies_before_it(window):
    case = Case(forest(SHARED, 16), window=window)
    out = case.check()
    first_hidden = case.forest.lengths - window - 1
    for row in np.flatnonzero(first_hidden >= 0):
        position = int(first_hidden[row])
        case.pool[int(case.forest.tables[row, position // 16]), :, :, :, position % 16] *= 2
    own = np.flatnonzero(first_hidden >= 256)  # hidden keys that no other row may see
    assert torch.equal(case.run()[own], out[own])


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_a_soft_cap_bends_the_scores(softcap):
    case = Case(forest(SHARED, 16), softcap=softcap, scale=3.0)
    case.check()


def test_a_window_and_a_soft_cap_together():
    Case(forest(SHARED, 16), softcap=5.0, window=70).check()


def test_a_huge_score_neither_overflows_nor_hides_the_others():
    """A score of some thousands is known to its own rounding only, in whatever order its products are summed, and so is
    each weight."""
    case = Case(flat([70, 1, 33], 16), scale=1.0)
    case.query *= 100
    largest = case.query.norm(dim=-1).max() * torch.nan_to_num(case.key).norm(dim=-1).max()
    rounding = float(largest) * torch.finfo(torch.float32).eps
    assert 2e-6 < rounding < 2e-3
    reference = case.reference()
    assert (case.run().double() - reference).norm() < rounding * reference.norm()


@pytest.mark.parametrize("with_wide", [None, True])
def test_padding_rows_are_zero_and_read_nothing(with_wide):
    """Their tables are poisoned: a read through one would be far out of the pool."""
    case = Case(flat([40, 70, 3], 16), num_padding=5)
    out = case.check(with_wide=with_wide)
    assert not out[3:].any()


def test_nothing_but_the_result_is_written():
    case = Case(forest(SHARED, 16), num_padding=2)
    before = [tensor.clone() for tensor in (case.pool, case.query, case.tables)]
    around = torch.full((len(case.query) + 2, *case.query.shape[1:]), 7.0, device=DEVICE)
    case.check(out=around[1:-1])
    for tensor, copy in zip((case.pool, case.query, case.tables), before, strict=True):
        assert torch.equal(torch.nan_to_num(tensor.double(), -1.0), torch.nan_to_num(copy.double(), -1.0))
    assert (around[[0, -1]] == 7.0).all()


def test_odd_strides():
    """Queries between other heads, keys interleaved with values, results in every second row, tables in a wider one."""
    case = Case(forest(SHARED, 16))
    heads = case.heads
    mixed = torch.full((len(case.query), heads.num_heads + 3, heads.head_dim + 5), torch.nan, device=DEVICE)
    mixed[:, 1:-2, : heads.head_dim] = case.query
    case.query = mixed[:, 1:-2, : heads.head_dim]
    pool = torch.full((*case.key.shape[:3], 2, heads.head_dim + 3), torch.nan, device=DEVICE)
    pool[:, :, :, 0, : heads.head_dim], pool[:, :, :, 1, : heads.head_dim] = case.key, case.value
    case.key, case.value = pool[:, :, :, 0, : heads.head_dim], pool[:, :, :, 1, : heads.head_dim]
    tables = torch.full((len(case.tables), case.tables.shape[1] + 3), 10**6, dtype=torch.int32, device=DEVICE)
    tables[:, : case.tables.shape[1]] = case.tables
    case.tables = tables
    out = torch.empty((2 * len(case.query), heads.num_heads, heads.head_dim), device=DEVICE)[::2]
    case.check(out=out)


def test_keys_and_values_may_have_strides_of_their_own():
    case = Case(forest(SHARED, 16))
    case.value = case.value.clone(memory_format=torch.contiguous_format)
    case.check()


def test_offsets_beyond_32_bits(tmp_path):
    """Blocks at the top of a pool of 2^32 elements: a sparse file, of which only those blocks exist."""
    case = Case(flat([40, 33], 16), Heads(dtype=torch.float16))
    num_blocks = len(case.key) + 1
    block_stride = 2**32 // num_blocks
    data = np.memmap(tmp_path / "pool", dtype=np.float16, mode="w+", shape=(2**32 + 2**20,))
    pool = torch.from_numpy(data)
    sizes = case.pool[0, 1, 0].shape
    strides = (block_stride, *case.pool[0, 1, 0].stride())
    keys = pool.as_strided((num_blocks, *sizes), strides)
    values = pool[2**19 :].as_strided((num_blocks, *sizes), strides)
    keys[1:], values[1:] = case.key.cpu(), case.value.cpu()
    case.tables = torch.where(case.tables < 10**6, case.tables + 1, case.tables)
    case.forest.tables[case.forest.tables < 10**6] += 1
    if DEVICE.type == "cuda":
        keys, values = keys.to(DEVICE), values.to(DEVICE)
    case.key, case.value = keys, values
    case.check()


def test_a_row_alone_and_among_others_is_equal_within_rounding_and_to_the_bit_with_fixed_chunks():
    lengths = [130, 300, 20, 99, 64]
    crowd = Case(flat(lengths, 16))
    alone = Case(flat(lengths, 16))
    alone.forest = alone.forest._replace(tables=alone.forest.tables[1:2], lengths=alone.forest.lengths[1:2])
    alone.query, alone.tables = alone.query[1:2], alone.tables[1:2]
    assert torch.equal(crowd.run(fixed_chunk=64)[1], alone.run(fixed_chunk=64, num_processors=3)[0])
    assert_close(crowd.run()[1], alone.run()[0].double())


def test_the_same_launch_gives_the_same_bits():
    case = Case(forest(SHARED, 16))
    first = case.run()
    assert torch.equal(first, case.run())


@settings(max_examples=12, deadline=None)
@given(
    forests(),
    st.booleans(),
    st.sampled_from([(4, 2), (3, 1), (2, 2)]),
    st.integers(0, 2),
    st.sampled_from([None, 50]),
    st.integers(1, 9),
)
def test_any_forest(rows, share, heads, num_padding, window, num_processors):
    case = Case(rows, Heads(*heads, head_dim=16), num_padding=num_padding, window=window)
    case.check(share=share, num_processors=num_processors)


def test_what_does_not_fit_together_is_refused():
    case = Case(flat([20], 16))
    case.tables = case.tables.long()
    with pytest.raises(ValueError, match="int32 tables"):
        case.run()
    case = Case(flat([20], 16))
    case.key = case.key.transpose(2, 3)
    with pytest.raises(ValueError, match="expected keys and values"):
        case.run()
    case = Case(flat([20], 16))
    case.key, case.value = case.key[:, :, :8], case.value[:, :, :8]
    with pytest.raises(ValueError, match="blocks of 16 tokens, as planned, got 8"):
        case.run()
    scales = torch.ones(3)
    for key_scale, value_scale, message in (
        (scales[:1], None, "for both keys and values"),
        (scales, scales, "expected 1 or 2 scales"),
        (scales[:1].double(), scales[:1].double(), "float32 scales"),
    ):
        case = Case(flat([20], 16), key_scale=key_scale, value_scale=value_scale)
        with pytest.raises(ValueError, match=message):
            case.run()
    case = Case(flat([20], 16))
    for factors, message in (
        ({"scale": 0.0}, "scale above 0, got 0.0"),
        ({"softcap": 0.0}, "soft cap above 0, or None, got 0.0"),
        ({"softcap": -5.0}, "soft cap above 0, or None, got -5.0"),
        ({"window": 0}, "window of at least 1 token, or None, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            Case(case.forest, **factors).run()


@pytest.mark.parametrize(
    ("rows", "heads", "message"),
    [
        (1, (4, 2, 64), r"partial results of 3 rows, got one for \d+ of 1"),
        (3, (2, 2, 64), r"expected a workspace for 4 heads of 64 and 2 KV heads, got one for \[2, 64\] and 2"),
        (3, (4, 1, 64), r"and 2 KV heads, got one for \[4, 64\] and 1"),
        (3, (4, 2, 32), r"of 64 and 2 KV heads, got one for \[4, 32\] and 2"),
    ],
)
def test_a_workspace_that_would_be_written_past_its_end_is_refused(rows, heads, message):
    case = Case(flat([20, 30, 5], 16))
    planners = {
        max_rows: make_planner(
            SMALL_CONFIGS,
            num_processors=6,
            max_rows=max_rows,
            max_context=64,
            num_heads=4,
            num_kv_heads=2,
            block_size=16,
            cost=CostModel(),
        )
        for max_rows in (1, 3)
    }
    plan = DevicePlan(planners[3].layout, SMALL_CONFIGS, DEVICE)
    plan.send(planners[3].plan(case.forest.tables, case.forest.lengths))
    workspace = DecodeWorkspace(planners[rows].layout, *heads, DEVICE)
    with pytest.raises(ValueError, match=message):
        forest_decode(case.query, case.key, case.value, case.tables, plan, workspace, scale=0.2)
