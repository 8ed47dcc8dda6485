"""Launches of the attention kernels: which one computes a tile, and with what arguments.

Knows the kernels' parameters; must not know how work is planned, nor own any memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton

from chatserve_kernels import attend_hopper
from chatserve_kernels.attend import attend_kernel
from chatserve_kernels.early_launch import can_launch_early, early_launch
from chatserve_kernels.merge import merge_kernel

if TYPE_CHECKING:
    from chatserve_kernels.device_plan import DevicePlan
    from chatserve_kernels.forest_decode import DecodeWorkspace
    from chatserve_kernels.tiles import TileConfig

LOG2_E = math.log2(math.e)
MERGE_ELEMENTS = 4096
"""Numbers of partial results a merging program holds at a time: 32 registers of each of its threads."""
MERGE_WARPS = 4
MIN_DOT = 16
"""The shortest sum that a matrix product computes."""


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


@dataclass(frozen=True, slots=True)
class Call:
    """One layer's attention: the arguments of `forest_decode` or `paged_prefill`, checked."""

    out: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    tables: torch.Tensor
    plan: DevicePlan
    workspace: DecodeWorkspace
    scale: float
    softcap: float | None
    key_scale: torch.Tensor | None
    value_scale: torch.Tensor | None

    def attend(
        self, config: TileConfig, starts: torch.Tensor, items: torch.Tensor, *, depends: int, merges: bool
    ) -> None:
        """`depends`: 1, wait for the kernel before, or 2, only at the end; `merges`: whoever completes a row's partials
        merges them."""
        constants = {
            "HAS_WINDOW": self.plan.window is not None,
            "HAS_CAP": self.softcap is not None,
            "IS_CAUSAL": self.plan.is_causal,
            "DEPENDS": depends if can_launch_early(self.query.device) else 0,
        }
        if not merges and self._is_for_hopper(config):
            self._on_hopper(config, starts, items, constants)
        else:
            self._anywhere(config, starts, items, constants | {"MERGES": merges})

    def merge(self) -> None:
        """What no kernel of `attend` has merged."""
        merge_kernel[(self.plan.configs.merge_programs,)](
            self.out,
            self.workspace.out,
            self.workspace.sums,
            self.plan.num_merges,
            self.plan.merges,
            *self.out.stride()[:2],
            **self._merge_constants,
            DEPENDS=int(can_launch_early(self.query.device)),
            num_warps=MERGE_WARPS,
            **early_launch(self.query.device),
        )

    def _is_for_hopper(self, config: TileConfig) -> bool:
        """Whether the copy engine fetches this tile's keys and values."""
        return (
            config.hopper is not None
            and self.key_scale is None
            and attend_hopper.takes(self.query, self.key, self.value, config.key_tokens)
        )

    def _on_hopper(
        self, config: TileConfig, starts: torch.Tensor, items: torch.Tensor, constants: dict[str, int | bool]
    ) -> None:
        assert config.hopper is not None
        key, value = self.key, self.value
        attend_hopper.attend_hopper_kernel[self._grid(starts)](
            self.out,
            self.workspace.out,
            self.workspace.sums,
            self.query,
            attend_hopper.row_descriptor(key),
            attend_hopper.row_descriptor(value),
            self.tables,
            starts,
            items,
            self.plan.entries,
            self.plan.last_positions,
            *self._score_factors,
            self.plan.window or 0,
            *self.out.stride()[:2],
            *self.query.stride()[:2],
            *(stride // key.stride(2) for stride in key.stride()[:2]),
            *(stride // value.stride(2) for stride in value.stride()[:2]),
            self.tables.stride(0),
            **attend_hopper.constants(config, self.query.shape[1], key.shape[1], key.shape[3], key.shape[2]),
            **constants,
            **config.hopper.options,
            **early_launch(self.query.device),
        )

    def _anywhere(
        self, config: TileConfig, starts: torch.Tensor, items: torch.Tensor, constants: dict[str, int | bool]
    ) -> None:
        key, value = self.key, self.value
        attend_kernel[self._grid(starts)](
            self.out,
            self.workspace.out,
            self.workspace.sums,
            self.query,
            key,
            value,
            self.tables,
            starts,
            items,
            self.plan.entries,
            self.plan.last_positions,
            self.workspace.arrivals,
            self.key_scale,
            self.value_scale,
            *self._score_factors,
            self.plan.window or 0,
            *self.out.stride()[:2],
            *self.query.stride()[:2],
            *key.stride()[:3],
            *value.stride()[:3],
            self.tables.stride(0),
            int(self.key_scale is not None and self.key_scale.numel() > 1),
            **self._merge_constants,
            HEAD_PAD=max(MIN_DOT, triton.next_power_of_2(key.shape[3])),
            BLOCK=key.shape[2],
            M=config.query_rows,
            N=config.key_tokens,
            SAME_STRIDES=key.stride() == value.stride(),
            PRECISION="ieee" if self.query.dtype == torch.float32 else "tf32",
            WIDEN=not self.query.is_cuda,
            **constants,
            **config.options,
            **early_launch(self.query.device),
        )

    def _grid(self, starts: torch.Tensor) -> tuple[int]:
        return ((starts.numel() - 1) * self.key.shape[1],)

    @property
    def _merge_constants(self) -> dict[str, int]:
        return merge_constants(self.query.shape[1], self.key.shape[1], self.key.shape[3])

    @property
    def _score_factors(self) -> tuple[float, float]:
        if self.softcap is None:
            return self.scale * LOG2_E, 0.0
        return 2 * self.scale * LOG2_E / self.softcap, self.softcap * LOG2_E
