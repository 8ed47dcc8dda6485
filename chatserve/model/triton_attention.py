"""Paged attention by our own Triton kernels: a batch's decode rows as one forest, its prompts as one packed prefill.

`StepAttention` for what `why_not` has no objection to: the same numbers as `TorchAttention`, up to rounding. A step is
planned once for each sliding window among the layers; all layers share the plan, its buffers and the memory of partial
results. So one step at a time: `prepare` ends the step before. Must not know models, requests or sampling, nor how the
kernels cut their work.

Imports triton: whoever may run without it imports this module late.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
from chatserve_kernels.configs import default_configs, prefill_configs
from chatserve_kernels.device_plan import DevicePlan, make_planner, make_prefill_planner
from chatserve_kernels.forest import CostModel
from chatserve_kernels.forest_decode import DecodeWorkspace, forest_decode, paged_prefill
from chatserve_kernels.paged_kv import store_kv
from chatserve_kernels.plan import DecodePlanner, PrefillPlanner

from chatserve.model.attention_plan import PackedBatch, token_slots
from chatserve.model.block_tables import ALIGNMENT

if TYPE_CHECKING:
    from chatserve_kernels.device_plan import DecodeConfigs
    from chatserve_kernels.work import PlanLayout
    from numpy.typing import NDArray

    from chatserve.model.kv_storage import KVStorage

HEAD_DIMS = (8, 16, 64, 80, 96, 128, 256)
"""Head sizes that the kernels have been held against the torch implementation for, on a GPU."""
MAX_GROUP = 16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CAPABILITY = (9, 0)
"""Hopper, whose dependent launches the kernels use, and whose shared memory their tiles are cut for."""

_SMALLEST_CAPACITY = 16
_CAPACITY_FACTOR = 8
_INTERPRETED_PROCESSORS = 2
"""An interpreter runs programs one by one; so few still cut the work in several places."""


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on a CPU."""
    return bool(triton.knobs.runtime.interpret)


