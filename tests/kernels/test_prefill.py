"""Prefill over a paged prefix equals decoding its tokens one by one, and a plan of it covers every key once."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from chatserve_kernels.device_plan import DecodeConfigs, DevicePlan, make_prefill_planner
from chatserve_kernels.forest_decode import DecodeWorkspace, forest_decode, paged_prefill
from chatserve_kernels.reference import prefill_attention
from chatserve_kernels.work import PlanError
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.decode_cases import DEVICE, SMALL_CONFIGS, Case, Heads, assert_close, flat


def check(
    starts: list[int],
    lengths: list[int],
    heads: Heads,
    *,
    window: int | None = None,
    softcap: float | None = None,
    scales: tuple[float, float] | None = None,
    num_processors: int = 6,
    configs: DecodeConfigs = SMALL_CONFIGS,
    top_of: int | None = None,
) -> None:
    """`top_of`: blocks of a pool whose last ones are read."""
    case = Case(flat([start + length for start, length in zip(starts, lengths, strict=True)], heads.block_size), heads)
    if top_of is not None:
        case.move_to_top_of_pool(top_of)
    num_tokens = sum(lengths)
    query = torch.randn(num_tokens, heads.num_heads, heads.head_dim, device=DEVICE).to(heads.dtype)
    planner = make_prefill_planner(
        configs,
        num_processors=num_processors,
        max_tokens=num_tokens,
        max_rows=len(lengths),
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        block_size=heads.block_size,
    )
    plan = DevicePlan(planner.layout, configs, DEVICE)
    plan.send(planner.plan(np.array(starts), np.array(lengths), window=window))
    workspace = DecodeWorkspace(planner.layout, heads.num_heads, heads.num_kv_heads, heads.head_dim, DEVICE)
    workspace.out.fill_(torch.nan)
    out = torch.full_like(query, torch.nan)
    key_scale, value_scale = (None, None) if scales is None else torch.tensor(scales, device=DEVICE).split(1)
    options = {"scale": 0.2, "softcap": softcap, "key_scale": key_scale, "value_scale": value_scale}
    paged_prefill(query, case.key, case.value, case.tables, plan, workspace, **options, out=out)
    expected = prefill_attention(
        query,
        case.key,
        case.value,
        case.tables,
        torch.tensor(starts),
        torch.tensor(lengths),
        window=window,
        **options,
    )
    assert_close(out, expected)
    with pytest.raises(ValueError, match="expected a decode plan"):
        forest_decode(query, case.key, case.value, case.tables, plan, workspace, scale=0.2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_new_tokens_on_histories_of_awkward_lengths(dtype):
    check([0, 16, 17, 160, 0], [17, 1, 33, 5, 1], Heads(dtype=dtype))


def test_the_top_of_a_pool():
    check([40, 0], [20, 50], Heads(), top_of=100)


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 80), (7, 1, 96), (2, 2, 256)])
def test_head_sizes_and_groups(num_heads, num_kv_heads, head_dim):
    check([40, 0], [20, 50], Heads(num_heads, num_kv_heads, head_dim))


@pytest.mark.parametrize("window", [1, 20, 64])
def test_a_sliding_window(window):
    check([100, 0], [30, 70], Heads(), window=window)


def test_a_soft_cap():
    check([100, 0], [30, 20], Heads(), softcap=2.0)


def test_keys_and_values_of_8_bits_are_widened_and_scaled():
    check([40, 0], [20, 50], Heads(dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn), scales=(0.7, 3.0))


@settings(max_examples=6, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 150), st.integers(1, 60)), min_size=1, max_size=4),
    st.integers(1, 9),
    st.sampled_from([None, 40]),
)
def test_any_chunks(chunks, num_processors, window):
    starts, lengths = (list(each) for each in zip(*chunks, strict=True))
    check(starts, lengths, Heads(3, 1, head_dim=16), num_processors=num_processors, window=window)


def test_more_tokens_than_the_planner_was_made_for_are_refused():
    planner = make_prefill_planner(
        SMALL_CONFIGS,
        num_processors=6,
        max_tokens=8,
        max_rows=2,
        num_heads=4,
        num_kv_heads=2,
        block_size=16,
    )
    with pytest.raises(PlanError, match="at most 8 tokens, got 9"):
        planner.plan(np.array([0, 3]), np.array([4, 5]))
    with pytest.raises(PlanError, match="window of at least 1 token, or None, got 0"):
        planner.plan(np.array([0]), np.array([4]), window=0)


@pytest.mark.parametrize("block_size", [0, 24])
def test_blocks_that_are_no_power_of_two_are_refused(block_size):
    with pytest.raises(PlanError, match=f"a power of two, got {block_size}"):
        make_prefill_planner(
            SMALL_CONFIGS,
            num_processors=6,
            max_tokens=8,
            max_rows=2,
            num_heads=4,
            num_kv_heads=2,
            block_size=block_size,
        )
