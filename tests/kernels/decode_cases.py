"""Forests of sessions for the decode tests: block tables by level, and a pool that holds NaN wherever no token was
written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from chatserve_kernels.device_plan import DecodeConfigs, DevicePlan, make_planner
from chatserve_kernels.forest import CostModel
from chatserve_kernels.forest_decode import DecodeWorkspace, TileConfig, forest_decode
from chatserve_kernels.reference import decode_attention

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Of the norm of the error over the norm of the result: the rounding of what is stored, and of the weights before they
multiply the values."""

SMALL_CONFIGS = DecodeConfigs(
    alone=TileConfig(query_rows=16, key_tokens=32, warps=4, stages=2, programs=1),
    beside=TileConfig(query_rows=16, key_tokens=16, warps=4, stages=2, programs=1),
    wide=TileConfig(query_rows=32, key_tokens=32, warps=4, stages=2, programs=1),
    merge_programs=5,
)
"""Tiles so small that a few hundred tokens make many, and chunks of every size."""


class Forest(NamedTuple):
    """`tables` [num_rows, max_blocks]; `written` maps a block to how many of its tokens were."""

    tables: np.ndarray
    lengths: np.ndarray
    written: dict[int, int]


def forest(paths: list[list[tuple[str, int]]], block_size: int, spare: int = 0) -> Forest:
    """Each row's path is (node name, tokens): rows that name a node share it. Inner nodes are whole blocks."""
    rng = np.random.default_rng(len(paths))
    sizes: dict[str, int] = {}
    for path in paths:
        for name, tokens in path:
            assert sizes.setdefault(name, tokens) == tokens
    counts = {name: -(-tokens // block_size) for name, tokens in sizes.items()}
    ids = rng.permutation(sum(counts.values()) + spare).tolist()
    blocks = {name: [ids.pop() for _ in range(count)] for name, count in counts.items()}
    written = {
        block: min(block_size, sizes[name] - index * block_size)
        for name, own in blocks.items()
        for index, block in enumerate(own)
    }
    rows = [[block for name, _ in path for block in blocks[name]] for path in paths]
    tables = np.full((len(rows), max(1, *map(len, rows))), 10**6, dtype=np.int32)  # poison past a row's own
    for table, row in zip(tables, rows, strict=True):
        table[: len(row)] = row
    return Forest(tables, np.array([sum(tokens for _, tokens in path) for path in paths]), written)


def flat(lengths: list[int], block_size: int) -> Forest:
    return forest([[(str(row), tokens)] for row, tokens in enumerate(lengths)], block_size)


@dataclass
class Heads:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    """None: as `dtype`."""


@dataclass
class Case:
    """A forest with its pool and queries, and what is attended with."""

    forest: Forest
    heads: Heads = field(default_factory=Heads)
    num_padding: int = 0
    scale: float = 0.2
    window: int | None = None
    softcap: float | None = None
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None

    def __post_init__(self) -> None:
        heads = self.heads
        generator = torch.Generator(device=DEVICE).manual_seed(1)

        def randn(*shape: int, dtype: torch.dtype = heads.dtype) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)

        kv_dtype = heads.kv_dtype or heads.dtype
        num_blocks = max(self.forest.written, default=0) + 1
        shape = (num_blocks, 3, 2, heads.num_kv_heads, heads.block_size, heads.head_dim)
        # Block-major; the middle layer is ours.
        self.pool = torch.full(shape, torch.nan, device=DEVICE).to(kv_dtype)
        for block, tokens in self.forest.written.items():
            self.pool[block, 1, :, :, :tokens] = randn(2, heads.num_kv_heads, tokens, heads.head_dim, dtype=kv_dtype)
        num_rows = len(self.forest.lengths) + self.num_padding
        self.query = randn(num_rows, heads.num_heads, heads.head_dim)
        tables = np.full((num_rows, self.forest.tables.shape[1]), 10**6, dtype=np.int32)
        tables[: len(self.forest.tables)] = self.forest.tables
        self.tables = torch.from_numpy(tables).to(DEVICE)
        self.key, self.value = self.pool[:, 1, 0], self.pool[:, 1, 1]

    def move_to_top_of_pool(self, num_blocks: int) -> None:
        """The same blocks as the last ones of a pool of so many, of one layer, whose others nobody has written."""
        shift = num_blocks - len(self.key)
        pool = torch.empty((num_blocks, 2, *self.key.shape[1:]), dtype=self.key.dtype, device=DEVICE)
        pool[shift:, 0], pool[shift:, 1] = self.key, self.value
        self.key, self.value = pool[:, 0], pool[:, 1]
        self.forest.tables[self.forest.tables < 10**6] += shift
        self.tables[self.tables < 10**6] += shift

    def reference(self) -> torch.Tensor:
        lengths = torch.tensor([*self.forest.lengths.tolist(), *[0] * self.num_padding])
        return decode_attention(
            self.query,
            self.key,
            self.value,
            self.tables,
            lengths,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            key_scale=self.key_scale,
            value_scale=self.value_scale,
        )

    def run(
        self,
        *,
        configs: DecodeConfigs = SMALL_CONFIGS,
        num_processors: int = 6,
        share: bool = True,
        fixed_chunk: int | None = None,
        out: torch.Tensor | None = None,
        with_wide: bool | None = None,
    ) -> torch.Tensor:
        heads = self.heads
        planner = make_planner(
            configs,
            num_processors=num_processors,
            max_rows=len(self.query),
            max_context=max(1, int(self.forest.lengths.max())),
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            block_size=heads.block_size,
            cost=CostModel(),
            share=share,
            fixed_chunk=fixed_chunk,
        )
        plan = planner.plan(
            self.forest.tables,
            self.forest.lengths,
            window=self.window,
            num_padding=self.num_padding,
            with_wide=with_wide,
        )
        device_plan = DevicePlan(planner.layout, configs, DEVICE)
        device_plan.send(plan)
        workspace = DecodeWorkspace(planner.layout, heads.num_heads, heads.num_kv_heads, heads.head_dim, DEVICE)
        workspace.out.fill_(torch.nan)
        workspace.sums.fill_(torch.nan)
        if out is None:
            out = torch.full_like(self.query, torch.nan)
        forest_decode(
            self.query,
            self.key,
            self.value,
            self.tables,
            device_plan,
            workspace,
            scale=self.scale,
            softcap=self.softcap,
            key_scale=self.key_scale,
            value_scale=self.value_scale,
            out=out,
        )
        assert not workspace.arrivals.any(), "the next launch would merge too early"
        return out

    def check(self, **options) -> torch.Tensor:
        out = self.run(**options)
        assert_close(out, self.reference())
        return out


def assert_close(out: torch.Tensor, reference: torch.Tensor) -> None:
    error = (out.double() - reference).norm() / reference.norm().clamp_min(1e-30)
    assert error < TOLERANCE[out.dtype], f"relative error {error:.1e}"
