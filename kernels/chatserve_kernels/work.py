"""A step's work as the kernels read it: segments, their cut into equal shares, and the packed array of int32.

A *segment* is a stretch of tokens that one tile of query rows reads. Segments of one tile shape are laid end to end in
units of key tiles and cut into `num_slots` equal shares, one a program and KV head, so that uneven contexts fill the
chip as evenly as even ones, and only the rows that a cut passes through, or that share, need partial results: any other
row is written directly. An *item* is the part of a segment that lies in one share; its rows are *entries* (query row,
partial slot). Plain numpy; must not know which segments there should be, nor devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

ITEM_FIELDS = 5
"""Row whose table to read, first token, number of tokens, first entry, number of entries."""
ENTRY_FIELDS = 4
"""Query row, partial slot (-1: none needed, the only one is the result), the row's first slot, its number of them."""
MERGE_FIELDS = 3
"""Query row, first partial slot, number of partials."""


class PlanError(ValueError):
    """The caller's rows do not fit what the planner was made for."""


@dataclass(frozen=True, slots=True)
class TileShape:
    """A kernel as the planner sees it: tiles of `query_rows` x `key_tokens`, `num_slots` shares of work a KV head."""

    query_rows: int
    key_tokens: int
    num_slots: int

    def rows(self, group_size: int) -> int:
        """Sessions a tile."""
        return max(1, self.query_rows // group_size)


def check_sizes(group_size: int, tile: TileShape, block_size: int) -> None:
    """Raises:
    PlanError: a tile does not hold one row's group of query heads, or tokens' places in blocks are no shifts.
    """
    if not 1 <= group_size <= tile.query_rows:
        raise PlanError(f"expected a group size from 1 to {tile.query_rows}, got {group_size}")
    if block_size < 1 or block_size & (block_size - 1):
        raise PlanError(f"expected a block size that is a power of two, got {block_size}")


def check_window(window: int | None) -> None:
    """Raises:
    PlanError: a row would not see its own token.
    """
    if window is not None and window < 1:
        raise PlanError(f"expected a window of at least 1 token, or None, got {window}")


@dataclass(frozen=True, slots=True)
class PlanLayout:
    """Where each table lies in the packed array, in int32 units: the same for every plan of a planner."""

    block_size: int
    """Of the tables that plans are made of."""
    max_rows: int
    max_partials: int
    wide_slots: int
    alone_starts: slice
    """Each slot's first item, when small tiles run alone; in the same place, when they run beside wide ones:"""
    beside_starts: slice
    wide_starts: slice
    last_positions: slice
    num_merges: slice
    merges: slice
    """The rows that have several partials."""
    small_items: slice
    wide_items: slice
    entries: slice

    @classmethod
    def of(
        cls,
        *,
        block_size: int,
        max_rows: int,
        alone_slots: int,
        beside_slots: int,
        wide_slots: int,
        max_small_items: int,
        max_wide_items: int,
        max_entries: int,
        max_partials: int,
    ) -> PlanLayout:
        wide_starts = _after(slice(0, max(alone_slots, beside_slots) + 1), wide_slots + 1)
        last_positions = _after(wide_starts, max_rows)
        num_merges = _after(last_positions, 1)
        merges = _after(num_merges, MERGE_FIELDS * max_rows)
        small_items = _after(merges, ITEM_FIELDS * max_small_items)
        wide_items = _after(small_items, ITEM_FIELDS * max_wide_items)
        return cls(
            block_size=block_size,
            max_rows=max_rows,
            max_partials=max_partials,
            wide_slots=wide_slots,
            alone_starts=slice(0, alone_slots + 1),
            beside_starts=slice(0, beside_slots + 1),
            wide_starts=wide_starts,
            last_positions=last_positions,
            num_merges=num_merges,
            merges=merges,
            small_items=small_items,
            wide_items=wide_items,
            entries=_after(wide_items, ENTRY_FIELDS * max_entries),
        )

    @property
    def size(self) -> int:
        return self.entries.stop


def _after(previous: slice, size: int) -> slice:
    start = -(-previous.stop // 4) * 4  # 16 bytes, so that no table's address depends on another's size
    return slice(start, start + size)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """What the kernels read, and what the host must know to launch them."""

    packed: NDArray[np.int32]
    num_rows: int
    """Padding included."""
    with_wide: bool
    """Whether it is made for a launch of the wide kernel beside the small one, or of the small one alone."""
    num_partials: int
    window: int | None
    is_causal: bool = False
    """Rows are the tokens of prompts: each attends to its prompt's keys up to its own position."""


class Segments(NamedTuple):
    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    first: NDArray[np.int64]
    """First of its rows in the forest's order."""
    count: NDArray[np.int64]


class Items(NamedTuple):
    segment: NDArray[np.int64]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    slot_starts: NDArray[np.int64]


class Work(NamedTuple):
    small: Segments
    small_items: Items
    wide: Segments
    wide_items: Items


def pack(
    layout: PlanLayout,
    order: NDArray[np.int64],
    last_positions: NDArray[np.int64],
    work: Work,
    window: int | None,
    *,
    with_wide: bool,
    is_causal: bool = False,
) -> DecodePlan:
    """Write down all items; `order` maps the segments' rows to query rows."""
    small, small_items, wide, wide_items = work
    counts = np.concatenate([small.count[small_items.segment], wide.count[wide_items.segment]])
    firsts = np.concatenate([small.first[small_items.segment], wide.first[wide_items.segment]])
    entry_ends = np.cumsum(counts)
    num_entries = int(entry_ends[-1]) if len(entry_ends) else 0
    entry_starts = entry_ends - counts
    entry_rows = order[np.repeat(firsts - entry_starts, counts) + np.arange(num_entries)]
    # A row's partials lie side by side; the only one of a row needs no place, since it is the result.
    partials = np.bincount(entry_rows, minlength=len(order))
    placed = np.where(partials > 1, partials, 0)
    first_partials = np.cumsum(placed) - placed
    by_row = np.argsort(entry_rows, kind="stable")
    slots = np.empty(num_entries, dtype=np.int64)
    slots[by_row] = np.cumsum(placed[entry_rows[by_row]] > 0) - 1
    merged = np.flatnonzero(placed)
    num_partials = int(placed.sum())

    packed = np.zeros(layout.size, dtype=np.int32)
    packed[layout.beside_starts if with_wide else layout.alone_starts] = small_items.slot_starts
    packed[layout.wide_starts] = wide_items.slot_starts
    packed[layout.last_positions][: len(order)] = last_positions
    packed[layout.num_merges] = len(merged)
    merges = packed[layout.merges].reshape(-1, MERGE_FIELDS)[: len(merged)]
    merges[:, 0] = merged
    merges[:, 1] = first_partials[merged]
    merges[:, 2] = partials[merged]
    num_small = len(small_items.segment)
    _fill_items(packed[layout.small_items], small, small_items, entry_starts[:num_small])
    _fill_items(packed[layout.wide_items], wide, wide_items, entry_starts[num_small:])
    entries = packed[layout.entries].reshape(-1, ENTRY_FIELDS)[:num_entries]
    entries[:, 0] = entry_rows
    entries[:, 2] = first_partials[entry_rows]
    entries[:, 3] = partials[entry_rows]
    entries[:, 1] = np.where(entries[:, 3] == 1, -1, slots)
    return DecodePlan(packed, len(order), with_wide, num_partials, window, is_causal=is_causal)


def rename_tables(layout: PlanLayout, plan: DecodePlan, table_rows: NDArray[np.int64]) -> DecodePlan:
    """The plan, changed in place to read the table `table_rows[i]` where it said i: for tables that are kept in rows of
    their own. Rows past its end are padding, which reads none."""
    renamed = np.zeros(layout.max_rows, dtype=np.int32)
    renamed[: len(table_rows)] = table_rows
    for items in (layout.small_items, layout.wide_items):
        named = plan.packed[items].reshape(-1, ITEM_FIELDS)[:, 0]
        named[:] = renamed[named]
    return plan


def cut(
    segments: Segments,
    units: NDArray[np.int64],
    unit: int,
    num_slots: int,
    fixed_units: int | None = None,
    num_used: int | None = None,
) -> Items:
    """Lay the segments, of `units` key tiles each, end to end, and cut them into equal shares for the first `num_used`
    of `num_slots` programs a KV head (None: for all).

    With `fixed_units` they are cut every so many tiles instead, and each piece goes to the share it begins in.
    """
    ends = np.cumsum(units)
    total = int(ends[-1]) if len(ends) else 0
    if total == 0:
        nothing = np.zeros(0, dtype=np.int64)
        return Items(nothing, nothing, nothing, np.zeros(num_slots + 1, dtype=np.int64))
    begins = ends - units
    num_used = num_slots if num_used is None else num_used
    bounds = np.minimum(np.arange(num_slots + 1), num_used) * total // num_used
    if fixed_units is None:
        cuts = np.sort(np.concatenate([begins[units > 0], bounds[:num_used]]))
        cuts = cuts[np.append(True, cuts[1:] != cuts[:-1])]
    else:
        pieces = -(-units // fixed_units)
        piece = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        cuts = np.repeat(begins, pieces) + piece * fixed_units
    segment = np.searchsorted(ends, cuts, side="right")
    offsets = (cuts - begins[segment]) * unit
    until = np.append(cuts[1:], total) - begins[segment]
    lengths = np.minimum(until * unit, segments.lengths[segment]) - offsets
    return Items(segment, offsets, lengths, np.searchsorted(cuts, bounds))


def segments_of(tiles: list[tuple[int, int, int, int, int]]) -> Segments:
    return Segments(*np.array(tiles, dtype=np.int64).reshape(-1, 5).T)


def _fill_items(table: NDArray[np.int32], segments: Segments, items: Items, entry_starts: NDArray[np.int64]) -> None:
    columns = table.reshape(-1, ITEM_FIELDS)[: len(items.segment)]
    columns[:, 0] = segments.rows[items.segment]
    columns[:, 1] = segments.starts[items.segment] + items.offsets
    columns[:, 2] = items.lengths
    columns[:, 3] = entry_starts
    columns[:, 4] = segments.count[items.segment]
