"""Memory and graphs on a CUDA device: what steps need is measured on a small pool, and KV gets what is left.

Graphs hold the pool's address, so they cannot be captured before the pool is there; but the first two of them, and a
step of the largest size, are made over a pool of a few blocks, and tell what all of them will take.
"""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from chatserve.errors import StartupError
from chatserve.model.attention_plan import PackedBatch
from chatserve.model.backends import choose_backend
from chatserve.model.block_tables import BlockTables
from chatserve.model.device_executor import DeviceExecutor
from chatserve.model.graphs import CapturedGraphs, GraphShape, PlainLaunches, step_shapes
from chatserve.model.kv_storage import KVStorage
from chatserve.model.llama import LlamaModel
from chatserve.model.ops import FusedOps
from chatserve.model.rows import BatchRows
from chatserve.model.triton_attention import TritonAttention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatserve.model.attention import AttentionBackend
    from chatserve.model.shapes import CausalModel, KVShape

_log = logging.getLogger(__name__)

_PROBE_BLOCKS = 4


@dataclass(frozen=True, slots=True)
class CudaSetup:
    """How executors are made for one model on one device."""

    model: CausalModel
    shape: KVShape
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    attention: str
    max_running: int
    max_tokens: int
    context_tokens: int
    graphs: bool

    def executor(self, storage: KVStorage, shapes: Sequence[GraphShape] | None = None) -> DeviceExecutor:
        """An executor over a storage, its graphs captured: those of `shapes`, or all."""
        backend = choose_backend(self.attention, storage, self.model.info.num_heads)
        self._choose_ops(backend)
        max_blocks = -(-self.context_tokens // self.shape.block_size)
        rows = BatchRows(BlockTables(self.max_running, max_blocks, self.device))
        captured = self.graphs and self.device.type == "cuda"
        shapes = self.shapes() if shapes is None else shapes
        with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream(self.device)):
            if isinstance(backend, TritonAttention) and self.device.type == "cuda":
                backend.warm_up(min(self.max_tokens, self.context_tokens))
            replays = CapturedGraphs() if captured else PlainLaunches()
            executor = DeviceExecutor(self.model, backend, rows, shapes, replays)
            try:
                executor.capture()
            except Exception as error:
                if not captured or isinstance(self.model, LlamaModel) or isinstance(error, torch.OutOfMemoryError):
                    raise
                _log.warning(
                    "this model's steps cannot be captured and run kernel by kernel, which is slower: %s", error
                )
                executor = DeviceExecutor(self.model, backend, rows, [], CapturedGraphs())
                executor.capture()
            torch.cuda.current_stream().synchronize()
        return executor

    def shapes(self) -> list[GraphShape]:
        return step_shapes(self.max_running, self.max_tokens) if self.graphs else []

    def step_bytes(self) -> int:
        """What graphs and the largest step take beside weights and KV."""
        before = _free(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        storage = KVStorage(
            self.shape,
            num_blocks=_PROBE_BLOCKS,
            num_host_blocks=0,
            dtype=self.kv_dtype,
            device=self.device,
            compute_dtype=self.dtype,
        )
        shapes = self.shapes()
        executor = self.executor(storage, [shapes[0], shapes[-1]] if shapes else [])
        num_graphs = sum(1 + (shape.max_rows > 1) for shape in shapes)
        graph_bytes = executor.last_graph_bytes * num_graphs
        self.run_largest(storage)
        taken = before - _free(self.device, empty=False)
        del executor, storage
        _free(self.device)
        return taken + graph_bytes

    def _choose_ops(self, backend: AttentionBackend) -> None:
        if isinstance(self.model, LlamaModel) and isinstance(backend, TritonAttention):
            self.model.ops = FusedOps(self.model.rope, self.context_tokens)

    @torch.inference_mode()
    def run_largest(self, storage: KVStorage) -> None:
        """A step of one row of as many tokens as a step may have, all in one block, which nobody will read."""
        num_tokens = min(self.max_tokens, self.context_tokens)
        table = np.zeros((1, -(-num_tokens // self.shape.block_size)), dtype=np.int64)
        backend = choose_backend(self.attention, storage, self.model.info.num_heads)
        ids = torch.zeros(num_tokens, dtype=torch.int64, device=self.device)
        positions = torch.arange(num_tokens, device=self.device)
        batch = PackedBatch(np.array([0]), np.array([num_tokens]), table)
        self.model.features(ids, positions, backend.prepare(batch), ids[: self.max_running])
        torch.cuda.synchronize(self.device)


def _free(device: torch.device, *, empty: bool = True) -> int:
    if empty:
        gc.collect()
        torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def out_of_memory(device: torch.device, what: str) -> StartupError:
    free, total = (each / 2**30 for each in torch.cuda.mem_get_info(device))
    return StartupError(
        f"{device} has too little memory for {what}: {free:.1f} of its {total:.1f} GiB are free; end what else uses "
        "it, or choose a smaller model, --dtype bfloat16 or a smaller --max-batched-tokens"
    )
