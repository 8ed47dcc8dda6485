"""The parts of a step that one launch each computes: decoding rows, prompts over pages, a long prompt densely.

Each fills its tokens of the step's output. Plans are made and sent once a step and sliding window. `PagedStep` is
what eager steps and those of graphs share. Must not know how rows were chosen. Imports triton, as `triton_attention`
does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import torch
from chatserve_kernels.dense_prefill import dense_prefill
from chatserve_kernels.device_plan import DevicePlan
from chatserve_kernels.forest_decode import forest_decode, paged_prefill
from chatserve_kernels.paged_kv import store_kv
from chatserve_kernels.plan import DecodePlanner
from chatserve_kernels.prefill_plan import PrefillPlanner
from chatserve_kernels.work import rename_tables

if TYPE_CHECKING:
    import numpy as np
    from chatserve_kernels.dense_prefill import DensePiece, DenseWorkspace
    from chatserve_kernels.device_plan import DecodeConfigs
    from chatserve_kernels.forest_decode import DecodeWorkspace
    from numpy.typing import NDArray

    from chatserve.model.kv_storage import KVStorage
    from chatserve.model.triton_attention import TritonAttention


class LayerKV(NamedTuple):
    """A layer's share of the pool, as views, and what its numbers must be multiplied by."""

    keys: torch.Tensor
    """[num_blocks, num_kv_heads, block_size, head_dim]"""
    values: torch.Tensor
    """The same."""
    scales: torch.Tensor | None
    """float32 [2], of keys and of values, on the device; None: the pool's type needs none."""
    factors: tuple[float, float]
    """The same numbers."""

    @classmethod
    def of(cls, storage: KVStorage, layer: int) -> LayerKV:
        scales = None if storage.device_scales is None else storage.device_scales[layer]
        return cls(*storage.layer(layer), scales, storage.scales[layer])

    @property
    def key_scale(self) -> torch.Tensor | None:
        """float32 [1]"""
        return None if self.scales is None else self.scales[:1]

    @property
    def value_scale(self) -> torch.Tensor | None:
        """float32 [1]"""
        return None if self.scales is None else self.scales[1:]


class PagedKernel:
    """A planner for batches up to some size, and what its plans are executed in."""

    def __init__(
        self,
        planner: DecodePlanner | PrefillPlanner,
        configs: DecodeConfigs,
        workspace: DecodeWorkspace,
        device: torch.device,
    ) -> None:
        self.workspace = workspace
        self._planner = planner
        self._configs = configs
        self._device = device
        self._plans: dict[tuple[int | None, bool], DevicePlan] = {}
        """By window, and whether they are for what dense kernels leave: one step may need both where only some layers
        have a soft cap."""

    def send(self, rows: PagedRows, window: int | None) -> DevicePlan:
        """Plan a step's rows for the layers with one window."""
        device_plan = self._plans.get((window, rows.is_rest))
        planner = self._planner
        if device_plan is None:
            device_plan = DevicePlan(planner.layout, self._configs, self._device)
            self._plans[window, rows.is_rest] = device_plan
        if isinstance(planner, DecodePlanner):
            planned_before = bool(rows.plans)  # what these rows share is the same in all windows
            plan = planner.plan(rows.tables[rows.which], rows.starts + 1, window=window, same_rows=planned_before)
        else:
            plan = planner.plan(rows.starts, rows.lengths, window=window)
        device_plan.send(rename_tables(planner.layout, plan, rows.which))
        return device_plan


@dataclass(slots=True)
class PagedRows:
    """Rows that one kernel computes over their pages."""

    kernel: PagedKernel
    which: NDArray[np.int64]
    """Their rows of the tables."""
    tokens: slice | torch.Tensor
    """Their tokens in the batch; a tensor where others lie between."""
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    tables: NDArray[np.int32]
    """[num_rows, max_blocks], of the whole step."""
    device_tables: torch.Tensor
    is_rest: bool = False
    """Whether dense kernels compute the others of their rows' tokens, in the layers that these are for."""
    plans: dict[int | None, DevicePlan] = field(default_factory=dict)

    def attend(
        self,
        query: torch.Tensor,
        layer: LayerKV,
        out: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        """Fill the rows' share of `out` [num_tokens, num_heads, head_dim]."""
        plan = self.plans.get(window)
        if plan is None:
            plan = self.plans[window] = self.kernel.send(self, window)
        launch = paged_prefill if plan.is_causal else forest_decode
        own = query[self.tokens]
        in_place = isinstance(self.tokens, slice)
        into = out[self.tokens] if in_place else torch.empty(own.shape, dtype=own.dtype, device=own.device)
        workspace = self.kernel.workspace
        launch(
            own, layer.keys, layer.values, self.device_tables, plan, workspace,
            scale=scale, softcap=softcap, key_scale=layer.key_scale, value_scale=layer.value_scale, out=into,
        )  # fmt: skip
        if not in_place:
            out[self.tokens] = into


@dataclass(slots=True)
class DenseRow:
    """A piece of one long prompt, its tokens one after the other; for layers without window and soft cap."""

    piece: DensePiece
    first_token: int
    table: torch.Tensor
    workspace: DenseWorkspace

    def attend(self, query: torch.Tensor, layer: LayerKV, scale: float) -> torch.Tensor:
        """The piece's share of the step's output, [num_tokens, num_heads, head_dim]."""
        key_scale, value_scale = layer.factors
        return dense_prefill(
            query[self.tokens], layer.keys, layer.values, self.table, self.piece, self.workspace,
            scale=scale, key_scale=key_scale, value_scale=value_scale,
        )  # fmt: skip

    @property
    def tokens(self) -> slice:
        return slice(self.first_token, self.first_token + self.piece.num_tokens)


class PagedStep(ABC):
    """What a `StoredAttention` by the kernels is, whatever it launches: a layer's share of the pool, and a store."""

    slots: torch.Tensor
    """int64 [num_tokens], as in `StoredAttention`."""
    _backend: TritonAttention

    def caches(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._backend.layers[layer][:2]

    def kv_scales(self, layer: int) -> torch.Tensor | None:
        return self._backend.layers[layer].scales

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
        store_kv(key, value, *self.caches(layer), self.slots, self.kv_scales(layer))
        return self.attend_stored(layer, query, scale=scale, window=window, softcap=softcap)

    @abstractmethod
    def attend_stored(
        self,
        layer: int,
        query: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor: ...
