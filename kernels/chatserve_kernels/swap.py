"""Moving KV blocks between the device's pool and pinned host memory, beside the model's own work.

Both pools are block-major, so a block is one run of bytes, and neighbours in both pools are one run together. Each
direction has its stream, since the link carries both at full rate; copies are made by the copy engines, which take no
multiprocessor from the running step. Small blocks leave gaps between single copies, so all runs of a call are handed to
the driver at once (cudaMemcpyBatchAsync, CUDA 12.8 and later; one cudaMemcpyAsync a run elsewhere).

Nothing here waits on the host. What must be waited for is an event that a stream waits for.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import ArrayLike, NDArray

_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2
_FIRST_WITH_BATCHES, _FIRST_WITHOUT_FAILED_INDEX = 12_080, 13_000
_IN_STREAM_ORDER = 1


class CudaError(RuntimeError):
    """A call of the CUDA runtime failed."""


def block_runs(sources: ArrayLike, targets: ArrayLike) -> NDArray[np.int64]:
    """Runs of neighbours, int64 [num_runs, 3]: first source, first target, number of blocks, in the order given."""
    pairs = np.stack([np.asarray(sources, np.int64), np.asarray(targets, np.int64)], axis=1).reshape(-1, 2)
    if not len(pairs):
        return np.empty((0, 3), np.int64)
    starts = np.flatnonzero(np.r_[True, (np.diff(pairs, axis=0) != 1).any(axis=1)])
    return np.column_stack([pairs[starts], np.diff(np.r_[starts, len(pairs)])])


class BlockMover:
    """Copies blocks out of, and into, `device_pool` [num_blocks, ...], from and to `host_pool` [num_host_blocks, ...].

    The host pool must be pinned wherever it is copied from or to; see `pin`. Calls of one direction are carried out in
    their order. A call waits for all work that the current stream has been given so far: a block may be moved out once
    the step that fills it has been launched, and moved into a block that an earlier step still reads. Two things are
    the caller's: to let the stream that overwrites or reads a target, or reuses a source, wait for the event of the
    call, and to pass `after` where host blocks are read that an earlier call of the other direction writes.
    """

    def __init__(self, device_pool: torch.Tensor, host_pool: torch.Tensor) -> None:
        if not (device_pool.is_contiguous() and host_pool.is_contiguous()):
            raise ValueError("expected contiguous pools")
        self.block_bytes = device_pool[0].nbytes
        if len(host_pool) and host_pool[0].nbytes != self.block_bytes:
            raise ValueError(f"expected host blocks of {self.block_bytes} bytes, got {host_pool[0].nbytes}")
        self._device_pool, self._host_pool = device_pool, host_pool
        self._runtime = Runtime()
        device = device_pool.device
        self.out_stream = torch.cuda.Stream(device)
        self.into_stream = torch.cuda.Stream(device)

    def out(self, sources: ArrayLike, targets: ArrayLike, after: Iterable[torch.cuda.Event] = ()) -> torch.cuda.Event:
        """Device blocks `sources` to host blocks `targets`; the event is at the end of the copies."""
        return self._move(
            self._device_pool, self._host_pool, sources, targets, self.out_stream, _DEVICE_TO_HOST, after
        )

    def into(self, sources: ArrayLike, targets: ArrayLike, after: Iterable[torch.cuda.Event] = ()) -> torch.cuda.Event:
        """Host blocks `sources` to device blocks `targets`; the event is at the end of the copies."""
        return self._move(
            self._host_pool, self._device_pool, sources, targets, self.into_stream, _HOST_TO_DEVICE, after
        )

    def _move(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        sources: ArrayLike,
        targets: ArrayLike,
        stream: torch.cuda.Stream,
        kind: int,
        after: Iterable[torch.cuda.Event],
    ) -> torch.cuda.Event:
        runs = block_runs(sources, targets)
        _check(runs[:, 0], runs[:, 2], len(source))
        _check(runs[:, 1], runs[:, 2], len(target))
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        for event in after:
            stream.wait_event(event)
        if len(runs):
            first_source, first_target, lengths = runs.T * self.block_bytes
            self._runtime.copy(
                source.data_ptr() + first_source, target.data_ptr() + first_target, lengths, kind, stream
            )
        return stream.record_event()


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _CopyAttributes(ctypes.Structure):
    _fields_ = [
        ("source_access_order", ctypes.c_int),
        ("source_location", _Location),
        ("target_location", _Location),
        ("flags", ctypes.c_uint),
    ]


class Runtime:
    """The few calls of the CUDA runtime that torch does not offer, of the library that torch has loaded."""

    def __init__(self) -> None:
        torch.cuda.init()
        self._library = ctypes.CDLL(_loaded_runtime())
        version = ctypes.c_int()
        self._check(self._library.cudaRuntimeGetVersion(ctypes.byref(version)), "cudaRuntimeGetVersion")
        driver = ctypes.c_int()
        self._check(self._library.cudaDriverGetVersion(ctypes.byref(driver)), "cudaDriverGetVersion")
        self._version = version.value
        self.has_batches = min(version.value, driver.value) >= _FIRST_WITH_BATCHES

    def copy(
        self,
        sources: NDArray[np.int64],
        targets: NDArray[np.int64],
        sizes: NDArray[np.int64],
        kind: int,
        stream: torch.cuda.Stream,
    ) -> None:
        """Copy sizes[i] bytes from address sources[i] to targets[i], in any order, after what the stream has."""
        handle = ctypes.c_void_p(stream.cuda_stream)
        if not self.has_batches or len(sizes) == 1:
            for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
                code = self._library.cudaMemcpyAsync(
                    ctypes.c_void_p(target), ctypes.c_void_p(source), ctypes.c_size_t(size), kind, handle
                )
                self._check(code, "cudaMemcpyAsync")
            return
        attributes = _CopyAttributes(source_access_order=_IN_STREAM_ORDER)
        first = ctypes.c_size_t(0)
        arrays = [np.ascontiguousarray(array, dtype=np.uint64) for array in (targets, sources, sizes)]
        arguments = [
            *(ctypes.c_void_p(array.ctypes.data) for array in arrays),
            ctypes.c_size_t(len(sizes)),
            ctypes.byref(attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
        ]
        if self._version < _FIRST_WITHOUT_FAILED_INDEX:
            arguments.append(ctypes.byref(ctypes.c_size_t()))
        self._check(self._library.cudaMemcpyBatchAsync(*arguments, handle), "cudaMemcpyBatchAsync")

    def pin(self, tensor: torch.Tensor) -> None:
        """Pin a host tensor's pages where they are."""
        code = self._library.cudaHostRegister(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), 1)
        self._check(code, f"pinning {tensor.nbytes} bytes of host memory")

    def unpin(self, tensor: torch.Tensor) -> None:
        """Undo `pin`; the tensor must be the same."""
        self._check(self._library.cudaHostUnregister(ctypes.c_void_p(tensor.data_ptr())), "unpinning host memory")

    def _check(self, code: int, what: str) -> None:
        if code:
            self._library.cudaGetErrorString.restype = ctypes.c_char_p
            raise CudaError(f"{what}: {self._library.cudaGetErrorString(code).decode()} ({code})")


def _check(first: NDArray[np.int64], lengths: NDArray[np.int64], num_blocks: int) -> None:
    if len(first) and (first.min() < 0 or (first + lengths).max() > num_blocks):
        raise ValueError(f"expected blocks of 0 to {num_blocks - 1}, got {first.min()} to {(first + lengths).max() - 1}")


def _loaded_runtime() -> str:
    """The path of the libcudart that this process has mapped."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split()[-1]
        if Path(path).name.startswith("libcudart"):
            return path
    raise CudaError("no libcudart is loaded: is torch built for CUDA?")
