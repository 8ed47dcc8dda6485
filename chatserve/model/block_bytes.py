"""The bytes of KV blocks as plain memory, for whoever keeps them elsewhere. Decides nothing; knows no files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatserve.model.kv_storage import KVStorage
    from chatserve.types import BlockId, HostBlockId

_STAGED_BLOCKS: Final = 32
"""As many device blocks as can be looked at together."""


class StorageBytes:
    """Views of a `KVStorage`'s blocks, `block_bytes` each. On CUDA device blocks are copied to pinned memory first."""

    def __init__(self, storage: KVStorage) -> None:
        self.block_bytes = storage.block_bytes
        self._device = storage.device_pool.device
        self._device_blocks = _as_bytes(storage.device_pool, self.block_bytes)
        self._host_blocks = _as_bytes(storage.host_pool, self.block_bytes)
        self._staging: torch.Tensor | None = None

    def device_blocks(self, block_ids: Sequence[BlockId]) -> list[memoryview]:
        """Views to read, good until the next call."""
        assert len(block_ids) <= _STAGED_BLOCKS
        if self._device.type == "cpu":
            return [self._device_blocks[block_id].numpy().data for block_id in block_ids]
        if self._staging is None:
            self._staging = torch.empty((_STAGED_BLOCKS, self.block_bytes), dtype=torch.uint8, pin_memory=True)
        for row, block_id in zip(self._staging, block_ids, strict=False):
            row.copy_(self._device_blocks[block_id], non_blocking=True)
        self.settle()
        return [row.numpy().data for row, _ in zip(self._staging, block_ids, strict=False)]

    def host_block(self, host_block_id: HostBlockId) -> memoryview:
        """A view to read and to write."""
        return self._host_blocks[host_block_id].numpy().data

    def settle(self) -> None:
        """Wait for all that the device was given to do."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _as_bytes(pool: torch.Tensor, block_bytes: int) -> torch.Tensor:
    """[num_blocks, block_bytes] uint8, over the same memory."""
    return pool.view(torch.uint8).view(len(pool), block_bytes)
