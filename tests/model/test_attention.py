"""Paged attention equals its definition in float64: any lengths, tables, windows and caps, over a pool full of NaN."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatserve.model.attention import PackedBatch, TorchAttention
from chatserve.model.kv_dtype import FP8
from chatserve.model.kv_storage import KVStorage
from chatserve.model.shapes import KVShape

if TYPE_CHECKING:
    from collections.abc import Sequence

LAYERS = 2
KV_HEADS = 2
HEAD_DIM = 8


class RowSpec(NamedTuple):
    start: int
    length: int


class World:
    """Rows with a history, written through the backend itself, and the plain keys and values beside it."""

    def __init__(
        self,
        rows: Sequence[RowSpec],
        *,
        block_size: int,
        group: int,
        dtype: torch.dtype,
        seed: int,
        kv_dtype: torch.dtype | None = None,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        self.rows = rows
        self.heads = KV_HEADS * group
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        shape = KVShape(num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=block_size)
        counts = [-(-(row.start + row.length) // block_size) for row in rows]
        num_blocks = sum(counts) + 3
        self.kv_dtype = kv_dtype or dtype
        self.scales = scales if kv_dtype == FP8 else (1.0, 1.0)
        storage = KVStorage(
            shape,
            num_blocks=num_blocks,
            num_host_blocks=0,
            dtype=self.kv_dtype,
            device=torch.device("cpu"),
            compute_dtype=dtype,
            scales=[(1.0, 1.0), scales],
        )
        storage.device_pool.fill_(torch.nan)
        self.pool = storage.device_pool
        self.backend = TorchAttention(storage)
        blocks = np.random.default_rng(seed).permutation(num_blocks).tolist()
        self.tables = np.full((len(rows), max(counts)), 10**6)
        for table, count in zip(self.tables, counts, strict=True):
            table[:count] = [blocks.pop() for _ in range(count)]
        self.keys = [self.random(row.start + row.length, KV_HEADS) for row in rows]
        self.values = [self.random(row.start + row.length, KV_HEADS) for row in rows]
        for index, row in enumerate(rows):
            if row.start:
                self.attend([index], [RowSpec(0, row.start)], self.random(row.start, self.heads))

    def random(self, tokens: int, heads: int) -> torch.Tensor:
        return torch.randn(tokens, heads, HEAD_DIM, generator=self.generator).to(self.dtype)

    def attend(
        self,
        which: Sequence[int],
        rows: Sequence[RowSpec],
        query: torch.Tensor,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        batch = PackedBatch(
            np.array([row.start for row in rows]), np.array([row.length for row in rows]), self.tables[list(which)]
        )
        step = self.backend.prepare(batch)
        new = [slice(row.start, row.start + row.length) for row in rows]
        key = torch.cat([self.keys[index][some] for index, some in zip(which, new, strict=True)])
        value = torch.cat([self.values[index][some] for index, some in zip(which, new, strict=True)])
        step.attend(0, query, key, value, scale=1.0)  # another layer's KV must not be touched
        return step.attend(1, query, key, value, scale=0.3, window=window, softcap=softcap)

    def held(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        """What is left of x in the pool, in float64."""
        largest = torch.finfo(self.kv_dtype).max
        return (x.float() / scale).clamp(-largest, largest).to(self.kv_dtype).double() * scale

    def expected(self, query: torch.Tensor, window: int | None, softcap: float | None) -> torch.Tensor:
        out = []
        token = 0
        all_keys = [self.held(keys, self.scales[0]) for keys in self.keys]
        all_values = [self.held(values, self.scales[1]) for values in self.values]
        for row, keys, values in zip(self.rows, all_keys, all_values, strict=True):
            for position in range(row.start, row.start + row.length):
                low = 0 if window is None else max(0, position - window + 1)
                for head in range(self.heads):
                    shared = head // (self.heads // KV_HEADS)
                    scores = keys[low : position + 1, shared].double() @ query[token, head].double() * 0.3
                    if softcap is not None:
                        scores = softcap * torch.tanh(scores / softcap)
                    out.append(torch.softmax(scores, 0) @ values[low : position + 1, shared].double())
                token += 1
        return torch.stack(out).view(token, self.heads, HEAD_DIM)


rows_of_any_length = st.lists(
    st.one_of(
        st.builds(RowSpec, st.integers(0, 70), st.just(1)),  # decode
        st.builds(RowSpec, st.integers(0, 40), st.integers(2, 21)),  # a chunk over a prefix
        st.builds(RowSpec, st.just(0), st.integers(1, 34)),  # a fresh prompt
    ),
    min_size=1,
    max_size=6,
)


@given(
    rows=rows_of_any_length,
    block_size=st.sampled_from([1, 4, 16]),
    group=st.sampled_from([1, 3]),
    window=st.sampled_from([None, 1, 5, 16, 200]),
    softcap=st.sampled_from([None, 2.0]),
    seed=st.integers(0, 100),
)
@settings(max_examples=60, deadline=None)
def test_attention_equals_its_definition(
    rows: list[RowSpec], block_size: int, group: int, window: int | None, softcap: float | None, seed: int
) -> None:
    world = World(rows, block_size=block_size, group=group, dtype=torch.float32, seed=seed)
    query = world.random(sum(row.length for row in rows), world.heads)
    got = world.attend(range(len(rows)), rows, query, window, softcap)
    torch.testing.assert_close(got.double(), world.expected(query, window, softcap), rtol=1e-5, atol=1e-5)


@given(
    rows=rows_of_any_length,
    block_size=st.sampled_from([1, 16]),
    window=st.sampled_from([None, 5, 200]),
    softcap=st.sampled_from([None, 2.0]),
    scales=st.sampled_from([(1.0, 1.0), (0.01, 0.003), (0.7, 3.0)]),
    kv_dtype=st.sampled_from([FP8, FP8, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 100),
)
@settings(max_examples=40, deadline=None)
def test_attention_over_rounded_kv_equals_the_definition_of_what_was_kept(
    rows: list[RowSpec],
    block_size: int,
    window: int | None,
    softcap: float | None,
    scales: tuple[float, float],
    kv_dtype: torch.dtype,
    seed: int,
) -> None:
    """New keys and values too are read as they were kept; a scale of 0.003 has values saturate."""
    world = World(
        rows, block_size=block_size, group=3, dtype=torch.float32, seed=seed, kv_dtype=kv_dtype, scales=scales
    )
    query = world.random(sum(row.length for row in rows), world.heads)
    got = world.attend(range(len(rows)), rows, query, window, softcap)
    torch.testing.assert_close(got.double(), world.expected(query, window, softcap), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_block_edges_and_sixteen_bits(length: int, dtype: torch.dtype, kv_dtype: torch.dtype | None) -> None:
    rows = [RowSpec(length - 1, 1), RowSpec(40, 1), RowSpec(0, length), RowSpec(5, length)]
    scales = (0.6, 1.3)
    world = World(rows, block_size=16, group=3, dtype=dtype, seed=length, kv_dtype=kv_dtype, scales=scales)
    query = world.random(sum(row.length for row in rows), world.heads)
    got = world.attend(range(len(rows)), rows, query)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(got.double(), world.expected(query, None, None), rtol=tolerance, atol=tolerance)


def test_a_step_writes_its_own_slots_and_no_others() -> None:
    rows = [RowSpec(6, 3), RowSpec(9, 1)]
    world = World(rows, block_size=4, group=1, dtype=torch.float32, seed=1)
    before = world.pool.clone()
    query = world.random(4, world.heads)
    world.attend(range(2), rows, query)
    changed = (world.pool.nan_to_num(-1e9) != before.nan_to_num(-1e9)).any(dim=-1)
    assert int(changed.sum()) == 4 * LAYERS * 2 * KV_HEADS
    for index, row in enumerate(rows):
        for position in range(row.start, row.start + row.length):
            block = world.tables[index, position // 4]
            stored = world.pool[block, 1, :, :, position % 4]
            assert torch.equal(stored[0], world.keys[index][position])
            assert torch.equal(stored[1], world.values[index][position])


def test_very_uneven_rows_are_grouped_and_still_exact() -> None:
    rows = [RowSpec(length, 1) for length in (0, 400, 3, 390, 17, 64, 399, 1)]
    world = World(rows, block_size=16, group=3, dtype=torch.float32, seed=2)
    query = world.random(len(rows), world.heads)
    got = world.attend(range(len(rows)), rows, query)
    torch.testing.assert_close(got.double(), world.expected(query, None, None), rtol=1e-5, atol=1e-5)
    assert math.isfinite(float(got.sum()))
