"""Copies from the host to one place on the device, made from a ring of pinned buffers.

Each buffer is guarded by an event: it is not overwritten before the copy out of it, perhaps still queued behind a whole
step, has been made. A copy from unpinned memory, or from a pinned buffer that nothing guards, would be either a wait or
a race. Must not know what the numbers mean.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from typing import Any

    from numpy.typing import NDArray

BUFFERS = 2


class PinnedRing:
    """Fills `target`, one-dimensional; off CUDA the buffers are plain memory, and copies are made at once."""

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target
        self._on_device = target.is_cuda
        self._buffers = [
            torch.empty(target.shape, dtype=target.dtype, pin_memory=self._on_device) for _ in range(BUFFERS)
        ]
        self._arrays: list[NDArray[Any]] = [buffer.numpy() for buffer in self._buffers]
        self._events: list[torch.cuda.Event | None] = [None] * BUFFERS
        self._next = 0

    def acquire(self) -> NDArray[Any]:
        """The array that the next `send` copies from, [target's length]; its contents are old."""
        event = self._events[self._next]
        if event is not None:
            event.synchronize()
        return self._arrays[self._next]

    def send(self, length: int | None = None) -> None:
        """Copy the acquired array, or its first `length` numbers, on the current stream."""
        self._target[:length].copy_(self._buffers[self._next][:length], non_blocking=self._on_device)
        if self._on_device:
            event = self._events[self._next]
            if event is None:
                event = self._events[self._next] = torch.cuda.Event()
            event.record()
        self._next = (self._next + 1) % BUFFERS
