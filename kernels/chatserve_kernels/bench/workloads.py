"""What the decode benchmarks run: sessions by their levels of shared and own tokens, on a pool of scattered blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

HEADS, KV_HEADS, HEAD_DIM, BLOCK = 32, 8, 128, 16
TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 2
"""KV of one token in one layer, bfloat16."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Sessions whose paths share their beginnings: `levels` are (tokens, number of nodes), each level's nodes split
    evenly over the level above; then each session's own tokens."""

    own: tuple[int, ...]
    levels: tuple[tuple[int, int], ...] = ()

    @property
    def batch(self) -> int:
        return len(self.own)

    @property
    def shared_tokens(self) -> int:
        return sum(tokens for tokens, _ in self.levels)

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.array(self.own, dtype=np.int64) + self.shared_tokens

    @property
    def flat_bytes(self) -> int:
        """KV read when each session reads its own path."""
        return int(self.lengths.sum()) * TOKEN_BYTES

    @property
    def unique_bytes(self) -> int:
        """KV read when each block is read once."""
        return (sum(self.own) + sum(tokens * nodes for tokens, nodes in self.levels)) * TOKEN_BYTES

    @property
    def flops(self) -> int:
        """Of the shared levels, which the tensor cores compute for all their sessions; a session's own tokens are bound
        by their bytes."""
        return 4 * HEAD_DIM * HEADS * self.batch * self.shared_tokens

    @property
    def label(self) -> str:
        own = f"{self.own[0]}" if len(set(self.own)) == 1 else f"{self.own[0]}, {self.batch - 1} x {self.own[1]}"
        return f"{self.batch} x ({' + '.join([*(f'{t} in {n}' for t, n in self.levels), own])})"

    @property
    def num_blocks(self) -> int:
        nodes = sum(tokens // BLOCK * count for tokens, count in self.levels)
        return nodes + sum(-(-tokens // BLOCK) for tokens in self.own)

    def level_blocks(self, num_blocks: int) -> list[list[NDArray[np.int32]]]:
        """Random distinct blocks: for each level its nodes' lists, and last each session's own."""
        ids = iter(np.split(*_pieces(self, np.random.default_rng(0).permutation(num_blocks))))
        levels = [[next(ids) for _ in range(count)] for _, count in self.levels]
        return [*levels, [next(ids) for _ in self.own]]

    def tables(self, num_blocks: int) -> NDArray[np.int32]:
        """[batch, max_blocks]"""
        levels = self.level_blocks(num_blocks)
        rows = [
            np.concatenate([level[session * len(level) // self.batch] for level in levels])
            for session in range(self.batch)
        ]
        tables = np.zeros((self.batch, max(map(len, rows))), dtype=np.int32)
        for table, row in zip(tables, rows, strict=True):
            table[: len(row)] = row
        return tables


def _pieces(work: Workload, order: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    sizes = [tokens // BLOCK for tokens, count in work.levels for _ in range(count)]
    sizes += [-(-tokens // BLOCK) for tokens in work.own]
    if sum(sizes) > len(order):
        raise ValueError(f"expected at most {len(order)} blocks, got {sum(sizes)}")
    return order[: sum(sizes)].astype(np.int32), np.cumsum(sizes)[:-1]


def even(batch: int, context: int) -> Workload:
    return Workload((context,) * batch)


def shared(batch: int, prefix: int, own: int) -> Workload:
    return Workload((own,) * batch, ((prefix, 1),))


FLAT = [
    even(*row)
    for row in (
        (1, 1024),
        (1, 16384),
        (16, 1024),
        (16, 4096),
        (64, 1024),
        (64, 4096),
        (64, 16384),
        (128, 4096),
        (256, 1024),
        (256, 4096),
    )
]
SHARED = [shared(*row) for row in ((64, 2048, 256), (256, 2048, 256), (256, 8192, 256), (256, 8192, 1024))]
LEVELS = [Workload((256,) * 256, ((2048, 1), (512, 16))), Workload((256,) * 64, ((2048, 1), (1024, 8)))]
UNEVEN = [Workload((100_000,) + (512,) * 63), even(64, (100_000 + 63 * 512) // 64)]
BREAK_EVEN = [shared(batch, prefix, 256) for batch in (2, 4, 8, 16) for prefix in (64, 128, 256, 512, 1024)]
