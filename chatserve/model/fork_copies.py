"""Copy-on-write within a GPU's pool: one kernel for the copies of a step, of just the tokens that both sides share.

The kernel is built and loaded when an instance is made, which else some 15 ms of the first fork's step would go to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from chatserve_kernels.fused import copy_blocks
from chatserve_kernels.staging import PinnedRing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from chatserve.sched.plan import BlockCopy

MOST_COPIES: Final = 64
"""Of one launch."""
_STEPS: Final = 4
"""Whose copies may be on their way to the device at once; more wait for the oldest."""


def independent(copies: Sequence[BlockCopy]) -> Iterator[list[BlockCopy]]:
    """Parts, in order, within which no copy reads or writes what another one writes."""
    part: list[BlockCopy] = []
    read: set[int] = set()
    written: set[int] = set()
    for copy in copies:
        if len(part) == MOST_COPIES or copy.src in written or copy.dst in written or copy.dst in read:
            yield part
            part, read, written = [], set(), set()
        if copy.src != copy.dst:
            part.append(copy)
            read.add(copy.src)
            written.add(copy.dst)
    if part:
        yield part


class ForkCopies:
    """Of `pool` [num_blocks, ..., block_size, head_dim], whose rows are a multiple of 8 bytes."""

    def __init__(self, pool: torch.Tensor) -> None:
        self._pool = pool
        self._ring = PinnedRing(3 * MOST_COPIES, torch.int64, pool.device, num_buffers=_STEPS)
        self._fields = torch.full((3, MOST_COPIES), -1, dtype=torch.int64, device=pool.device)
        self._launch(1)  # a target of -1 is none

    def make(self, copies: Sequence[BlockCopy]) -> None:
        """One after the other, in the order of the current stream."""
        for part in independent(copies):
            fields = np.array([(copy.src, copy.dst, copy.num_tokens) for copy in part], dtype=np.int64)
            padding = np.full(MOST_COPIES - len(part), -1, dtype=np.int64)
            parts = [each for field in fields.T for each in (field, padding)]
            self._ring.send_parts(parts, self._fields.view(-1))
            self._launch(len(part))

    def _launch(self, count: int) -> None:
        sources, targets, num_tokens = self._fields[:, :count]
        copy_blocks(self._pool, sources, targets, num_tokens)
