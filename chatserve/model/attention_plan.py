"""What all layers of a step share: which pool rows to gather, what to mask, which tokens go together.

Pure index arithmetic in numpy over block tables, with no Python loop a token; the results are tensors on the pool's
device. Knows the pool as a matrix (see `attention`), but never reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from chatserve.model.kv_storage import KVStorage

_MAX_GATHER_BYTES = {"cpu": 16 << 20, "cuda": 1 << 30}
"""Most bytes gathered at once for a group of decode rows; on a CPU the copy should stay in the last-level cache."""

_ONE_THREAD_BYTES = 2 << 20
"""Below this a CPU gathers and multiplies on one thread: waking the others costs more than they save (one row at 128
tokens: 58 ms a step instead of 65)."""


class PackedBatch(NamedTuple):
    """`starts` and `lengths`: int64 [num_rows]; `tables`: int64 [num_rows, max_blocks], entries past a row's own are
    not read."""

    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    tables: NDArray[np.int64]


def token_slots(batch: PackedBatch, block_size: int) -> NDArray[np.int64]:
    """Where each token's KV goes, int64 [num_tokens]: block * block_size + token in it."""
    row_of_token = np.repeat(np.arange(len(batch.starts)), batch.lengths)
    first_token = np.cumsum(batch.lengths) - batch.lengths
    positions = np.arange(len(row_of_token)) + (batch.starts - first_token)[row_of_token]
    slots: NDArray[np.int64] = batch.tables[row_of_token, positions // block_size] * block_size
    slots += positions % block_size
    return slots


class DecodeGroup(NamedTuple):
    """Decode rows of similar length, padded to `num_keys`."""

    tokens: torch.Tensor | None
    """int64 [rows], indices into the batch; None: all of it, in order."""
    rows: int
    num_keys: int
    gather: torch.Tensor
    """int64 [2 · rows · num_kv_heads · blocks]"""
    mask: torch.Tensor
    """[rows · num_kv_heads, 1, num_keys], 0 or -inf"""
    unwritten: torch.Tensor
    """int64 indices of gathered slots to clear."""
    on_one_thread: bool


class PrefillRow(NamedTuple):
    tokens: slice
    num_keys: int
    skip: int
    """Gathered slots before the first key that is needed."""
    gather: torch.Tensor | None
    """None: the row starts at 0, so that its keys are those just computed."""
    mask: torch.Tensor | None
    """[tokens, num_keys] of 0 and -inf; None: plainly causal."""


class AttentionPlan(NamedTuple):
    groups: list[DecodeGroup]
    prefills: list[PrefillRow]


class Planner:
    """Plans batches over one storage."""

    def __init__(self, storage: KVStorage) -> None:
        shape = storage.shape
        self._shape = shape
        self._device = storage.device_pool.device
        self._dtype = storage.compute_dtype
        self._layer_rows = 2 * shape.num_kv_heads
        self._block_rows = shape.num_layers * self._layer_rows
        self._block_bytes = self._layer_rows * shape.block_size * shape.head_dim * self._dtype.itemsize
        self._max_gather = _MAX_GATHER_BYTES.get(self._device.type, 1 << 30)

    def slots(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Where keys and values go in layer 0, each int64 [num_tokens · num_kv_heads]."""
        shape = self._shape
        blocks, in_block = np.divmod(token_slots(batch, shape.block_size), shape.block_size)
        slots = blocks * (self._block_rows * shape.block_size) + in_block
        heads = np.arange(shape.num_kv_heads, dtype=np.int64) * shape.block_size
        key_slots = (slots[:, None] + heads).reshape(-1)
        return self._tensor(key_slots), self._tensor(key_slots + shape.num_kv_heads * shape.block_size)

    def plan(self, batch: PackedBatch, window: int | None) -> AttentionPlan:
        """How layers with one sliding window attend."""
        decodes = np.flatnonzero(batch.lengths == 1)
        first_token = np.cumsum(batch.lengths) - batch.lengths
        prefills = [
            self._plan_prefill(batch, int(row), int(first_token[row]), window)
            for row in np.flatnonzero(batch.lengths > 1)
        ]
        return AttentionPlan(self._plan_decodes(batch, decodes, first_token[decodes], window), prefills)

    def _plan_prefill(self, batch: PackedBatch, row: int, first_token: int, window: int | None) -> PrefillRow:
        start, length = int(batch.starts[row]), int(batch.lengths[row])
        tokens = slice(first_token, first_token + length)
        end = start + length
        if start == 0 and (window is None or window >= length):
            return PrefillRow(tokens, length, 0, None, None)
        low = 0 if window is None else max(0, start - window + 1)
        block_size = self._shape.block_size
        first_block = low // block_size
        blocks = batch.tables[row, first_block : -(-end // block_size)]
        return PrefillRow(
            tokens=tokens,
            num_keys=end - low,
            skip=low - first_block * block_size,
            gather=self._tensor(self._gather_index(blocks[None])),
            mask=self.mask(start, length, low, end, window),
        )

    def _plan_decodes(
        self, batch: PackedBatch, rows: NDArray[np.int64], tokens: NDArray[np.int64], window: int | None
    ) -> list[DecodeGroup]:
        """Cut the decode rows, longest first, into groups that waste little on padding and fit the cache."""
        if not len(rows):
            return []
        block_size = self._shape.block_size
        ends = batch.starts[rows] + 1
        lows = np.zeros_like(ends) if window is None else np.maximum(0, ends - window)
        first_blocks = lows // block_size
        counts = -(-ends // block_size) - first_blocks
        order = np.argsort(-counts, kind="stable")
        groups: list[NDArray[np.int64]] = []
        begin = 0
        while begin < len(order):
            widest = int(counts[order[begin]])
            most = max(1, self._max_gather // (widest * self._block_bytes))
            similar = int(np.searchsorted(-counts[order], -(0.7 * widest - 4), side="right"))
            stop = max(begin + 1, min(similar, begin + most, len(order)))
            groups.append(np.sort(order[begin:stop]))
            begin = stop
        whole = len(groups) == 1 and len(rows) == len(batch.lengths)
        return [
            self._plan_group(
                batch.tables[rows[group]],
                ends[group],
                lows[group],
                first_blocks[group],
                int(counts[group].max()),
                None if whole else tokens[group],
            )
            for group in groups
        ]

    def _plan_group(
        self,
        tables: NDArray[np.int64],
        ends: NDArray[np.int64],
        lows: NDArray[np.int64],
        first_blocks: NDArray[np.int64],
        num_blocks: int,
        tokens: NDArray[np.int64] | None,
    ) -> DecodeGroup:
        shape = self._shape
        num_rows = len(ends)
        num_keys = num_blocks * shape.block_size
        # Past a row's own blocks its first one is read again: always masked, and full unless it is the only one.
        columns = first_blocks[:, None] + np.arange(num_blocks)
        columns = np.where(columns * shape.block_size < ends[:, None], columns, first_blocks[:, None])
        blocks = np.take_along_axis(tables, columns, axis=1)
        positions = (first_blocks * shape.block_size)[:, None] + np.arange(num_keys)
        masked = (positions >= ends[:, None]) | (positions < lows[:, None])  # [rows, num_keys]
        mask = np.where(masked, np.float32(-np.inf), np.float32(0.0))
        held = (columns[:, :, None] * shape.block_size + np.arange(shape.block_size)).reshape(num_rows, num_keys)
        row, slot = np.nonzero(held >= ends[:, None])
        per_head = (row[:, None] * shape.num_kv_heads + np.arange(shape.num_kv_heads)) * num_keys + slot[:, None]
        unwritten = np.concatenate(
            [per_head.reshape(-1), per_head.reshape(-1) + num_rows * shape.num_kv_heads * num_keys]
        )
        return DecodeGroup(
            tokens=None if tokens is None else self._tensor(tokens),
            rows=num_rows,
            num_keys=num_keys,
            gather=self._tensor(self._gather_index(blocks)),
            mask=self._tensor(np.repeat(mask, shape.num_kv_heads, axis=0)[:, None]).to(self._dtype),
            unwritten=self._tensor(unwritten),
            on_one_thread=self._device.type == "cpu" and num_rows * num_blocks * self._block_bytes < _ONE_THREAD_BYTES,
        )

    def _gather_index(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of the pool's by-head matrix, in layer 0, in the order [2, rows, num_kv_heads, blocks]."""
        kv_heads = self._shape.num_kv_heads
        sides = np.arange(2, dtype=np.int64)[:, None, None, None] * kv_heads
        heads = np.arange(kv_heads, dtype=np.int64)[None, None, :, None]
        return (blocks[None, :, None, :] * self._block_rows + sides + heads).reshape(-1)

    def mask(self, start: int, length: int, low: int, end: int, window: int | None) -> torch.Tensor:
        """Causal over keys `low` to `end` for queries from `start`: [length, end - low] of 0 and -inf."""
        queries = torch.arange(start, start + length, device=self._device)[:, None]
        keys = torch.arange(low, end, device=self._device)[None, :]
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        return torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, -torch.inf)

    def _tensor(self, array: NDArray[np.int64] | NDArray[np.float32]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)
