"""Block tables of the requests that run: on the host, where steps are planned, and a copy on the device.

A request keeps its row from `assign` to `release`, so that nothing moves when others come and go, and a step sends only
what is new. Changes collect until `take_changes`, which whoever sends them to the device calls. Must not know requests,
nor which block is whose.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

ALIGNMENT = 16
"""Rows are a multiple of so many entries, so that kernels find each of them aligned, whatever the context length."""


class TableChanges(NamedTuple):
    """Entries to overwrite: int64 [num_changes] each."""

    entries: NDArray[np.int64]
    """Row x width + column."""
    block_ids: NDArray[np.int64]


class BlockTables:
    """`max_rows` tables of up to `max_blocks` blocks. Entries past a row's own are old ones: never read them."""

    def __init__(self, max_rows: int, max_blocks: int, device: torch.device) -> None:
        self.width = -(-max_blocks // ALIGNMENT) * ALIGNMENT
        self.host: NDArray[np.int32] = np.zeros((max_rows, self.width), dtype=np.int32)
        self.device = torch.zeros((max_rows, self.width), dtype=torch.int32, device=device)
        self.num_blocks: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)
        """[max_rows], of each row's own."""
        self.versions: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)
        """[max_rows]; a row that has the version it had was only extended since."""
        self._free = list(range(max_rows))[::-1]
        self._changes: list[TableChanges] = []
        self._num_changes = 0

    def assign(self, block_ids: Sequence[int]) -> int:
        """A free row, which names these blocks from now on."""
        if not self._free:
            raise IndexError(f"all {len(self.host)} block tables are in use")
        row = self._free.pop()
        self.num_blocks[row] = 0
        self.versions[row] += 1
        try:
            self.extend(row, block_ids)
        except IndexError:
            self._free.append(row)
            raise
        return row

    def extend(self, row: int, block_ids: Sequence[int]) -> None:
        """Put blocks behind those that a row has."""
        count = len(block_ids)
        start = int(self.num_blocks[row])
        if start + count > self.width:
            raise IndexError(f"a block table holds {self.width} blocks, not {start + count}")
        if count:
            self.host[row, start : start + count] = block_ids
            first = row * self.width + start
            new = np.array(block_ids, dtype=np.int64)
            self._changes.append(TableChanges(np.arange(first, first + count), new))
            self._num_changes += count
            self.num_blocks[row] += count

    def release(self, row: int) -> None:
        assert row not in self._free
        self._free.append(row)

    @property
    def num_changes(self) -> int:
        return self._num_changes

    def take_changes(self) -> TableChanges:
        """What the device does not know yet, in the order in which it happened: of an entry that was changed twice,
        its last state alone."""
        changes, self._changes, self._num_changes = self._changes, [], 0
        if not changes:
            nothing = np.zeros(0, dtype=np.int64)
            return TableChanges(nothing, nothing)
        entries, block_ids = (np.concatenate(each) for each in zip(*changes, strict=True))
        # They are written all at once on the device, so that no entry may come twice.
        kept, last = np.unique(entries[::-1], return_index=True)
        return TableChanges(kept, block_ids[::-1][last])

    def check(self) -> None:
        """Free rows are free once; no row holds more than fits."""
        assert len(set(self._free)) == len(self._free) <= len(self.host)
        assert ((self.num_blocks >= 0) & (self.num_blocks <= self.width)).all()
        assert self._num_changes == sum(len(each.entries) for each in self._changes)
