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
        self._mover = BlockMover(device_pool, host.pool, slab_blocks=host.slab_blocks)

    def out(self, swaps: Sequence[SwapOut]) -> torch.cuda.Event:
        """Device to host."""
        device_ids, host_ids = _ids(swaps)
        pinned = host_ids < self._host.pinned_blocks
        if not pinned.all():
            for host, device, length in block_runs(host_ids[~pinned], device_ids[~pinned]).tolist():
                self._stage(self._mover.out_stream, self._device_pool, self._host.pool, device, host, length)
        return self._mover.out(device_ids[pinned], host_ids[pinned])

    def into(self, swaps: Sequence[SwapIn], after: Sequence[torch.cuda.Event] = ()) -> torch.cuda.Event:
        """Host to device, after `after`."""
        host_ids, device_ids = _ids(swaps)
        pinned = host_ids < self._host.pinned_blocks
        if not pinned.all():
            for event in after:
                self._mover.into_stream.wait_event(event)
            for host, device, length in block_runs(host_ids[~pinned], device_ids[~pinned]).tolist():
                self._stage(self._mover.into_stream, self._host.pool, self._device_pool, host, device, length)
        return self._mover.into(host_ids[pinned], device_ids[pinned], after)

    @staticmethod
    def _stage(
        stream: torch.cuda.Stream, source: torch.Tensor, target: torch.Tensor, src: int, dst: int, length: int
    ) -> None:
        """A copy through the driver's own buffers."""
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            target[dst : dst + length].copy_(source[src : src + length], non_blocking=True)


def _ids(swaps: Sequence[SwapIn] | Sequence[SwapOut]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    count = len(swaps)
    return (
        np.fromiter((swap.src for swap in swaps), np.int64, count),
        np.fromiter((swap.dst for swap in swaps), np.int64, count),
    )
