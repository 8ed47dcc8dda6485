"""The parts of a step that one launch each computes: decoding rows, prompts over pages, a long prompt densely.

Each fills its tokens of the step's output. Plans are made and sent once a step and sliding window. `PagedStep` is
what eager steps and those of graphs share. Must not know how rows were chosen. Imports triton, as `triton_attention`
does.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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

    from chatserve.model.triton_attention import TritonAttention


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
        caches: tuple[torch.Tensor, torch.Tensor],
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
        launch(own, *caches, self.device_tables, plan, workspace, scale=scale, softcap=softcap, out=into)
        if not in_place:
            out[self.tokens] = into


@dataclass(slots=True)
class DenseRow:
    """A piece of one long prompt, its tokens one after the other; for layers without window and soft cap."""

    piece: DensePiece
    first_token: int
    table: torch.Tensor
    workspace: DenseWorkspace

    def attend(self, query: torch.Tensor, caches: tuple[torch.Tensor, torch.Tensor], scale: float) -> torch.Tensor:
        """The piece's share of the step's output, [num_tokens, num_heads, head_dim]."""
        return dense_prefill(query[self.tokens], *caches, self.table, self.piece, self.workspace, scale=scale)

    @property
    def tokens(self) -> slice:
        return slice(self.first_token, self.first_token + self.piece.num_tokens)


class PagedStep(ABC):
    """What a `StoredAttention` by the kernels is, whatever it launches: a layer's share of the pool, and a store."""

    slots: torch.Tensor
    """int64 [num_tokens], as in `StoredAttention`."""
    _backend: TritonAttention

    def caches(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._backend.layers[layer]

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
        store_kv(key, value, *self.caches(layer), self.slots)
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
