"""Paged KV memory: a pool of blocks on the device, a second one on the host, and the copies between them.

Owns the layout, block-major `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, so that everything of a
block is one contiguous run: a swap or a copy-on-write is one copy a block, and adjacent blocks move in one. Nothing
outside this module and the strides it gives out knows the layout. Must not know which block belongs to whom.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from chatserve.model.shapes import KVShape
    from chatserve.sched.plan import Transfers


class KVStorage:
    """Device and host pools of equal blocks.

    On CUDA the host pool is pinned and copies are ordered by the current stream; on a CPU both are plain memory, and
    swapping really copies. Contents are uninitialised: whoever reads a slot must know that it was written.
    """

    def __init__(
        self, shape: KVShape, *, num_blocks: int, num_host_blocks: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        block = (shape.num_layers, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
        self.device_pool = torch.empty((num_blocks, *block), dtype=dtype, device=device)
        pinned = device.type == "cuda" and num_host_blocks > 0
        self.host_pool = torch.empty((num_host_blocks, *block), dtype=dtype, pin_memory=pinned)

    @property
    def block_bytes(self) -> int:
        return self.shape.block_elements * self.device_pool.element_size()

    def execute(self, transfers: Transfers) -> None:
        """Make all swaps out, then all swaps in, then all copies, in the order of each list."""
        _copy_blocks(self.device_pool, self.host_pool, ((swap.src, swap.dst) for swap in transfers.swap_out))
        _copy_blocks(self.host_pool, self.device_pool, ((swap.src, swap.dst) for swap in transfers.swap_in))
        for copy in transfers.copies:
            kept = slice(0, copy.num_tokens)
            self.device_pool[copy.dst, :, :, :, kept].copy_(self.device_pool[copy.src, :, :, :, kept])


def _copy_blocks(source: torch.Tensor, target: torch.Tensor, pairs: Iterable[tuple[int, int]]) -> None:
    for src, dst, length in _runs(pairs):
        target[dst : dst + length].copy_(source[src : src + length], non_blocking=True)


def _runs(pairs: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Join neighbours: (3, 7), (4, 8) is one copy of two blocks."""
    start_src = start_dst = length = 0
    for src, dst in pairs:
        if length and src == start_src + length and dst == start_dst + length:
            length += 1
            continue
        if length:
            yield start_src, start_dst, length
        start_src, start_dst, length = src, dst, 1
    if length:
        yield start_src, start_dst, length
