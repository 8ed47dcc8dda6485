"""FlashInfer's decode attention, where it is installed: flat, and by its cascade of shared levels.

FlashInfer compiles a kernel when it is first asked for it, for minutes, into a directory that FLASHINFER_WORKSPACE_BASE
names. So rivals are measured after all of our tables, one after the other, each on every row; and `prepare` has all of
them compiled beforehand, each in a process of its own.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import numpy as np
import torch

from chatserve_kernels.bench.tables import DTYPE, Bench
from chatserve_kernels.bench.workloads import BLOCK, HEAD_DIM, HEADS, KV_HEADS, Workload, shared

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

CACHE_VARIABLE = "FLASHINFER_WORKSPACE_BASE"
NAMES = ("FlashInfer", "cascade")


def is_installed() -> bool:
    return importlib.util.find_spec("flashinfer") is not None


def of(bench: Bench, work: Workload, num_blocks: int) -> dict[str, Callable[[], float]]:
    """What measures each rival that can do this work, in microseconds, on a pool of so many blocks."""
    if not is_installed():
        return {}
    names = NAMES if work.levels else NAMES[:1]
    return {name: functools.partial(_measure, name, bench, work, num_blocks) for name in names}


def compile_one(name: str) -> None:
    """Measure a rival on as little as there is, which compiles what it needs."""
    if name not in NAMES:
        raise ValueError(f"expected a rival of {', '.join(NAMES)}, got {name}")
    work = shared(2, BLOCK, BLOCK)
    _measure(name, Bench(milliseconds=1), work, work.num_blocks)


def prepare(cache: Path | None, commands: Mapping[str, Sequence[str]] | None = None) -> list[str]:
    """Compile all rivals at once, into `cache` if one is named, and return which failed. `commands`: by name, instead
    of those that compile FlashInfer's."""
    if commands is None:
        command = [sys.executable, "-m", "chatserve_kernels.bench", "--prepare-one"]
        commands = {name: [*command, name] for name in NAMES}
    environment = os.environ | ({} if cache is None else {CACHE_VARIABLE: str(cache)})
    processes = {name: subprocess.Popen(command, env=environment) for name, command in commands.items()}  # noqa: S603
    return [name for name, process in processes.items() if process.wait()]


@functools.cache
def _flashinfer(num_blocks: int) -> FlashInfer:
    return FlashInfer(num_blocks)


def _measure(name: str, bench: Bench, work: Workload, num_blocks: int) -> float:
    rival = _flashinfer(num_blocks)
    return rival.cascade_us(bench, work) if name == "cascade" else rival.flat_us(bench, work)


class FlashInfer:
    """FlashInfer's decode wrappers on a pool of one layer, which is how it is laid out at its best."""

    def __init__(self, num_blocks: int) -> None:
        import flashinfer  # noqa: PLC0415 - a rival that need not be installed

        self.lib = flashinfer
        self.version = flashinfer.__version__
        self.num_blocks = num_blocks
        self.pages = torch.randn(num_blocks, 2, KV_HEADS, BLOCK, HEAD_DIM, device="cuda", dtype=DTYPE)
        self.workspace = torch.empty(512 * 2**20, dtype=torch.uint8, device="cuda")

    def flat_us(self, bench: Bench, work: Workload) -> float:
        wrapper = self.lib.BatchDecodeWithPagedKVCacheWrapper(self.workspace, "HND", use_tensor_cores=True)
        counts = -(-work.lengths // BLOCK)
        tables = work.tables(self.num_blocks)
        pages = np.concatenate([row[:count] for row, count in zip(tables, counts, strict=True)])
        wrapper.plan(
            _int32([0, *np.cumsum(counts)]),
            _int32(pages),
            _int32(work.lengths - (counts - 1) * BLOCK),
            HEADS,
            KV_HEADS,
            HEAD_DIM,
            BLOCK,
            q_data_type=DTYPE,
            kv_data_type=DTYPE,
        )
        query = torch.randn(work.batch, HEADS, HEAD_DIM, device="cuda", dtype=DTYPE)
        return bench.us(lambda: wrapper.run(query, self.pages))

    def cascade_us(self, bench: Bench, work: Workload) -> float:
        levels = work.level_blocks(self.num_blocks)
        wrapper = self.lib.MultiLevelCascadeAttentionWrapper(len(levels), self.workspace, "HND")
        wrapper.plan(
            [_int32([work.batch * node // len(level) for node in range(len(level) + 1)]) for level in levels],
            [_int32([0, *np.cumsum([len(node) for node in level])]) for level in levels],
            [_int32(np.concatenate(level)) for level in levels],
            [_int32([BLOCK] * len(level)) for level in levels],
            HEADS,
            KV_HEADS,
            HEAD_DIM,
            BLOCK,
            q_data_type=DTYPE,
        )
        query = torch.randn(work.batch, HEADS, HEAD_DIM, device="cuda", dtype=DTYPE)
        return bench.us(lambda: wrapper.run(query, self.pages))


def _int32(values: object) -> torch.Tensor:
    return torch.as_tensor(np.asarray(values), dtype=torch.int32, device="cuda")
