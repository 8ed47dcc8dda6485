"""Paged attention over a packed batch: the interface, and the plain torch implementation that kernels must equal.

A packed batch is `[num_tokens]` tokens of several rows, one after the other; row i computes tokens `starts[i]` to
`starts[i] + lengths[i]` of its sequence, whose KV lives in the blocks of `tables[i]`. Every query reads its own row's
keys at positions up to its own (and, with a sliding window w, above position - w). Owns no memory but scratch; must not
know models, requests or sampling.

How the torch implementation works. The pool is also a matrix whose rows are one head's share of one block
(`block_size * head_dim` contiguous numbers), so that one `index_select` gathers the keys and values of many rows into
`[2, rows, num_kv_heads, tokens, head_dim]` with no transposition. Decode rows of similar length are gathered together
and go through two batched matrix products; each prefill row goes through `scaled_dot_product_attention`. Slots that no
token has been written to are cleared in the gathered copy, never only masked: zero times NaN is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from chatserve.model.kv_storage import KVStorage

_MAX_GATHER_BYTES = {"cpu": 16 << 20, "cuda": 1 << 30}
"""Most bytes gathered at once for a group of decode rows; on a CPU the copy should stay in the last-level cache."""


class PackedBatch(NamedTuple):
    """`starts` and `lengths`: int64 [num_rows]; `tables`: int64 [num_rows, max_blocks], entries past a row's own are
    not read."""

    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    tables: NDArray[np.int64]


class AttentionBackend(Protocol):
    def prepare(self, batch: PackedBatch) -> StepAttention:
        """Work out, once a step, everything about a batch that all layers share."""
        ...


class StepAttention(Protocol):
    """One step's attention; models call it in each layer."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """Store the batch's keys and values, then attend.

        `query` [num_tokens, num_heads, head_dim]; `key`, `value` [num_tokens, num_kv_heads, head_dim]; query head h
        reads KV head h // (num_heads // num_kv_heads). `softcap` c bends scores to c·tanh(score / c). Returns
        [num_tokens, num_heads, head_dim].
        """
        ...


class _DecodeGroup(NamedTuple):
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


class _PrefillRow(NamedTuple):
    tokens: slice
    num_keys: int
    skip: int
    """Gathered slots before the first key that is needed."""
    gather: torch.Tensor | None
    """None: the row starts at 0, so that its keys are those just computed."""
    mask: torch.Tensor | None
    """[tokens, num_keys] of 0 and -inf; None: plainly causal."""


class _Plan(NamedTuple):
    groups: list[_DecodeGroup]
    prefills: list[_PrefillRow]


@dataclass(slots=True)
class TorchStep:
    """`StepAttention` in plain torch."""

    backend: TorchAttention
    batch: PackedBatch
    key_slots: torch.Tensor
    """int64 [num_tokens · num_kv_heads], where keys go in layer 0."""
    value_slots: torch.Tensor
    plans: dict[int | None, _Plan] = field(default_factory=dict)
    """One for each sliding window among the layers."""

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        backend = self.backend
        backend.write(layer, key, value, self.key_slots, self.value_slots)
        plan = self.plans.get(window)
        if plan is None:
            plan = self.plans[window] = backend.plan(self.batch, window)
        if len(plan.groups) == 1 and not plan.prefills:
            return backend.decode(layer, query, plan.groups[0], scale, softcap)
        out = torch.empty_like(query)
        for group in plan.groups:
            assert group.tokens is not None
            out[group.tokens] = backend.decode(layer, query[group.tokens], group, scale, softcap)
        for row in plan.prefills:
            new = row.tokens
            out[new] = backend.prefill(layer, query[new], key[new], value[new], row, scale, softcap)
        return out


class TorchAttention:
    """`AttentionBackend` in plain torch, on any device."""

    def __init__(self, storage: KVStorage) -> None:
        shape = storage.shape
        pool = storage.device_pool
        self._shape = shape
        self._device = pool.device
        self._dtype = pool.dtype
        self._layer_rows = 2 * shape.num_kv_heads
        block_rows = shape.num_layers * self._layer_rows
        self._block_rows = block_rows
        by_head = pool.view(storage.num_blocks * block_rows, shape.block_size * shape.head_dim)
        by_slot = pool.view(-1, shape.head_dim)
        # A layer is a shift of the same indices, so that they are computed once a step.
        self._heads = [by_head[layer * self._layer_rows :] for layer in range(shape.num_layers)]
        self._slots = [by_slot[layer * self._layer_rows * shape.block_size :] for layer in range(shape.num_layers)]
        self._max_gather = _MAX_GATHER_BYTES.get(pool.device.type, 1 << 30)
        self._scratch = torch.empty(0, dtype=pool.dtype, device=pool.device)

    def prepare(self, batch: PackedBatch) -> TorchStep:
        shape = self._shape
        row_of_token = np.repeat(np.arange(len(batch.starts)), batch.lengths)
        first_token = np.cumsum(batch.lengths) - batch.lengths
        positions = np.arange(len(row_of_token)) - first_token[row_of_token] + batch.starts[row_of_token]
        blocks = batch.tables[row_of_token, positions // shape.block_size]
        slots = blocks * (self._block_rows * shape.block_size) + positions % shape.block_size
        heads = np.arange(shape.num_kv_heads, dtype=np.int64) * shape.block_size
        key_slots = (slots[:, None] + heads).reshape(-1)
        return TorchStep(
            backend=self,
            batch=batch,
            key_slots=self._tensor(key_slots),
            value_slots=self._tensor(key_slots + shape.num_kv_heads * shape.block_size),
        )

    def write(
        self,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        key_slots: torch.Tensor,
        value_slots: torch.Tensor,
    ) -> None:
        """Store keys and values, each [num_tokens, num_kv_heads, head_dim]."""
        head_dim = self._shape.head_dim
        self._slots[layer].index_copy_(0, key_slots, key.reshape(-1, head_dim))
        self._slots[layer].index_copy_(0, value_slots, value.reshape(-1, head_dim))

    def decode(
        self, layer: int, query: torch.Tensor, group: _DecodeGroup, scale: float, softcap: float | None
    ) -> torch.Tensor:
        kv_heads, head_dim = self._shape.num_kv_heads, self._shape.head_dim
        keys, values = self._gather(layer, group.gather, group.unwritten, group.rows * kv_heads)
        grouped = query.reshape(group.rows * kv_heads, -1, head_dim)  # [rows · kv_heads, group size, head_dim]
        if softcap is not None:
            scores = _bend(torch.bmm(grouped, keys.transpose(1, 2)), scale, softcap).add_(group.mask)
            out = torch.bmm(_softmax(scores, values.dtype), values)
        elif self._dtype == torch.float32:  # faster than torch's fused attention on a CPU, by a tenth to a third
            scores = torch.baddbmm(group.mask, grouped, keys.transpose(1, 2), alpha=scale)
            out = torch.bmm(torch.softmax(scores, dim=-1), values)
        else:  # 16-bit scores would be too coarse; the fused kernels keep them in float32
            mask = group.mask.unsqueeze(1).expand(-1, 1, grouped.shape[1], -1)
            out = F.scaled_dot_product_attention(
                grouped.unsqueeze(1), keys.unsqueeze(1), values.unsqueeze(1), attn_mask=mask, scale=scale
            )
        return out.reshape(group.rows, -1, head_dim)

    def prefill(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        row: _PrefillRow,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        kv_heads, head_dim = self._shape.num_kv_heads, self._shape.head_dim
        if row.gather is None:
            keys, values = key.transpose(0, 1), value.transpose(0, 1)  # [kv_heads, keys, head_dim]
        else:
            keys, values = self._gather(layer, row.gather, None, kv_heads)
            kept = slice(row.skip, row.skip + row.num_keys)
            keys, values = keys[:, kept], values[:, kept]
        new_tokens = query.shape[0]
        # [kv_heads, group size, new tokens, head_dim]: the heads of a group read the same keys, by a stride of 0.
        queries = query.view(new_tokens, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        shape = (*queries.shape[:2], row.num_keys, head_dim)
        keys, values = keys.unsqueeze(1).expand(shape), values.unsqueeze(1).expand(shape)
        if softcap is None:
            out = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=row.mask, is_causal=row.mask is None, scale=scale
            )
        else:
            mask = self._mask(0, new_tokens, 0, row.num_keys, None) if row.mask is None else row.mask
            scores = _bend(torch.matmul(queries, keys.transpose(2, 3)), scale, softcap).add_(mask)
            out = torch.matmul(_softmax(scores, values.dtype), values)
        return out.permute(2, 0, 1, 3).reshape(new_tokens, -1, head_dim)

    def _gather(
        self, layer: int, index: torch.Tensor, unwritten: torch.Tensor | None, batch: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, each [batch, tokens, head_dim], in scratch that the next call overwrites."""
        head_dim = self._shape.head_dim
        width = self._shape.block_size * head_dim
        size = index.numel() * width
        if self._scratch.numel() < size:
            self._scratch = torch.empty(size, dtype=self._dtype, device=self._device)
        scratch = self._scratch[:size].view(-1, width)
        torch.index_select(self._heads[layer], 0, index, out=scratch)
        if unwritten is not None:
            scratch.view(-1, head_dim).index_fill_(0, unwritten, 0.0)
        both = scratch.view(2, batch, -1, head_dim)
        return both[0], both[1]

    def plan(self, batch: PackedBatch, window: int | None) -> _Plan:
        decodes = np.flatnonzero(batch.lengths == 1)
        first_token = np.cumsum(batch.lengths) - batch.lengths
        prefills = [
            self._plan_prefill(batch, int(row), int(first_token[row]), window)
            for row in np.flatnonzero(batch.lengths > 1)
        ]
        return _Plan(self._plan_decodes(batch, decodes, first_token[decodes], window), prefills)

    def _plan_prefill(self, batch: PackedBatch, row: int, first_token: int, window: int | None) -> _PrefillRow:
        start, length = int(batch.starts[row]), int(batch.lengths[row])
        tokens = slice(first_token, first_token + length)
        end = start + length
        if start == 0 and (window is None or window >= length):
            return _PrefillRow(tokens, length, 0, None, None)
        low = 0 if window is None else max(0, start - window + 1)
        block_size = self._shape.block_size
        first_block = low // block_size
        blocks = batch.tables[row, first_block : -(-end // block_size)]
        return _PrefillRow(
            tokens=tokens,
            num_keys=end - low,
            skip=low - first_block * block_size,
            gather=self._tensor(self._gather_index(blocks[None])),
            mask=self._mask(start, length, low, end, window),
        )

    def _plan_decodes(
        self, batch: PackedBatch, rows: NDArray[np.int64], tokens: NDArray[np.int64], window: int | None
    ) -> list[_DecodeGroup]:
        """Cut the decode rows, longest first, into groups that waste little on padding and fit the cache."""
        if not len(rows):
            return []
        block_size = self._shape.block_size
        ends = batch.starts[rows] + 1
        lows = np.zeros_like(ends) if window is None else np.maximum(0, ends - window)
        first_blocks = lows // block_size
        counts = -(-ends // block_size) - first_blocks
        order = np.argsort(-counts, kind="stable")
        block_bytes = self._layer_rows * block_size * self._shape.head_dim * self._dtype.itemsize
        groups: list[NDArray[np.int64]] = []
        begin = 0
        while begin < len(order):
            widest = int(counts[order[begin]])
            most = max(1, self._max_gather // (widest * block_bytes))
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
    ) -> _DecodeGroup:
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
        return _DecodeGroup(
            tokens=None if tokens is None else self._tensor(tokens),
            rows=num_rows,
            num_keys=num_keys,
            gather=self._tensor(self._gather_index(blocks)),
            mask=self._tensor(np.repeat(mask, shape.num_kv_heads, axis=0)[:, None]).to(self._dtype),
            unwritten=self._tensor(unwritten),
        )

    def _gather_index(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """Rows of the pool's by-head matrix, in layer 0, in the order [2, rows, num_kv_heads, blocks]."""
        kv_heads = self._shape.num_kv_heads
        sides = np.arange(2, dtype=np.int64)[:, None, None, None] * kv_heads
        heads = np.arange(kv_heads, dtype=np.int64)[None, None, :, None]
        return (blocks[None, :, None, :] * self._block_rows + sides + heads).reshape(-1)

    def _mask(self, start: int, length: int, low: int, end: int, window: int | None) -> torch.Tensor:
        """Causal over keys `low` to `end` for queries from `start`: [length, end - low] of 0 and -inf."""
        queries = torch.arange(start, start + length, device=self._device)[:, None]
        keys = torch.arange(low, end, device=self._device)[None, :]
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        return torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, -torch.inf)

    def _tensor(self, array: NDArray[np.int64] | NDArray[np.float32]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)


def _softmax(scores: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.softmax(scores, dim=-1).to(dtype)


def _bend(products: torch.Tensor, scale: float, softcap: float) -> torch.Tensor:
    """Soft-capped scores in float32."""
    return products.float().mul_(scale / softcap).tanh_().mul_(softcap)
