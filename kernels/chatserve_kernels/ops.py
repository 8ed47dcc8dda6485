"""The kernels as one operator of torch: store a batch's keys and values, then attend.

    chatserve::store_and_attend(query, key, value, kv_cache!, slots, tables, plan, handle, scale, softcap, kv_scales)
        -> out

It declares what it changes and how its result looks, so that `torch.compile` takes a model that calls it as one graph,
captured or not, and functionalisation keeps the order of writes and reads. A plan's numbers are a tensor that it reads;
what the host must know to launch them, and the memory of partial results, are found by a handle.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

import torch

from chatserve_kernels.forest_decode import forest_decode, paged_prefill
from chatserve_kernels.paged_kv import store_kv

if TYPE_CHECKING:
    from chatserve_kernels.device_plan import DevicePlan
    from chatserve_kernels.forest_decode import DecodeWorkspace

_known: weakref.WeakValueDictionary[int, PagedAttention] = weakref.WeakValueDictionary()
_handles = itertools.count(1)


class PagedAttention:
    """Attention by whatever plan was last sent to `plan`; `workspace` as for `forest_decode`.

    A plan's rows, and whether it has wide tiles, are read when the operator runs: a captured graph serves plans that
    are like the captured one in both.
    """

    def __init__(self, plan: DevicePlan, workspace: DecodeWorkspace) -> None:
        self.plan = plan
        self.workspace = workspace
        self.handle = next(_handles)
        _known[self.handle] = self

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slots: torch.Tensor,
        tables: torch.Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        kv_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`query` [num_tokens, num_heads, head_dim]; `key`, `value` [num_tokens, num_kv_heads, head_dim]; `kv_cache`
        [num_blocks, 2, num_kv_heads, block_size, head_dim], keys first: one layer of a pool, of any strides but 1 along
        head_dim; `slots` int64 [num_tokens], block * block_size + token, or -1 for padding; `tables` int32 [num_rows,
        max_blocks]; `kv_scales` float32 [2], of keys and of values, with a cache of float8_e4m3fn and no other. Returns
        [num_tokens, num_heads, head_dim]."""
        out: torch.Tensor = torch.ops.chatserve.store_and_attend(
            query, key, value, kv_cache, slots, tables, self.plan.packed, self.handle, scale, softcap, kv_scales
        )
        return out


@torch.library.custom_op("chatserve::store_and_attend", mutates_args=("kv_cache",))
def store_and_attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    tables: torch.Tensor,
    plan: torch.Tensor,
    handle: int,
    scale: float,
    softcap: float | None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `PagedAttention`, which `handle` names; `plan` is its plan's packed array, here so that torch knows of the
    read.

    Raises:
        ValueError: nothing that still exists has this handle, or the scales do not go with the cache.
    """
    del plan
    attention = _known.get(handle)
    if attention is None:
        raise ValueError(f"expected the handle of a PagedAttention, got {handle}")
    keys, values = kv_cache.unbind(1)
    store_kv(key, value, keys, values, slots, kv_scales)
    key_scale, value_scale = (None, None) if kv_scales is None else kv_scales.split(1)
    attend = paged_prefill if attention.plan.is_causal else forest_decode
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    attend(
        query, keys, values, tables, attention.plan, attention.workspace,
        scale=scale, softcap=softcap, key_scale=key_scale, value_scale=value_scale, out=out,
    )  # fmt: skip
    return out


@store_and_attend.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slots: torch.Tensor,
    tables: torch.Tensor,
    plan: torch.Tensor,
    handle: int,
    scale: float,
    softcap: float | None,
    kv_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    del key, value, kv_cache, slots, tables, plan, handle, scale, softcap, kv_scales
    return torch.empty(query.shape, dtype=query.dtype, device=query.device)
