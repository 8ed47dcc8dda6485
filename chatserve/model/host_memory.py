"""The host pool's memory: usable at once, pinned slab by slab in the background.

Pinning touches every page: 4 GiB take about two seconds, which nobody should wait for at the start. Until a slab is
pinned, copies from and to it are as correct, and slower. A slab ends where a block and a page end, so that no copy of a
block meets two of them.
"""

from __future__ import annotations

import logging
import math
import mmap
import threading
from contextlib import suppress
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)

SLAB_BYTES = 256 << 20
"""Other calls of the driver wait while a slab is pinned: about an eighth of a second."""


class HostMemory:
    """`num_blocks` blocks of `shape` on the host. `pin` (address, bytes) pins a slab; None: nothing is ever pinned."""

    def __init__(
        self,
        num_blocks: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        pin: Callable[[int, int], bool] | None,
        slab_bytes: int = SLAB_BYTES,
    ) -> None:
        block_bytes = math.prod(shape) * dtype.itemsize
        aligned = mmap.PAGESIZE // math.gcd(block_bytes, mmap.PAGESIZE)
        self.slab_blocks = max(1, slab_bytes // (block_bytes * aligned)) * aligned
        self.pinned_blocks = 0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if num_blocks == 0 or pin is None:
            self.pool = torch.empty((num_blocks, *shape), dtype=dtype)
            return
        memory = mmap.mmap(-1, num_blocks * block_bytes)
        with suppress(OSError, ValueError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.pool = torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(num_blocks, *shape)
        self._thread = threading.Thread(
            target=self._pin_all, args=(pin, block_bytes), name="pin-host-pool", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Pin nothing more than the slab that is being pinned."""
        self._stopped.set()

    def wait(self) -> None:
        """Until all is pinned that will be."""
        if self._thread is not None:
            self._thread.join()

    def _pin_all(self, pin: Callable[[int, int], bool], block_bytes: int) -> None:
        num_blocks, address = len(self.pool), self.pool.data_ptr()
        for begin in range(0, num_blocks, self.slab_blocks):
            end = min(begin + self.slab_blocks, num_blocks)
            if self._stopped.is_set():
                return
            if not pin(address + begin * block_bytes, (end - begin) * block_bytes):
                _log.warning(
                    "only %d of %d host blocks could be pinned; swapping the others is slower", begin, num_blocks
                )
                return
            self.pinned_blocks = end


def pin_for_cuda(address: int, num_bytes: int) -> bool:
    """Register memory with the driver; False: it refuses (a limit on locked memory, for example)."""
    status = torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0)
    return int(status) == 0
