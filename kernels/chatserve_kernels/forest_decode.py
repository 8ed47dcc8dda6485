"""What a model calls: decode over a forest of sessions, and prefill over a paged prefix.

Checks the arguments, and says which kernels run (`launch` module) for a plan that is on the device already. Owns the
memory of partial results; must not know how work is planned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from chatserve_kernels.launch import Call
from chatserve_kernels.tiles import TileConfig

if TYPE_CHECKING:
    from chatserve_kernels.device_plan import DevicePlan
    from chatserve_kernels.work import PlanLayout

__all__ = ["DecodeWorkspace", "TileConfig", "forest_decode", "paged_prefill"]


class DecodeWorkspace:
    """Partial results and arrival counts. One a stream: two launches that may overlap must not share one."""

    def __init__(
        self, layout: PlanLayout, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
    ) -> None:
        partials = layout.max_partials
        self.out = torch.empty((partials, num_heads, head_dim), dtype=torch.float32, device=device)
        self.sums = torch.empty((partials, num_heads), dtype=torch.float32, device=device)
        self.arrivals = torch.zeros((layout.max_rows, num_kv_heads), dtype=torch.int32, device=device)


def forest_decode(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tables: torch.Tensor,
    plan: DevicePlan,
    workspace: DecodeWorkspace,
    *,
    scale: float,
    softcap: float | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from one token a row.

    `query` [num_rows, num_heads, head_dim], the plan's rows and padding; `key`, `value` [num_blocks, num_kv_heads,
    block_size, head_dim], any strides but 1 along head_dim, which lets a layer of any pool be passed as a view;
    `tables` int32 [num_rows, max_blocks]. What is launched depends on `plan.with_wide` alone, so a graph serves any
    later plan that is like the captured one in that.

    Keys and values may be float8_e4m3fn: they are widened to the query's type before they are multiplied, since
    Hopper's 8-bit products lose accuracy over long contexts. `key_scale` and `value_scale`, float32 [1] or
    [num_kv_heads] on the device, are what the stored numbers must be multiplied by, and above 0.

    Returns `out`, like `query`.
    """
    if plan.is_causal:
        raise ValueError("expected a decode plan, got one of new tokens")
    return _attend(query, key, value, tables, plan, workspace, scale, softcap, key_scale, value_scale, out)


def paged_prefill(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tables: torch.Tensor,
    plan: DevicePlan,
    workspace: DecodeWorkspace,
    *,
    scale: float,
    softcap: float | None = None,
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from each row's new tokens to its keys up to their own, which must be in the pool already.

    As `forest_decode`, with `query` [num_tokens, num_heads, head_dim] in the order of a `PrefillPlanner`'s plan, and
    `tables` a table for each of its rows.
    """
    if not plan.is_causal:
        raise ValueError("expected a plan of new tokens, got a decode plan")
    return _attend(query, key, value, tables, plan, workspace, scale, softcap, key_scale, value_scale, out)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tables: torch.Tensor,
    plan: DevicePlan,
    workspace: DecodeWorkspace,
    scale: float,
    softcap: float | None,
    key_scale: torch.Tensor | None,
    value_scale: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    if out is None:
        out = torch.empty_like(query)
    _check(query, key, value, tables, out, plan)
    _check_factors(scale, softcap)
    _check_workspace(workspace, plan, key.shape[1], *query.shape[1:])
    _check_scales(key_scale, value_scale, key.shape[1], query.device)
    call = Call(out, query, key, value, tables, plan, workspace, scale, softcap, key_scale, value_scale)
    configs = plan.configs
    if not plan.with_wide:
        call.attend(configs.alone, plan.small_starts, plan.small_items, depends=1, merges=True)
        return out
    # The wide kernel comes first, and the small one, which needs nothing of it, fills what it leaves of the chip; at
    # its end the small one waits for it, so that whoever waits for the small one has waited for both.
    call.attend(configs.wide, plan.wide_starts, plan.wide_items, depends=1, merges=False)
    if not plan.is_causal:
        call.attend(configs.beside, plan.small_starts, plan.small_items, depends=2, merges=False)
    call.merge()
    return out


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tables: torch.Tensor,
    out: torch.Tensor,
    plan: DevicePlan,
) -> None:
    num_rows, num_heads, head_dim = query.shape
    if key.shape != value.shape or key.shape[3] != head_dim or num_heads % key.shape[1]:
        raise ValueError(f"expected keys and values of {head_dim} for {num_heads} heads, got {list(key.shape)}")
    if out.shape != query.shape:
        raise ValueError(f"expected out as query, {list(query.shape)}, got {list(out.shape)}")
    if tables.dtype != torch.int32 or tables.stride(1) != 1:
        raise ValueError("expected int32 tables with contiguous rows")
    if any(tensor.stride(-1) != 1 for tensor in (query, key, value, out)):
        raise ValueError("expected a stride of 1 along head_dim")
    if key.shape[2] != plan.layout.block_size:
        raise ValueError(f"expected blocks of {plan.layout.block_size} tokens, as planned, got {key.shape[2]}")
    if plan.num_rows != num_rows:
        raise ValueError(f"expected the plan's {plan.num_rows} rows, got {num_rows}")


def _check_factors(scale: float, softcap: float | None) -> None:
    if scale <= 0:
        raise ValueError(f"expected a scale above 0, got {scale}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"expected a soft cap above 0, or None, got {softcap}")


def _check_workspace(
    workspace: DecodeWorkspace, plan: DevicePlan, num_kv_heads: int, num_heads: int, head_dim: int
) -> None:
    """One that is too small would be written past its end."""
    layout = plan.layout
    partials, *heads = workspace.out.shape
    rows, kv_heads = workspace.arrivals.shape
    if partials < layout.max_partials or rows < layout.max_rows:
        wanted = f"{layout.max_partials} partial results of {layout.max_rows} rows"
        raise ValueError(f"expected a workspace for the plan's {wanted}, got one for {partials} of {rows}")
    if (*heads, kv_heads) != (num_heads, head_dim, num_kv_heads):
        wanted = f"{num_heads} heads of {head_dim} and {num_kv_heads} KV heads"
        raise ValueError(f"expected a workspace for {wanted}, got one for {heads} and {kv_heads}")


def _check_scales(
    key_scale: torch.Tensor | None, value_scale: torch.Tensor | None, num_kv_heads: int, device: torch.device
) -> None:
    if key_scale is None and value_scale is None:
        return
    if key_scale is None or value_scale is None or key_scale.shape != value_scale.shape:
        raise ValueError("expected scales of one shape for both keys and values, or for neither")
    if key_scale.shape not in {(1,), (num_kv_heads,)}:
        raise ValueError(f"expected 1 or {num_kv_heads} scales, got {list(key_scale.shape)}")
    for scales in (key_scale, value_scale):
        if scales.dtype != torch.float32 or scales.device != device or not scales.is_contiguous():
            raise ValueError(f"expected contiguous float32 scales on {device}, got {scales.dtype} on {scales.device}")
