"""Copies between the pools that no step waits for, on streams of their own, one a direction.

They start after what was launched before them and run beside what is launched after. Whoever planned them leaves their
blocks alone until `poll` says that they are done; nothing on the device waits for them.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from chatserve.model.kv_storage import KVStorage
    from chatserve.sched.plan import Transfers


class _Running(NamedTuple):
    step: int
    ends: tuple[torch.cuda.Event, ...]


class BackgroundCopies:
    """One storage's. On a CPU the copies are made at once, and done when they are next asked for."""

    def __init__(self, storage: KVStorage) -> None:
        self._storage = storage
        device = storage.device_pool.device
        self._streams = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else []
        self._running: deque[_Running] = deque()

    def start(self, step: int, transfers: Transfers) -> None:
        """Begin a step's background transfers, after all that the current stream holds."""
        assert not transfers.copies, "copies on the device are made within a step"
        if not self._streams:
            self._storage.execute(transfers)
            self._running.append(_Running(step, ()))
            return
        launched = torch.cuda.Event()
        launched.record()
        ends = []
        for stream, swap, swaps in zip(
            self._streams,
            (self._storage.swap_out, self._storage.swap_in),
            (transfers.swap_out, transfers.swap_in),
            strict=True,
        ):
            if swaps:
                with torch.cuda.stream(stream):
                    stream.wait_event(launched)
                    swap(transfers)
                    ends.append(torch.cuda.Event())
                    ends[-1].record()
        self._running.append(_Running(step, tuple(ends)))

    def poll(self) -> tuple[int, ...]:
        """Steps whose transfers have ended since the last call."""
        done = tuple(running.step for running in self._running if all(end.query() for end in running.ends))
        if done:
            self._running = deque(running for running in self._running if running.step not in done)
        return done
