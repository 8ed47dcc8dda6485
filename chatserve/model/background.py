"""Swaps that no step waits for: begun, running, ended.

They start after what was launched before them and run beside what is launched after. Whoever planned them leaves their
blocks alone until `poll` says that they are done; nothing on the device waits for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from chatserve.model.kv_storage import KVStorage
    from chatserve.sched.plan import Transfers


class BackgroundCopies:
    """One storage's. On a CPU the copies are made at once, and done when they are next asked for."""

    def __init__(self, storage: KVStorage) -> None:
        self._storage = storage
        self._running: list[tuple[int, tuple[torch.cuda.Event, ...]]] = []

    def start(self, step: int, transfers: Transfers) -> None:
        """Begin a step's background transfers, after all that the current stream holds."""
        self._running.append((step, self._storage.start(transfers)))

    def poll(self) -> tuple[int, ...]:
        """Steps whose transfers have ended since the last call."""
        done = tuple(step for step, ends in self._running if all(end.query() for end in ends))
        if done:
            self._running = [running for running in self._running if running[0] not in done]
        return done
