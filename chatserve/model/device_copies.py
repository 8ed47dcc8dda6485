"""Swaps between a GPU's pool and the host's, on copy streams of their own, one a direction.

Blocks whose host memory is not pinned yet go one run at a time through the driver's own staging, which is slower and as
correct. Imports `chatserve_kernels.swap`, which looks for a CUDA runtime when it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from chatserve_kernels.swap import BlockMover, block_runs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from chatserve.model.host_memory import HostMemory
    from chatserve.sched.plan import SwapIn, SwapOut


class DeviceCopies:
    """Each call waits for all that the current stream holds, and nothing waits for it but by its event."""

    def __init__(self, device_pool: torch.Tensor, host: HostMemory) -> None:
        self._device_pool = device_pool
        self._host = host
        self._mover = BlockMover(device_pool, host.pool)

    def out(self, swaps: Sequence[SwapOut]) -> torch.cuda.Event:
        """Device to host; `swaps` are not empty."""
        sources, targets = _ids(swaps)
        for slab in self._slabs(targets):
            if self._is_pinned(targets[slab]):
                event = self._mover.out(sources[slab], targets[slab])
            else:
                event = self._copy(
                    self._mover.out_stream, self._device_pool, self._host.pool, sources[slab], targets[slab]
                )
        return event

    def into(self, swaps: Sequence[SwapIn], after: Sequence[torch.cuda.Event] = ()) -> torch.cuda.Event:
        """Host to device, after `after`; `swaps` are not empty."""
        sources, targets = _ids(swaps)
        for slab in self._slabs(sources):
            if self._is_pinned(sources[slab]):
                event = self._mover.into(sources[slab], targets[slab], after)
            else:
                for each in after:
                    self._mover.into_stream.wait_event(each)
                event = self._copy(
                    self._mover.into_stream, self._host.pool, self._device_pool, sources[slab], targets[slab]
                )
        return event

    def _slabs(self, host_ids: NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Indices of the swaps of each slab: no copy may span two, which were pinned apart."""
        slabs = host_ids // self._host.slab_blocks
        return [np.flatnonzero(slabs == slab) for slab in np.unique(slabs)]

    def _is_pinned(self, host_ids: NDArray[np.int64]) -> bool:
        return int(host_ids.max()) < self._host.pinned_blocks

    @staticmethod
    def _copy(
        stream: torch.cuda.Stream,
        source: torch.Tensor,
        target: torch.Tensor,
        sources: NDArray[np.int64],
        targets: NDArray[np.int64],
    ) -> torch.cuda.Event:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            for src, dst, length in block_runs(sources, targets).tolist():
                target[dst : dst + length].copy_(source[src : src + length], non_blocking=True)
        event: torch.cuda.Event = stream.record_event()
        return event


def _ids(swaps: Sequence[SwapIn] | Sequence[SwapOut]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    count = len(swaps)
    return (
        np.fromiter((swap.src for swap in swaps), np.int64, count),
        np.fromiter((swap.dst for swap in swaps), np.int64, count),
    )
