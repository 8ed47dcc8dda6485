"""Paged attention by our own Triton kernels: a batch's decode rows as one forest, its prompts as one packed prefill.

`StepAttention` for what `why_not` has no objection to: the same numbers as `TorchAttention`, up to rounding. A step is
planned once for each sliding window among the layers; all layers share the plan, its buffers and the memory of partial
results. So one step at a time: `prepare` ends the step before. Must not know models, requests or sampling, nor how the
kernels cut their work.

Imports triton: whoever may run without it imports this module late.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
from chatserve_kernels.configs import HEAD_DIMS, MAX_GROUP, default_configs, prefill_configs
from chatserve_kernels.dense_prefill import DenseWorkspace, serves, split, warm_up
from chatserve_kernels.device_plan import make_planner, make_prefill_planner
from chatserve_kernels.forest import CostModel
from chatserve_kernels.forest_decode import DecodeWorkspace

from chatserve.model.attention_plan import PackedBatch, token_slots
from chatserve.model.block_tables import ALIGNMENT
from chatserve.model.kv_dtype import FP8, dtype_name
from chatserve.model.step_parts import DenseRow, LayerKV, PagedKernel, PagedRows, PagedStep

if TYPE_CHECKING:
    from chatserve_kernels.device_plan import DecodeConfigs
    from chatserve_kernels.plan import DecodePlanner
    from chatserve_kernels.prefill_plan import PrefillPlanner
    from chatserve_kernels.work import PlanLayout
    from numpy.typing import NDArray

    from chatserve.model.kv_storage import KVStorage

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
    return why_not_device(storage.device_pool.device) or _why_not_shape(
        storage, num_heads // storage.shape.num_kv_heads
    )


def why_not_device(device: torch.device) -> str | None:
    """What keeps the kernels from running there, whatever the model, or None."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability != CAPABILITY:
            return f"it needs compute capability {_dotted(CAPABILITY)}, not {_dotted(capability)}"
    elif not is_interpreted():
        return f"it needs a CUDA device, not {device.type}"
    return None


def _why_not_shape(storage: KVStorage, group: int) -> str | None:
    shape = storage.shape
    if shape.head_dim not in HEAD_DIMS:
        return f"it needs heads of {', '.join(map(str, HEAD_DIMS))}, not {shape.head_dim}"
    if group > MAX_GROUP:
        return f"it needs at most {MAX_GROUP} query heads a KV head, not {group}"
    if shape.block_size & (shape.block_size - 1):
        return f"it needs a block-size that is a power of two, not {shape.block_size}"
    if storage.dtype in (storage.compute_dtype, FP8):
        return None
    own, kept = map(dtype_name, (storage.compute_dtype, storage.dtype))
    return f"it needs a KV cache of the model's own type, {own}, or fp8, not {kept}"


