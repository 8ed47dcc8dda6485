"""The few calls of the CUDA runtime that torch does not offer: batched copies, and pinning memory where it is."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
_FIRST_WITH_BATCHES, _FIRST_WITHOUT_FAILED_INDEX = 12_080, 13_000
_IN_STREAM_ORDER = 1
_PORTABLE = 1


class CudaError(RuntimeError):
    """A call of the CUDA runtime failed."""


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _CopyAttributes(ctypes.Structure):
    _fields_ = [
        ("source_access_order", ctypes.c_int),
        ("source_location", _Location),
        ("target_location", _Location),
        ("flags", ctypes.c_uint),
    ]


class CudaRuntime:
    """The library that torch has loaded."""

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
        code = self._library.cudaHostRegister(
            ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), _PORTABLE
        )
        self._check(code, f"pinning {tensor.nbytes} bytes of host memory")

    def unpin(self, tensor: torch.Tensor) -> None:
        """Undo `pin`; the tensor must be the same."""
        self._check(self._library.cudaHostUnregister(ctypes.c_void_p(tensor.data_ptr())), "unpinning host memory")

    def _check(self, code: int, what: str) -> None:
        if code:
            self._library.cudaGetErrorString.restype = ctypes.c_char_p
            raise CudaError(f"{what}: {self._library.cudaGetErrorString(code).decode()} ({code})")


def _loaded_runtime() -> str:
    """The path of the libcudart that this process has mapped."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split()[-1]
        if Path(path).name.startswith("libcudart"):
            return path
    raise CudaError("no libcudart is loaded: is torch built for CUDA?")
