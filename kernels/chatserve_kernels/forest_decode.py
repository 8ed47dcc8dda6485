"""What a model calls: decode over a forest of sessions, and prefill over a paged prefix.

Chooses and launches the kernels of `attend` for a plan that is on the device already. Owns the memory of partial
results; must not know how work is planned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton

from chatserve_kernels.attend import attend_kernel, merge_kernel

if TYPE_CHECKING:
    from chatserve_kernels.device_plan import DevicePlan
    from chatserve_kernels.work import PlanLayout

LOG2_E = math.log2(math.e)
MERGE_ELEMENTS = 4096
"""Numbers of partial results a merging program holds at a time: 32 registers of each of its threads."""
MERGE_WARPS = 4
MIN_DOT = 16
"""The shortest sum that a matrix product computes."""


@dataclass(frozen=True, slots=True)
class TileConfig:
    """How one specialisation is compiled. `programs` a multiprocessor run at a time, in `max_registers` a thread."""

    query_rows: int
    key_tokens: int
    warps: int
    stages: int
    programs: int
    max_registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """Triton's launch options."""
        limit = {} if self.max_registers is None else {"maxnreg": self.max_registers}
        return {"num_warps": self.warps, "num_stages": self.stages, **limit}


class DecodeWorkspace:
    """Partial results and arrival counts. One a stream: two launches that may overlap must not share one."""

    def __init__(
        self, layout: PlanLayout, num_heads: int, num_kv_heads: int, head_dim: int, device: torch.device
    ) -> None:
        partials = layout.max_partials
        self.out = torch.empty((partials, num_heads, head_dim), dtype=torch.float32, device=device)
        self.sums = torch.empty((partials, num_heads), dtype=torch.float32, device=device)
        self.arrivals = torch.zeros((layout.max_rows, num_kv_heads), dtype=torch.int32, device=device)


def merge_constants(num_heads: int, num_kv_heads: int, head_dim: int) -> dict[str, int]:
    """Compile-time arguments that both kernels take."""
    group = num_heads // num_kv_heads
    merge_pad = triton.next_power_of_2(group * head_dim)
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "MERGE_PAD": merge_pad,
        "SPLITS": min(8, max(1, MERGE_ELEMENTS // merge_pad)),
    }


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
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from one token a row.

    `query` [num_rows, num_heads, head_dim], the plan's rows and padding; `key`, `value` [num_blocks, num_kv_heads,
    block_size, head_dim], any strides but 1 along head_dim, which lets a layer of any pool be passed as a view;
    `tables` int32 [num_rows, max_blocks]. What is launched depends on `plan.with_wide` alone, so a graph serves any
    later plan that is like the captured one in that. Returns `out`, like `query`.
    """
    if plan.is_causal:
        raise ValueError("expected a decode plan, got one of new tokens")
    return _attend(query, key, value, tables, plan, workspace, scale, softcap, out)


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
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend from each row's new tokens to its keys up to their own, which must be in the pool already.

    As `forest_decode`, with `query` [num_tokens, num_heads, head_dim] in the order of a `PrefillPlanner`'s plan, and
    `tables` a table for each of its rows.
    """
    if not plan.is_causal:
        raise ValueError("expected a plan of new tokens, got a decode plan")
    return _attend(query, key, value, tables, plan, workspace, scale, softcap, out)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tables: torch.Tensor,
    plan: DevicePlan,
    workspace: DecodeWorkspace,
    scale: float,
    softcap: float | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = key.shape[1:3]
    if out is None:
        out = torch.empty_like(query)
    _check(query, key, value, tables, out, plan, scale)
    if softcap is None:
        score_scale, score_cap = scale * LOG2_E, 0.0
    else:
        score_scale, score_cap = 2 * scale * LOG2_E / softcap, softcap * LOG2_E
    constants = merge_constants(num_heads, num_kv_heads, head_dim)
    launch_early = {"launch_pdl": True} if query.is_cuda else {}

    def attend(config: TileConfig, starts: torch.Tensor, items: torch.Tensor, depends: int) -> None:
        attend_kernel[((starts.numel() - 1) * num_kv_heads,)](
            out,
            workspace.out,
            workspace.sums,
            query,
            key,
            value,
            tables,
            starts,
            items,
            plan.entries,
            plan.last_positions,
            workspace.arrivals,
            score_scale,
            score_cap,
            plan.window or 0,
            *out.stride()[:2],
            *query.stride()[:2],
            *key.stride()[:3],
            *value.stride()[:3],
            tables.stride(0),
            **constants,
            HEAD_PAD=max(MIN_DOT, triton.next_power_of_2(head_dim)),
            BLOCK=block_size,
            M=config.query_rows,
            N=config.key_tokens,
            HAS_WINDOW=plan.window is not None,
            IS_CAUSAL=plan.is_causal,
            HAS_CAP=softcap is not None,
            SAME_STRIDES=key.stride() == value.stride(),
            PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            WIDEN=not query.is_cuda,
            MERGES=not plan.with_wide,
            DEPENDS=depends if query.is_cuda else 0,
            **config.options,
            **launch_early,
        )

    if plan.with_wide:
        # The wide kernel comes first, and the small one, which needs nothing of it, fills what it leaves of the chip;
        # at its end the small one waits for it, so that whoever waits for the small one has waited for both.
        attend(plan.configs.wide, plan.wide_starts, plan.wide_items, 1)
        if not plan.is_causal:
            attend(plan.configs.beside, plan.small_starts, plan.small_items, 2)
        merge_kernel[(plan.configs.merge_programs,)](
            out,
            workspace.out,
            workspace.sums,
            plan.num_merges,
            plan.merges,
            *out.stride()[:2],
            **constants,
            DEPENDS=int(query.is_cuda),
            num_warps=MERGE_WARPS,
            **launch_early,
        )
    else:
        attend(plan.configs.alone, plan.small_starts, plan.small_items, 1)
    return out


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tables: torch.Tensor,
    out: torch.Tensor,
    plan: DevicePlan,
    scale: float,
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
    if plan.num_rows != num_rows:
        raise ValueError(f"expected the plan's {plan.num_rows} rows, got {num_rows}")
    if scale <= 0:
        raise ValueError(f"expected a scale above 0, got {scale}")
