"""Moving KV blocks between the device's pool and pinned host memory, beside the model's own work.

Both pools are block-major, so a block is one run of bytes, and neighbours in both pools are one run together. Each
direction has its stream, since the link carries both at full rate; copies are made by the copy engines, which take no
multiprocessor from the running step. Small blocks leave gaps between single copies, so all runs of a call are handed to
the driver at once (cudaMemcpyBatchAsync, CUDA 12.8 and later; one cudaMemcpyAsync a run elsewhere).

Nothing here waits on the host. What must be waited for is an event that a stream waits for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from chatserve_kernels.cuda_runtime import DEVICE_TO_HOST, HOST_TO_DEVICE, CudaRuntime

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import ArrayLike, NDArray


def block_runs(host_blocks: ArrayLike, device_blocks: ArrayLike, slab_blocks: int | None = None) -> NDArray[np.int64]:
    """Runs of neighbours, int64 [num_runs, 3]: first host block, first device block, number of blocks, in the order
    given. No run leaves a slab of the host's."""
    pairs = np.stack([np.asarray(host_blocks, np.int64), np.asarray(device_blocks, np.int64)], axis=1)
    if not len(pairs):
        return np.empty((0, 3), np.int64)
    begins = np.ones(len(pairs), dtype=bool)
    begins[1:] = (np.diff(pairs, axis=0) != 1).any(axis=1)
    if slab_blocks is not None:
        begins |= pairs[:, 0] % slab_blocks == 0
    starts = np.flatnonzero(begins)
    return np.column_stack([pairs[starts], np.diff(starts, append=len(pairs))])


class BlockMover:
    """Copies blocks out of, and into, `device_pool` [num_blocks, ...], from and to `host_pool` [num_host_blocks, ...].

    The host pool must be pinned wherever it is copied from or to (see `host_pool`). Calls of one direction are carried
    out in their order. A call waits for all work that the current stream has been given so far: a block may be moved
    out once the step that fills it has been launched, and moved into a block that an earlier step still reads. Two
    things are the caller's: to let the stream that overwrites or reads a target, or reuses a source, wait for the event
    of the call, and to pass `after` where host blocks are read that an earlier call of the other direction writes.
    """

    def __init__(self, device_pool: torch.Tensor, host_pool: torch.Tensor, *, slab_blocks: int | None = None) -> None:
        """`slab_blocks`: how many host blocks were pinned together, where it was not all of them."""
        if not (device_pool.is_contiguous() and host_pool.is_contiguous()):
            raise ValueError("expected contiguous pools")
        self.block_bytes = device_pool[0].nbytes
        if host_pool[0].nbytes != self.block_bytes:
            raise ValueError(f"expected host blocks of {self.block_bytes} bytes, got {host_pool[0].nbytes}")
        if not device_pool.is_cuda or host_pool.is_cuda:
            raise ValueError(
                f"expected pools of a CUDA device and the host, got {device_pool.device}, {host_pool.device}"
            )
        self._device_pool, self._host_pool, self._slab_blocks = device_pool, host_pool, slab_blocks
        self._runtime = CudaRuntime()
        self.out_stream = torch.cuda.Stream(device_pool.device)
        self.into_stream = torch.cuda.Stream(device_pool.device)

    def out(
        self, device_blocks: ArrayLike, host_blocks: ArrayLike, after: Iterable[torch.cuda.Event] = ()
    ) -> torch.cuda.Event:
        """Copy device_blocks[i] over host_blocks[i], for each i; the event is at the end of the copies."""
        host, device, sizes = self._runs(host_blocks, device_blocks)
        self._begin(self.out_stream, after)
        if len(sizes):
            self._runtime.copy(device, host, sizes, DEVICE_TO_HOST, self.out_stream)
        return self.out_stream.record_event()

    def into(
        self, host_blocks: ArrayLike, device_blocks: ArrayLike, after: Iterable[torch.cuda.Event] = ()
    ) -> torch.cuda.Event:
        """Copy host_blocks[i] over device_blocks[i], for each i; the event is at the end of the copies."""
        host, device, sizes = self._runs(host_blocks, device_blocks)
        self._begin(self.into_stream, after)
        if len(sizes):
            self._runtime.copy(host, device, sizes, HOST_TO_DEVICE, self.into_stream)
        return self.into_stream.record_event()

    def _runs(self, host_blocks: ArrayLike, device_blocks: ArrayLike) -> tuple[NDArray[np.int64], ...]:
        """Addresses on the host, on the device, and bytes."""
        runs = block_runs(host_blocks, device_blocks, self._slab_blocks)
        _check("host", runs[:, 0], runs[:, 2], len(self._host_pool))
        _check("device", runs[:, 1], runs[:, 2], len(self._device_pool))
        offsets = runs * self.block_bytes
        return self._host_pool.data_ptr() + offsets[:, 0], self._device_pool.data_ptr() + offsets[:, 1], offsets[:, 2]

    @staticmethod
    def _begin(stream: torch.cuda.Stream, after: Iterable[torch.cuda.Event]) -> None:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        for event in after:
            stream.wait_event(event)


def _check(what: str, first: NDArray[np.int64], lengths: NDArray[np.int64], num_blocks: int) -> None:
    if len(first) and (first.min() < 0 or (first + lengths).max() > num_blocks):
        span = f"{first.min()} to {(first + lengths).max() - 1}"
        raise ValueError(f"expected {what} blocks from 0 to {num_blocks - 1}, got {span}")
