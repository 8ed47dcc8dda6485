"""Small arrays to the device and back without waiting: pinned buffers in turn, each guarded by an event.

A buffer is not written again before the copy out of it, which may be queued behind a whole step, has been made. On a
CPU the same calls copy at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray


class StagingRing:
    """Sends int64 arrays to a device, in the order of its current stream. Buffers grow to what is sent."""

    def __init__(self, size: int, device: torch.device, num_buffers: int = 3) -> None:
        self._pinned = device.type == "cuda"
        self._buffers = [self._buffer(size) for _ in range(num_buffers)]
        self._copied: list[torch.cuda.Event | None] = [None] * num_buffers
        self._next = 0

    def send(self, parts: tuple[NDArray[np.int64], ...], target: torch.Tensor) -> None:
        """Copy the parts, one after the other, to the beginning of `target`, int64 of one dimension."""
        index = self._next
        self._next = (index + 1) % len(self._buffers)
        copied = self._copied[index]
        if copied is not None:
            copied.synchronize()
        size = sum(map(len, parts))
        if size > len(self._buffers[index]):
            self._buffers[index] = self._buffer(2 * size)
        staged = self._buffers[index][:size]
        np.concatenate(parts, out=staged.numpy())
        target[:size].copy_(staged, non_blocking=True)
        if self._pinned:
            if copied is None:
                copied = self._copied[index] = torch.cuda.Event()
            copied.record()

    def _buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int64, pin_memory=self._pinned)


def send_once(array: NDArray[np.int64], device: torch.device) -> torch.Tensor:
    """The array on the device, from memory of its own, which torch keeps until the copy has been made."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class Readback:
    """A few int64 numbers on their way to the CPU."""

    def __init__(self, values: torch.Tensor) -> None:
        """Begin to copy `values`, int64 of one dimension, in the order of the current stream."""
        self._event: torch.cuda.Event | None = None
        # Torch's own cache of pinned memory knows when a copy into it has been made.
        self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        self._values.copy_(values, non_blocking=True)
        if values.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def is_done(self) -> bool:
        return self._event is None or self._event.query()

    def wait(self) -> list[int]:
        if self._event is not None:
            self._event.synchronize()
        numbers: list[int] = self._values.tolist()
        return numbers
