"""Host memory for blocks, pinned slab by slab as it comes into use.

Pinning takes time for each page (0.3 to 0.5 s a GiB), so a large pool pinned at once would hold up the start for
minutes. The pool's addresses are reserved at once and cost nothing until they are pinned.
"""

from __future__ import annotations

import math
import mmap
from typing import TYPE_CHECKING

import torch

from chatserve_kernels.cuda_runtime import CudaRuntime

if TYPE_CHECKING:
    from collections.abc import Sequence

SLAB_BYTES = 2**30


class HostPool:
    """`blocks` [num_blocks, *block_shape], of which the first `num_pinned` may be copied to and from a device."""

    def __init__(
        self, num_blocks: int, block_shape: Sequence[int], dtype: torch.dtype, *, slab_bytes: int = SLAB_BYTES
    ) -> None:
        block_bytes = math.prod(block_shape) * dtype.itemsize
        if num_blocks < 1 or block_bytes < 1:
            raise ValueError(f"expected at least one block of a byte, got {num_blocks} of {block_bytes}")
        # Slabs begin at a page's beginning and at a block's, since a page cannot be pinned twice.
        step = mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, block_bytes)
        self.slab_blocks = max(step, slab_bytes // block_bytes // step * step)
        self._memory = mmap.mmap(-1, num_blocks * block_bytes)
        flat = torch.frombuffer(self._memory, dtype=dtype, count=num_blocks * math.prod(block_shape))
        self.blocks = flat.view(num_blocks, *block_shape)
        self._runtime: CudaRuntime | None = None
        self.num_pinned = 0

    def pin(self, num_blocks: int) -> None:
        """Pin slabs until they hold the first `num_blocks`. Blocks its thread and no other, so call it from one beside
        the engine's, some slabs ahead of use.

        Raises:
            ValueError: more blocks than there are.
            CudaError: the memory cannot be pinned; what was pinned before stays so.
        """
        if num_blocks > len(self.blocks):
            raise ValueError(f"expected at most {len(self.blocks)} blocks, got {num_blocks}")
        while self.num_pinned < num_blocks:
            if self._runtime is None:
                self._runtime = CudaRuntime()
            slab = self.blocks[self.num_pinned : self.num_pinned + self.slab_blocks]
            self._runtime.pin(slab)
            self.num_pinned += len(slab)

    def close(self) -> None:
        """Unpin everything; no copy may be in flight."""
        for first in range(0, self.num_pinned, self.slab_blocks):
            assert self._runtime is not None
            self._runtime.unpin(self.blocks[first : first + self.slab_blocks])
        self.num_pinned = 0
