"""The host pool's memory: usable at once, pinned slab by slab in the background.

Pinning touches every page: 4 GiB take about two seconds, which nobody should wait for at the start. Until a slab is
pinned, copies from and to it are as correct, and slower. Owns the thread that pins, and how far it has come.
"""

from __future__ import annotations

import logging
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_log = logging.getLogger(__name__)

SLAB_BYTES = 256 << 20
"""Other calls of the driver wait while a slab is pinned: about an eighth of a second."""


class HostMemory:
    """`pool` [num_blocks, ...], of slabs of `slab_blocks`.

    `pin(n)` pins slabs until they hold the first n blocks; None: nothing is ever pinned. `unpin()` undoes it when this
    object goes: memory that is given back while the driver believes it pinned would be pinned to nobody, and whoever
    gets its addresses next could neither pin them nor trust a copy.
    """

    def __init__(
        self,
        pool: torch.Tensor,
        slab_blocks: int,
        pin: Callable[[int], None] | None,
        unpin: Callable[[], None] = lambda: None,
    ) -> None:
        self.pool = pool
        self.slab_blocks = slab_blocks
        self._pinning: _Pinning | None = None
        if pin is not None:
            self._pinning = _Pinning(len(pool), slab_blocks, pin)
            self._pinning.start()
            weakref.finalize(self, _end, self._pinning, unpin)

    @property
    def pinned_blocks(self) -> int:
        return 0 if self._pinning is None else self._pinning.done

    def stop(self) -> None:
        """Pin nothing more than the slab that is being pinned."""
        if self._pinning is not None:
            self._pinning.stopped.set()

    def wait(self) -> None:
        """Until all is pinned that will be."""
        if self._pinning is not None:
            self._pinning.join()


class _Pinning(threading.Thread):
    """Pins slab after slab; knows nothing of the object whose memory it is, so that this one can go."""

    def __init__(self, num_blocks: int, slab_blocks: int, pin: Callable[[int], None]) -> None:
        super().__init__(name="pin-host-pool", daemon=True)
        self.done = 0
        self.stopped = threading.Event()
        self._num_blocks = num_blocks
        self._slab_blocks = slab_blocks
        self._pin = pin

    def run(self) -> None:
        for begin in range(0, self._num_blocks, self._slab_blocks):
            if self.stopped.is_set():
                return
            end = min(begin + self._slab_blocks, self._num_blocks)
            try:
                self._pin(end)
            except RuntimeError as error:  # a limit on locked memory, for example
                _log.warning(
                    "only %d of %d host blocks are pinned; swapping the others is slower: %s",
                    begin,
                    self._num_blocks,
                    error,
                )
                return
            self.done = end


def _end(pinning: _Pinning, unpin: Callable[[], None]) -> None:
    pinning.stopped.set()
    pinning.join()
    unpin()
