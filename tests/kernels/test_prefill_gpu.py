"""Prefill on a real GPU: what the copy engine and the tensor cores make of awkward chunks, heads and pools."""

from __future__ import annotations

import pytest
import torch
from chatserve_kernels.configs import prefill_configs
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.decode_cases import Heads
from tests.kernels.test_prefill import check

pytestmark = pytest.mark.gpu
LLAMA = Heads(num_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)


def check_on_gpu(starts: list[int], lengths: list[int], heads: Heads, **options) -> None:
    configs = prefill_configs(heads.head_dim, is_half=heads.dtype != torch.float32)
    check(starts, lengths, heads, num_processors=132, configs=configs, **options)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 1500), st.integers(1, 300)), min_size=1, max_size=5),
    st.sampled_from([None, 1, 100, 700]),
    st.sampled_from([None, 5.0]),
)
def test_any_chunks(chunks, window, softcap):
    starts, lengths = (list(each) for each in zip(*chunks, strict=True))
    check_on_gpu(starts, lengths, LLAMA, window=window, softcap=softcap)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(14, 2), (8, 8), (16, 1)])
def test_head_sizes_types_and_groups(head_dim, dtype, num_heads, num_kv_heads):
    check_on_gpu([300, 0, 17], [70, 150, 1], Heads(num_heads, num_kv_heads, head_dim, dtype=dtype))


@pytest.mark.parametrize("block_size", [8, 32, 64, 128])
def test_block_sizes(block_size):
    check_on_gpu([300, 0], [70, 150], Heads(8, 2, 128, block_size=block_size, dtype=torch.float16))


def test_keys_and_values_of_8_bits():
    heads = Heads(32, 8, 128, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
    check_on_gpu([700, 0], [100, 333], heads, scales=(0.7, 3.0))


def test_64_tokens_on_a_long_history():
    check_on_gpu([8192], [64], LLAMA)


def test_blocks_at_the_top_of_a_large_pool():
    check_on_gpu([1024, 0], [300, 70], LLAMA, top_of=6 * 2**30 // (2 * 8 * 16 * 128 * 2))
