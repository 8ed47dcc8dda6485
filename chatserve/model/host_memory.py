"""The host pool's memory: usable at once, pinned slab by slab in the background.

Pinning touches every page: 4 GiB take about two seconds, which nobody should wait for at the start. Until a slab is
pinned, copies from and to it are as correct, and slower. Owns the thread that pins, and how far it has come.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_log = logging.getLogger(__name__)

SLAB_BYTES = 256 << 20
"""Other calls of the driver wait while a slab is pinned: about an eighth of a second."""


class HostMemory:
    """`pool` [num_blocks, ...], of slabs of `slab_blocks`.

    `pin(n)` pins slabs until they hold the first n blocks; None: nothing is ever pinned.
    """

    def __init__(self, pool: torch.Tensor, slab_blocks: int, pin: Callable[[int], None] | None) -> None:
        self.pool = pool
        self.slab_blocks = slab_blocks
        self.pinned_blocks = 0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if pin is not None:
            self._thread = threading.Thread(target=self._pin_all, args=(pin,), name="pin-host-pool", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Pin nothing more than the slab that is being pinned."""
        self._stopped.set()

    def wait(self) -> None:
        """Until all is pinned that will be."""
        if self._thread is not None:
            self._thread.join()

    def _pin_all(self, pin: Callable[[int], None]) -> None:
        num_blocks = len(self.pool)
        for begin in range(0, num_blocks, self.slab_blocks):
            if self._stopped.is_set():
                return
            end = min(begin + self.slab_blocks, num_blocks)
            try:
                pin(end)
            except RuntimeError as error:  # a limit on locked memory, for example
                _log.warning(
                    "only %d of %d host blocks are pinned; swapping the others is slower: %s", begin, num_blocks, error
                )
                return
            self.pinned_blocks = end
