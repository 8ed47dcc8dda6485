"""A decode plan on the device: where it lies, and how a new one gets there without waiting.

The buffer's addresses never change, so that a captured graph reads whatever plan was sent last. A plan is one packed
copy from a pinned ring (`staging`). Must not know what the plan's numbers mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from chatserve_kernels.plan import DecodePlanner
from chatserve_kernels.prefill_plan import PrefillPlanner
from chatserve_kernels.staging import PinnedRing
from chatserve_kernels.work import ENTRY_FIELDS, ITEM_FIELDS, MERGE_FIELDS, DecodePlan, PlanLayout, TileShape

if TYPE_CHECKING:
    from chatserve_kernels.forest import CostModel
    from chatserve_kernels.tiles import Pace, TileConfig


MERGE_PROGRAMS = 2112
"""16 a multiprocessor, which is as many as fit."""


@dataclass(frozen=True, slots=True)
class DecodeConfigs:
    """Compile-time choices of the decode kernels: small tiles when they run alone, and small ones that share the
    multiprocessors with wide ones."""

    alone: TileConfig
    beside: TileConfig
    wide: TileConfig
    pace: Pace | None = None
    """None: wide and small tiles are each cut for the whole chip."""
    merge_programs: int = MERGE_PROGRAMS


class DevicePlan:
    """The latest plan sent. Sending is ordered by the current stream; `num_rows`, `with_wide` and `window` are that
    plan's."""

    def __init__(self, layout: PlanLayout, configs: DecodeConfigs, device: torch.device) -> None:
        self.layout = layout
        self.configs = configs
        self.num_rows = 0
        self.with_wide = False
        self.window: int | None = None
        self.is_causal = False
        self.packed = torch.zeros(layout.size, dtype=torch.int32, device=device)
        self._ring = PinnedRing(layout.size, torch.int32, device)
        self._starts = {False: self.packed[layout.alone_starts], True: self.packed[layout.beside_starts]}
        self.wide_starts = self.packed[layout.wide_starts]
        self.last_positions = self.packed[layout.last_positions]
        self.num_merges = self.packed[layout.num_merges]
        self.merges = self.packed[layout.merges].view(-1, MERGE_FIELDS)
        self.small_items = self.packed[layout.small_items].view(-1, ITEM_FIELDS)
        self.wide_items = self.packed[layout.wide_items].view(-1, ITEM_FIELDS)
        self.entries = self.packed[layout.entries].view(-1, ENTRY_FIELDS)

    @property
    def small_starts(self) -> torch.Tensor:
        return self._starts[self.with_wide]

    def send(self, plan: DecodePlan) -> None:
        self._ring.acquire(self.layout.size)[:] = plan.packed
        self._ring.send(self.packed)
        self.num_rows, self.with_wide, self.window = plan.num_rows, plan.with_wide, plan.window
        self.is_causal = plan.is_causal


def make_planner(
    configs: DecodeConfigs,
    *,
    num_processors: int,
    max_rows: int,
    max_context: int,
    num_heads: int,
    num_kv_heads: int,
    block_size: int,
    cost: CostModel,
    share: bool = True,
    fixed_chunk: int | None = None,
) -> DecodePlanner:
    """A planner whose shares fill `num_processors` multiprocessors under these tiles."""

    def shape(config: TileConfig) -> TileShape:
        slots = max(1, num_processors * config.programs // num_kv_heads)
        return TileShape(config.query_rows, config.key_tokens, slots)

    return DecodePlanner(
        max_rows=max_rows,
        max_context=max_context,
        group_size=num_heads // num_kv_heads,
        block_size=block_size,
        alone=shape(configs.alone),
        beside=shape(configs.beside),
        wide=shape(configs.wide),
        share=share,
        fixed_chunk=fixed_chunk,
        cost=cost,
        pace=configs.pace,
    )


def make_prefill_planner(
    configs: DecodeConfigs,
    *,
    num_processors: int,
    max_tokens: int,
    max_rows: int,
    num_heads: int,
    num_kv_heads: int,
    block_size: int,
) -> PrefillPlanner:
    """A planner of new tokens whose shares fill `num_processors` multiprocessors."""
    tile = configs.wide
    return PrefillPlanner(
        max_tokens=max_tokens,
        max_rows=max_rows,
        group_size=num_heads // num_kv_heads,
        block_size=block_size,
        tile=TileShape(tile.query_rows, tile.key_tokens, max(1, num_processors * tile.programs // num_kv_heads)),
    )
