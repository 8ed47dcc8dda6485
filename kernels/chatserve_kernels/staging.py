"""Small arrays to the device and back without waiting, through pinned memory.

`PinnedRing` is for what is sent every step: each of its buffers is guarded by an event and is not overwritten before
the copy out of it, perhaps still queued behind a whole step, has been made. A copy from unpinned memory, or from a
pinned buffer that nothing guards, would be either a wait or a race. Off CUDA buffers are plain memory, and copies are
made at once. Must not know what the numbers mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from numpy.typing import NDArray

BUFFERS = 2


class PinnedRing:
    """Sends numbers of one type to a device, in the order of its current stream. Buffers grow to what is sent."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device, num_buffers: int = BUFFERS) -> None:
        self._dtype = dtype
        self._on_device = device.type == "cuda"
        self._buffers = [self._buffer(size) for _ in range(num_buffers)]
        self._events: list[torch.cuda.Event | None] = [None] * num_buffers
        self._next = 0

    def acquire(self, size: int) -> NDArray[Any]:
        """The array that the next `send` copies from, [size]; its contents are old."""
        event = self._events[self._next]
        if event is not None:
            event.synchronize()
        if size > len(self._buffers[self._next]):
            self._buffers[self._next] = self._buffer(2 * size)
        array: NDArray[Any] = self._buffers[self._next][:size].numpy()
        return array

    def send(self, target: torch.Tensor) -> None:
        """Copy the acquired array, as much of it as `target` [length] takes, on the current stream."""
        target.copy_(self._buffers[self._next][: len(target)], non_blocking=self._on_device)
        if self._on_device:
            event = self._events[self._next]
            if event is None:
                event = self._events[self._next] = torch.cuda.Event()
            event.record()
        self._next = (self._next + 1) % len(self._buffers)

    def send_parts(self, parts: Sequence[NDArray[Any]], target: torch.Tensor) -> None:
        """Copy the parts, one after the other, to the beginning of `target`, of one dimension.

        Raises:
            ValueError: `target` is shorter than they are.
        """
        size = sum(map(len, parts))
        if size > len(target):
            raise ValueError(f"expected at most {len(target)} numbers, got {size}")
        np.concatenate(parts, out=self.acquire(size))
        self.send(target[:size])

    def _buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=self._dtype, pin_memory=self._on_device)


def send_once(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array on the device, from memory of its own, which torch keeps until the copy has been made."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class Readback:
    """A few numbers on their way to the CPU."""

    def __init__(self, values: torch.Tensor) -> None:
        """Begin to copy `values`, integers of one dimension, in the order of the current stream."""
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