def why_not(storage: KVStorage, num_heads: int) -> str | None:
    """What keeps the kernels from serving such a model there, or None."""
    device = storage.device_pool.device
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability != CAPABILITY:
            return f"it needs compute capability {_dotted(CAPABILITY)}, not {_dotted(capability)}"
    elif not is_interpreted():
        return f"it needs a CUDA device, not {device.type}"
    return _why_not_shape(storage, num_heads // storage.shape.num_kv_heads)


def _why_not_shape(storage: KVStorage, group: int) -> str | None:
    shape, dtype = storage.shape, storage.device_pool.dtype
    if shape.head_dim not in HEAD_DIMS:
        return f"it needs heads of {', '.join(map(str, HEAD_DIMS))}, not {shape.head_dim}"
    if group > MAX_GROUP:
        return f"it needs at most {MAX_GROUP} query heads a KV head, not {group}"
    if shape.block_size & (shape.block_size - 1):
        return f"it needs a block-size that is a power of two, not {shape.block_size}"
    return None if dtype in DTYPES else f"it needs a floating-point KV cache, not {dtype}"


@dataclass(slots=True)
class _Rows:
    """The rows of a batch that one kernel computes."""

    kernel: _Kernel
    tokens: slice | torch.Tensor
    """Their tokens in the batch; a tensor where other rows' tokens lie between."""
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    tables: NDArray[np.int32]
    device_tables: torch.Tensor
    plans: dict[int | None, DevicePlan]

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        """Fill the rows' share of `out` [num_tokens, num_heads, head_dim]; `key`, `value`: one layer of the pool."""
        plan = self.plans.get(window)
        if plan is None:
            plan = self.plans[window] = self.kernel.send(self, window)
        launch = paged_prefill if plan.is_causal else forest_decode
        workspace = self.kernel.workspace
        if isinstance(self.tokens, slice):
            own, into = query[self.tokens], out[self.tokens]
            launch(own, key, value, self.device_tables, plan, workspace, scale=scale, softcap=softcap, out=into)
        else:
            own = query[self.tokens]
            out[self.tokens] = launch(
                own, key, value, self.device_tables, plan, workspace, scale=scale, softcap=softcap
            )


class _Kernel:
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
        self._plans: dict[int | None, DevicePlan] = {}

    def send(self, rows: _Rows, window: int | None) -> DevicePlan:
        """Plan a step's rows for the layers with one window."""
        plan = self._plans.get(window)
        if plan is None:
            plan = self._plans[window] = DevicePlan(self._planner.layout, self._configs, self._device)
        if isinstance(self._planner, DecodePlanner):
            planned_before = bool(rows.plans)  # what these rows share is the same in all windows
            plan.send(
                self._planner.plan(rows.tables, rows.starts + 1, window=window, same_rows=planned_before),
            )
        else:
            plan.send(self._planner.plan(rows.starts, rows.lengths, window=window))
        return plan


@dataclass(slots=True)
class TritonStep:
    """`StoredAttention` by the kernels."""

    backend: TritonAttention
    slots: torch.Tensor
    parts: list[_Rows]

    def caches(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.backend.layers[layer]

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

    def attend_stored(
        self,
        layer: int,
        query: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        keys, values = self.caches(layer)
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for rows in self.parts:
            rows.attend(query, keys, values, out, scale, window, softcap)
        return out


class TritonAttention:
    """`AttentionBackend` by the kernels, for `num_heads` query heads. `cost`: when reading KV once for several rows
    pays; None: as measured on an H200."""

    def __init__(self, storage: KVStorage, num_heads: int, *, cost: CostModel | None = None) -> None:
        assert why_not(storage, num_heads) is None
        shape, pool = storage.shape, storage.device_pool
        self.device = pool.device
        self.block_size = shape.block_size
        self.layers = [(pool[:, layer, 0], pool[:, layer, 1]) for layer in range(shape.num_layers)]
        """Keys and values, each [num_blocks, num_kv_heads, block_size, head_dim]."""
        self._storage = storage
        self._num_heads = num_heads
        self._is_half = pool.dtype.itemsize == 2
        token_bytes = 2 * shape.num_kv_heads * shape.head_dim * pool.dtype.itemsize
        self._cost = CostModel.measured(token_bytes) if cost is None else cost
        self._num_processors = (
            torch.cuda.get_device_properties(pool.device).multi_processor_count
            if pool.is_cuda
            else _INTERPRETED_PROCESSORS
        )
        self.small_rows = self._decode_configs(1).alone.query_rows // (num_heads // shape.num_kv_heads)
        """Rows of one small tile: so few never share widely."""
        self._decode: dict[int, _Kernel] = {}
        self._prefill: dict[int, _Kernel] = {}

    def prepare(self, batch: PackedBatch) -> TritonStep:
        slots = self._to_device(token_slots(batch, self.block_size))
        first_tokens = np.cumsum(batch.lengths) - batch.lengths
        parts = []
        is_decode = batch.lengths == 1
        if num_rows := int(is_decode.sum()):
            parts.append(self._rows(self._decode_kernel(num_rows), batch, first_tokens, np.flatnonzero(is_decode)))
        if num_rows < len(is_decode):
            kernel = self._prefill_kernel(int(batch.lengths.sum()) - num_rows)
            parts.append(self._rows(kernel, batch, first_tokens, np.flatnonzero(~is_decode)))
        return TritonStep(self, slots, parts)

    def decode_planner(self, max_rows: int) -> tuple[DecodePlanner, DecodeConfigs]:
        """A planner for up to so many decode rows, and the tiles that it plans for."""
        shape = self._storage.shape
        configs = self._decode_configs(max_rows)
        planner = make_planner(
            configs,
            num_processors=self._num_processors,
            max_rows=max_rows,
            max_context=self._storage.num_blocks * shape.block_size,
            num_heads=self._num_heads,
            num_kv_heads=shape.num_kv_heads,
            block_size=shape.block_size,
            cost=self._cost,
        )
        return planner, configs

    def prefill_planner(self, max_tokens: int, max_rows: int) -> tuple[PrefillPlanner, DecodeConfigs]:
        """A planner for up to so many new tokens of so many rows, and its tiles."""
        shape = self._storage.shape
        configs = prefill_configs(shape.head_dim, is_half=self._is_half)
        if self.device.type != "cuda":
            configs = replace(configs, merge_programs=_INTERPRETED_PROCESSORS)
        planner = make_prefill_planner(
            configs,
            num_processors=self._num_processors,
            max_tokens=max_tokens,
            max_rows=max_rows,
            num_heads=self._num_heads,
            num_kv_heads=shape.num_kv_heads,
            block_size=shape.block_size,
        )
        return planner, configs

    def workspace(self, layout: PlanLayout) -> DecodeWorkspace:
        shape = self._storage.shape
        return DecodeWorkspace(layout, self._num_heads, shape.num_kv_heads, shape.head_dim, self.device)

    def _rows(
        self, kernel: _Kernel, batch: PackedBatch, first_tokens: NDArray[np.int64], which: NDArray[np.intp]
    ) -> _Rows:
        starts, lengths = batch.starts[which], batch.lengths[which]
        ends = first_tokens[which] + lengths
        tokens: slice | torch.Tensor
        if int(ends[-1] - first_tokens[which[0]]) == int(lengths.sum()):
            tokens = slice(int(first_tokens[which[0]]), int(ends[-1]))
        else:
            within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            tokens = self._to_device(np.repeat(first_tokens[which], lengths) + within)
        width = -(-batch.tables.shape[1] // ALIGNMENT) * ALIGNMENT
        tables = np.zeros((len(which), width), dtype=np.int32)
        tables[:, : batch.tables.shape[1]] = batch.tables[which]
        return _Rows(kernel, tokens, starts, lengths, tables, self._to_device(tables), {})

    def _decode_kernel(self, num_rows: int) -> _Kernel:
        max_rows = _capacity(num_rows)
        if max_rows not in self._decode:
            planner, configs = self.decode_planner(max_rows)
            self._decode[max_rows] = _Kernel(planner, configs, self.workspace(planner.layout), self.device)
        return self._decode[max_rows]

    def _prefill_kernel(self, num_tokens: int) -> _Kernel:
        max_tokens = _capacity(num_tokens)
        if max_tokens not in self._prefill:
            planner, configs = self.prefill_planner(max_tokens, max_tokens // 2)  # a row of one token is a decode row
            self._prefill[max_tokens] = _Kernel(planner, configs, self.workspace(planner.layout), self.device)
        return self._prefill[max_tokens]

    def _decode_configs(self, max_rows: int) -> DecodeConfigs:
        configs = default_configs(self._storage.shape.head_dim, is_half=self._is_half, max_rows=max_rows)
        return configs if self.device.type == "cuda" else replace(configs, merge_programs=_INTERPRETED_PROCESSORS)

    def _to_device(self, array: NDArray[np.int64] | NDArray[np.int32]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)


def _capacity(size: int) -> int:
    """The next of few sizes to plan for, so that planners and their buffers are made a few times in all."""
    capacity = _SMALLEST_CAPACITY
    while capacity < size:
        capacity *= _CAPACITY_FACTOR
    return capacity


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