class TritonStep(PagedStep):
    """`StoredAttention` by the kernels."""

    def __init__(self, backend: TritonAttention, batch: PackedBatch) -> None:
        self._backend = backend
        self._batch = batch
        self._first_tokens = np.cumsum(batch.lengths) - batch.lengths
        self.slots = backend.to_device(token_slots(batch, backend.block_size))
        num_rows, width = batch.tables.shape
        self._tables = np.zeros((num_rows, -(-width // ALIGNMENT) * ALIGNMENT), dtype=np.int32)
        self._tables[:, :width] = batch.tables
        self._device_tables = backend.to_device(self._tables)
        decodes, self._prompts = np.flatnonzero(batch.lengths == 1), np.flatnonzero(batch.lengths != 1)
        self._decodes = []
        if len(decodes):
            kernel = backend.decode_kernel(len(decodes))
            self._decodes.append(self._paged(kernel, decodes, np.zeros_like(decodes), batch.lengths[decodes]))
        self._longest = int((batch.starts + batch.lengths)[self._prompts].max(initial=0))

    def attend_stored(
        self,
        layer: int,
        query: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        sees_all = softcap is None and (window is None or window >= self._longest)
        dense, paged = self._densely if sees_all else ([], self._by_pages)
        kv = self._backend.layers[layer]
        if dense and dense[0].piece.num_tokens == len(query):
            return dense[0].attend(query, kv, scale)  # there is nothing else, and so nothing to copy
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for rows in (*self._decodes, *paged):
            rows.attend(query, kv, out, scale, window, softcap)
        for row in dense:
            out[row.tokens] = row.attend(query, kv, scale)
        return out

    @cached_property
    def _by_pages(self) -> list[PagedRows]:
        """All prompts, over their pages."""
        return self._paged_prompts(self._prompts, np.zeros_like(self._prompts))

    @cached_property
    def _densely(self) -> tuple[list[DenseRow], list[PagedRows]]:
        """Prompts as far as a dense kernel is worth it, and what is left of them."""
        backend, batch = self._backend, self._batch
        workspace = backend.dense_workspace
        if workspace is None:
            return [], self._by_pages
        dense: list[DenseRow] = []
        done = np.zeros_like(self._prompts)
        for index, row in enumerate(self._prompts.tolist()):
            piece = split(int(batch.starts[row]), int(batch.lengths[row]))
            if piece is not None:
                dense.append(DenseRow(piece, int(self._first_tokens[row]), self._device_tables[row], workspace))
                done[index] = piece.num_tokens
        left = batch.lengths[self._prompts] > done
        if not dense:
            return [], self._by_pages
        return dense, self._paged_prompts(self._prompts[left], done[left], is_rest=True)

    def _paged_prompts(
        self, which: NDArray[np.int64], done: NDArray[np.int64], *, is_rest: bool = False
    ) -> list[PagedRows]:
        """Rows but for their first `done` new tokens."""
        if not len(which):
            return []
        lengths = self._batch.lengths[which] - done
        kernel = self._backend.prefill_kernel(int(lengths.sum()))
        return [self._paged(kernel, which, done, lengths, is_rest=is_rest)]

    def _paged(
        self,
        kernel: PagedKernel,
        which: NDArray[np.int64],
        done: NDArray[np.int64],
        lengths: NDArray[np.int64],
        *,
        is_rest: bool = False,
    ) -> PagedRows:
        firsts = self._first_tokens[which] + done
        tokens: slice | torch.Tensor
        if int(firsts[-1] + lengths[-1] - firsts[0]) == int(lengths.sum()):
            tokens = slice(int(firsts[0]), int(firsts[-1] + lengths[-1]))
        else:
            within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            tokens = self._backend.to_device(np.repeat(firsts, lengths) + within)
        starts = self._batch.starts[which] + done
        return PagedRows(kernel, which, tokens, starts, lengths, self._tables, self._device_tables, is_rest)


class TritonAttention:
    """`AttentionBackend` by the kernels, for `num_heads` query heads. `cost`: when reading KV once for several rows
    pays; None: as measured on an H200."""

    def __init__(self, storage: KVStorage, num_heads: int, *, cost: CostModel | None = None) -> None:
        assert why_not(storage, num_heads) is None
        shape, pool = storage.shape, storage.device_pool
        self.device = pool.device
        self.block_size = shape.block_size
        self.layers = [LayerKV.of(storage, layer) for layer in range(shape.num_layers)]
        self._storage = storage
        self._num_heads = num_heads
        dtype = storage.compute_dtype
        self._is_half = dtype.itemsize == 2
        token_bytes = 2 * shape.num_kv_heads * shape.head_dim * pool.dtype.itemsize
        self._cost = CostModel.measured(token_bytes) if cost is None else cost
        self._num_processors = (
            torch.cuda.get_device_properties(pool.device).multi_processor_count
            if pool.is_cuda
            else _INTERPRETED_PROCESSORS
        )
        self.small_rows = self._decode_configs(1).alone.query_rows // (num_heads // shape.num_kv_heads)
        """Rows of one small tile: so few never share widely."""
        self.dense_workspace = (
            DenseWorkspace(num_heads, shape.num_kv_heads, shape.head_dim, dtype, pool.device)
            if serves(shape.head_dim, dtype, pool.device)
            else None
        )
        self._decode: dict[int, PagedKernel] = {}
        self._prefill: dict[int, PagedKernel] = {}

    def prepare(self, batch: PackedBatch) -> TritonStep:
        return TritonStep(self, batch)

    def warm_up(self, max_tokens: int) -> None:
        """Build what prompts of up to `max_tokens` new tokens a step need, so that no user waits for it; changes no KV.
        What captured graphs use is built by their capture."""
        if self.dense_workspace is not None:
            warm_up(self.dense_workspace, *self.layers[0][:2], self._num_heads, max_tokens)

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

    def decode_kernel(self, num_rows: int) -> PagedKernel:
        """For eager steps of up to so many decode rows."""
        max_rows = _capacity(num_rows)
        if max_rows not in self._decode:
            planner, configs = self.decode_planner(max_rows)
            self._decode[max_rows] = PagedKernel(planner, configs, self.workspace(planner.layout), self.device)
        return self._decode[max_rows]

    def prefill_kernel(self, num_tokens: int) -> PagedKernel:
        """For eager steps of up to so many new tokens."""
        max_tokens = _capacity(num_tokens)
        if max_tokens not in self._prefill:
            planner, configs = self.prefill_planner(max_tokens, max_tokens)
            self._prefill[max_tokens] = PagedKernel(planner, configs, self.workspace(planner.layout), self.device)
        return self._prefill[max_tokens]

    def _decode_configs(self, max_rows: int) -> DecodeConfigs:
        configs = default_configs(self._storage.shape.head_dim, is_half=self._is_half, max_rows=max_rows)
        return configs if self.device.type == "cuda" else replace(configs, merge_programs=_INTERPRETED_PROCESSORS)

    def to_device(self, array: NDArray[np.int64] | NDArray[np.int32]) -> torch.Tensor:
        """A copy there, made in the order of the current stream without waiting for it."""
        tensor = torch.from_numpy(array)
        # From unpinned memory the copy would wait; torch keeps pinned memory until the copies out of it are made.
        return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor.clone()


def _capacity(size: int) -> int:
    """The next of few sizes to plan for, so that planners and their buffers are made a few times in all."""
    capacity = _SMALLEST_CAPACITY
    while capacity < size:
        capacity *= _CAPACITY_FACTOR
    return capacity


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
