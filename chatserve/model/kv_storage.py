"""Paged KV memory: a pool of blocks on the device, a second one on the host, and the copies between them.

Owns the layout, block-major `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, so that everything of a
block is one contiguous run: a swap or a copy-on-write is one copy a block, and adjacent blocks move in one. Nothing
outside this module and the strides it gives out knows the layout. Must not know which block belongs to whom.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from chatserve.model.host_memory import HostMemory, pin_for_cuda

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from chatserve.model.shapes import KVShape
    from chatserve.sched.plan import Transfers


class KVStorage:
    """Device and host pools of equal blocks.

    On CUDA the host pool is pinned bit by bit and copies are ordered by the current stream; on a CPU both are plain
    memory, and swapping really copies. Contents are uninitialised: whoever reads a slot must know that it was written.
    """

    def __init__(
        self, shape: KVShape, *, num_blocks: int, num_host_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        block = (shape.num_layers, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
        self.device_pool = torch.empty((num_blocks, *block), dtype=dtype, device=device)
        self.host = HostMemory(num_host_blocks, block, dtype, pin=pin_for_cuda if device.type == "cuda" else None)

    @property
    def host_pool(self) -> torch.Tensor:
        return self.host.pool

    @property
    def block_bytes(self) -> int:
        return self.shape.block_elements * self.device_pool.element_size()

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A layer's keys and values, each [num_blocks, num_kv_heads, block_size, head_dim]: views of the pool."""
        return self.device_pool[:, index, 0], self.device_pool[:, index, 1]

    def execute(self, transfers: Transfers) -> None:
        """Make all swaps out, then all swaps in, then all copies, in the order of each list."""
        self.swap_out(transfers)
        self.swap_in(transfers)
        for copy in transfers.copies:
            kept = slice(0, copy.num_tokens)
            self.device_pool[copy.dst, :, :, :, kept].copy_(self.device_pool[copy.src, :, :, :, kept])

    def swap_out(self, transfers: Transfers) -> None:
        """Make the swaps out alone."""
        slab = self.host.slab_blocks
        for src, dst, length in _runs((swap.src, swap.dst, swap.dst // slab) for swap in transfers.swap_out):
            self.host_pool[dst : dst + length].copy_(self.device_pool[src : src + length], non_blocking=True)

    def swap_in(self, transfers: Transfers) -> None:
        """Make the swaps in alone."""
        slab = self.host.slab_blocks
        for src, dst, length in _runs((swap.src, swap.dst, swap.src // slab) for swap in transfers.swap_in):
            self.device_pool[dst : dst + length].copy_(self.host_pool[src : src + length], non_blocking=True)


def _runs(swaps: Iterable[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Join neighbours within a slab, the third number: (3, 7, 0), (4, 8, 0) is one copy of two blocks."""
    start_src = start_dst = start_slab = length = 0
    for src, dst, slab in swaps:
        if length and src == start_src + length and dst == start_dst + length and slab == start_slab:
            length += 1
            continue
        if length:
            yield start_src, start_dst, length
        start_src, start_dst, start_slab, length = src, dst, slab, 1
    if length:
        yield start_src, start_dst, length
