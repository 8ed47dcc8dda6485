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

A pool of another type than the model's is widened as it is gathered. What its numbers must be multiplied by is one
factor a layer: that of keys multiplies the scores' scale, that of values the result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from chatserve.model import kv_dtype
from chatserve.model.attention_plan import AttentionPlan, DecodeGroup, PackedBatch, Planner, PrefillRow

if TYPE_CHECKING:
    from chatserve.model.kv_storage import KVStorage

__all__ = ["AttentionBackend", "PackedBatch", "StepAttention", "StoredAttention", "TorchAttention", "TorchStep"]


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


@runtime_checkable
class StoredAttention(StepAttention, Protocol):
    """A `StepAttention` that also attends over keys and values that somebody else has put into the pool, as a kernel
    does that rotates keys on their way there."""

    slots: torch.Tensor
    """int64 [num_tokens], where the batch's keys and values go: block * block_size + token in it; -1: padding, stored
    nowhere."""

    def caches(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values, each [num_blocks, num_kv_heads, block_size, head_dim], views of the pool."""
        ...

    def kv_scales(self, layer: int) -> torch.Tensor | None:
        """What the numbers of a pool of float8_e4m3fn must be multiplied by: float32 [2], of keys and of values."""
        ...

    def attend_stored(
        self,
        layer: int,
        query: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """As `attend`, after its store."""
        ...


@dataclass(slots=True)
class TorchStep:
    """`StepAttention` in plain torch."""

    backend: TorchAttention
    batch: PackedBatch
    key_slots: torch.Tensor
    """int64 [num_tokens · num_kv_heads], where keys go in layer 0."""
    value_slots: torch.Tensor
    plans: dict[int | None, AttentionPlan] = field(default_factory=dict)
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
        key, value = backend.write(layer, key, value, self.key_slots, self.value_slots)
        key_scale, value_scale = backend.scales[layer]
        scale *= key_scale
        plan = self.plans.get(window)
        if plan is None:
            plan = self.plans[window] = backend.plan(self.batch, window)
        if len(plan.groups) == 1 and not plan.prefills:
            out = backend.decode(layer, query, plan.groups[0], scale, softcap)
        else:
            out = torch.empty_like(query)
            for group in plan.groups:
                assert group.tokens is not None
                out[group.tokens] = backend.decode(layer, query[group.tokens], group, scale, softcap)
            for row in plan.prefills:
                new = row.tokens
                out[new] = backend.prefill(layer, query[new], key[new], value[new], row, scale, softcap)
        return out if value_scale == 1.0 else out.mul_(value_scale)


class TorchAttention:
    """`AttentionBackend` in plain torch, on any device."""

    def __init__(self, storage: KVStorage) -> None:
        shape = storage.shape
        pool = storage.device_pool
        self.scales = storage.scales
        """What stored keys and values must be multiplied by, for each layer."""
        self._shape = shape
        self._dtype = storage.compute_dtype
        self._stored_dtype = storage.dtype
        if storage.dtype == kv_dtype.FP8:
            pool = pool.view(torch.uint8)  # not every device gathers and scatters 8-bit floats
        self._planner = Planner(storage)
        layer_rows = 2 * shape.num_kv_heads
        by_head = pool.view(-1, shape.block_size * shape.head_dim)
        by_slot = pool.view(-1, shape.head_dim)
        # A layer is a shift of the same indices, so that they are computed once a step.
        self._heads = [by_head[layer * layer_rows :] for layer in range(shape.num_layers)]
        self._slots = [by_slot[layer * layer_rows * shape.block_size :] for layer in range(shape.num_layers)]
        self._gathered = torch.empty(0, dtype=pool.dtype, device=pool.device)
        self._widened = torch.empty(0, dtype=self._dtype, device=pool.device)
        # Torch 2.11's memory-efficient attention was wrong by 18 % there: 33 queries on 83 keys, masked, on an H200.
        self._distrusts_fused = pool.is_cuda and self._dtype == torch.float32 and shape.head_dim > 128

    def prepare(self, batch: PackedBatch) -> TorchStep:
        key_slots, value_slots = self._planner.slots(batch)
        return TorchStep(self, batch, key_slots, value_slots)

    def plan(self, batch: PackedBatch, window: int | None) -> AttentionPlan:
        return self._planner.plan(batch, window)

    def write(
        self,
        layer: int,
        key: torch.Tensor,
        value: torch.Tensor,
        key_slots: torch.Tensor,
        value_slots: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values, each [num_tokens, num_kv_heads, head_dim]; returns them as they lie in the pool."""
        head_dim, pool = self._shape.head_dim, self._slots[layer]
        key_scale, value_scale = self.scales[layer]
        key = kv_dtype.to_stored(key, self._stored_dtype, key_scale)
        value = kv_dtype.to_stored(value, self._stored_dtype, value_scale)
        pool.index_copy_(0, key_slots, key.reshape(-1, head_dim).view(pool.dtype))
        pool.index_copy_(0, value_slots, value.reshape(-1, head_dim).view(pool.dtype))
        return key, value

    def decode(
        self, layer: int, query: torch.Tensor, group: DecodeGroup, scale: float, softcap: float | None
    ) -> torch.Tensor:
        """`query` [rows, num_heads, head_dim], and so the result."""
        if not group.on_one_thread:
            return self._decode(layer, query, group, scale, softcap)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return self._decode(layer, query, group, scale, softcap)
        finally:
            torch.set_num_threads(threads)

    def _decode(
        self, layer: int, query: torch.Tensor, group: DecodeGroup, scale: float, softcap: float | None
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
        row: PrefillRow,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """`key` and `value` are the row's new ones as `write` returned them; all others are the pool's."""
        kv_heads, head_dim = self._shape.num_kv_heads, self._shape.head_dim
        if row.gather is None:
            key, value = (self._as_computed(each) for each in (key, value))
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
        if softcap is None and (row.mask is None or not self._distrusts_fused):
            out = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=row.mask, is_causal=row.mask is None, scale=scale
            )
        else:
            mask = self._planner.mask(0, new_tokens, 0, row.num_keys, None) if row.mask is None else row.mask
            products = torch.matmul(queries, keys.transpose(2, 3))
            scores = (products * scale if softcap is None else _bend(products, scale, softcap)).add_(mask)
            out = torch.matmul(_softmax(scores, values.dtype), values)
        return out.permute(2, 0, 1, 3).reshape(new_tokens, -1, head_dim)

    def _gather(
        self, layer: int, index: torch.Tensor, unwritten: torch.Tensor | None, batch: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, each [batch, tokens, head_dim], in scratch that the next call overwrites."""
        head_dim = self._shape.head_dim
        width = self._shape.block_size * head_dim
        size = index.numel() * width
        if self._gathered.numel() < size:
            self._gathered = self._gathered.new_empty(size)
        gathered = self._gathered[:size].view(-1, width)
        torch.index_select(self._heads[layer], 0, index, out=gathered)
        scratch = self._widen(gathered)
        if unwritten is not None:
            scratch.view(-1, head_dim).index_fill_(0, unwritten, 0.0)
        both = scratch.view(2, batch, -1, head_dim)
        return both[0], both[1]

    def _widen(self, gathered: torch.Tensor) -> torch.Tensor:
        if self._stored_dtype == self._dtype:
            return gathered
        if self._widened.numel() < gathered.numel():
            self._widened = self._widened.new_empty(self._gathered.numel())
        widened = self._widened[: gathered.numel()].view(gathered.shape)
        return kv_dtype.widen(gathered.view(self._stored_dtype), widened)

    def _as_computed(self, stored: torch.Tensor) -> torch.Tensor:
        if stored.dtype == self._dtype:
            return stored
        return kv_dtype.widen(stored, torch.empty(stored.shape, dtype=self._dtype, device=stored.device))


def _softmax(scores: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.softmax(scores, dim=-1).to(dtype)


def _bend(products: torch.Tensor, scale: float, softcap: float) -> torch.Tensor:
    """Soft-capped scores in float32."""
    return products.float().mul_(scale / softcap).tanh_().mul_(softcap)
