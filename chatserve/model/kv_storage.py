"""Paged KV memory: a pool of blocks on the device, a second one on the host, and the copies between them.

Owns the layout, block-major `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`, so that everything of a
block is one contiguous run: a swap or a copy-on-write is one copy a block, and adjacent blocks move in one. Nothing
outside this module and the strides it gives out knows the layout. Must not know which block belongs to whom.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from chatserve.model.host_memory import SLAB_BYTES, HostMemory
from chatserve.model.kv_dtype import FP8, layer_scales

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from chatserve.model.device_copies import DeviceCopies
    from chatserve.model.fork_copies import ForkCopies
    from chatserve.model.shapes import KVShape
    from chatserve.sched.plan import Transfers

_FORK_UNIT: Final = 8
"""Bytes that a GPU copies at a time where a conversation forks within a block."""


class KVStorage:
    """Device and host pools of equal blocks.

    On CUDA the host pool is pinned bit by bit and swaps run on streams of their own; on a CPU both pools are plain
    memory, and swapping really copies. Contents are uninitialised: whoever reads a slot must know that it was written.

    `dtype` is what numbers are held in, and `compute_dtype` what the model computes them in; None: the same. `scales`,
    of keys and of values for each layer, are what numbers of a `float8_e4m3fn` pool must be multiplied by; none: 1.
    They go with the pool, whose blocks have none of their own, so that a block is as good in any place.

    Raises:
        ValueError: scales that are not one pair a layer, finite and above 0.
    """

    def __init__(
        self,
        shape: KVShape,
        *,
        num_blocks: int,
        num_host_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        compute_dtype: torch.dtype | None = None,
        scales: Sequence[tuple[float, float]] = (),
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.compute_dtype = compute_dtype or dtype
        self.scales = layer_scales(scales, shape.num_layers, dtype)
        """Of keys and of values, for each layer; 1 if `dtype` needs none."""
        self.device_scales = torch.tensor(self.scales, device=device) if dtype == FP8 else None
        """The same, float32 [num_layers, 2], if `dtype` needs them."""
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        block = (shape.num_layers, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
        self.device_pool = torch.empty((num_blocks, *block), dtype=dtype, device=device)
        self._copies: DeviceCopies | None = None
        self._forks: ForkCopies | None = None
        if device.type == "cuda" and shape.head_dim * dtype.itemsize % _FORK_UNIT == 0:
            from chatserve.model.fork_copies import ForkCopies  # noqa: PLC0415 - imports triton

            self._forks = ForkCopies(self.device_pool)
        if device.type == "cuda" and num_host_blocks:
            from chatserve_kernels.host_pool import HostPool  # noqa: PLC0415 - a CPU needs no CUDA runtime

            from chatserve.model.device_copies import DeviceCopies  # noqa: PLC0415 - likewise

            pinnable = HostPool(num_host_blocks, block, dtype, slab_bytes=SLAB_BYTES)

            def unpin() -> None:
                torch.cuda.synchronize(device)  # copies may be under way
                pinnable.close()

            self.host = HostMemory(pinnable.blocks, pinnable.slab_blocks, pinnable.pin, unpin)
            self._copies = DeviceCopies(self.device_pool, self.host)
        else:
            self.host = HostMemory(torch.empty((num_host_blocks, *block), dtype=dtype), max(1, num_host_blocks), None)

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
        """Make all swaps out, then all swaps in, then all copies, before whatever the current stream gets next."""
        if self._copies is None:
            _copy_blocks(self.device_pool, self.host_pool, ((swap.src, swap.dst) for swap in transfers.swap_out))
            _copy_blocks(self.host_pool, self.device_pool, ((swap.src, swap.dst) for swap in transfers.swap_in))
        else:
            ends = [self._copies.out(transfers.swap_out)] if transfers.swap_out else []
            if transfers.swap_in:
                ends.append(self._copies.into(transfers.swap_in, after=ends))
            for end in ends:
                torch.cuda.current_stream(self.device_pool.device).wait_event(end)
        if self._forks is not None:
            self._forks.make(transfers.copies)
            return
        for copy in transfers.copies:
            kept = slice(0, copy.num_tokens)
            self.device_pool[copy.dst, :, :, :, kept].copy_(self.device_pool[copy.src, :, :, :, kept])

    def start(self, transfers: Transfers) -> tuple[torch.cuda.Event, ...]:
        """Begin swaps, both directions at once, after what the current stream holds; they have been made when all
        events have passed. On a CPU they are made at once."""
        assert not transfers.copies, "copies on the device are made within a step"
        if self._copies is None:
            self.execute(transfers)
            return ()
        ends = [self._copies.out(transfers.swap_out)] if transfers.swap_out else []
        if transfers.swap_in:
            ends.append(self._copies.into(transfers.swap_in))
        return tuple(ends)


def _copy_blocks(source: torch.Tensor, target: torch.Tensor, pairs: Iterable[tuple[int, int]]) -> None:
    for src, dst, length in _runs(pairs):
        target[dst : dst + length].copy_(source[src : src + length])


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
