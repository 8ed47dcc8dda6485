"""The planner of decode: which segments a step of one token a row has.

Plain numpy, no Python loop over tokens, blocks or (while membership is unchanged) rows; a plan needs no token value, so
that a step can be planned while the step before it runs, and the same plan serves all layers that see the same window.
A segment (`work` module) is a shared run with up to as many rows as fit a tile, or what a row reads alone. Must not
know devices; `device_plan` carries a plan there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from chatserve_kernels.forest import CostModel, choose_shared, find_runs
from chatserve_kernels.work import (
    DecodePlan,
    Items,
    PlanError,
    PlanLayout,
    Segments,
    TileShape,
    Work,
    check_sizes,
    check_window,
    cut,
    pack,
    segments_of,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from chatserve_kernels.tiles import Pace


class _Sharing(NamedTuple):
    """All that stays the same from step to step while the same rows run."""

    order: NDArray[np.int64]
    private_starts: NDArray[np.int64]
    """Tokens, by row."""
    small: Segments
    wide: Segments
    wide_items: dict[int, Items]
    """Without a window, by how many slots they are cut for."""
    needs_wide: bool
    """Whether a run has more rows than small tiles that run alone hold."""


class DecodePlanner:
    """Plans steps of at most `max_rows` rows whose tables name blocks of `block_size` tokens.

    `alone`, `beside` and `wide` are the kernels' tiles: small ones if there is nothing wide, small ones beside wide
    ones, and those. `fixed_chunk` cuts every row at multiples of that many tokens and nowhere else and shares nothing,
    so that a row's result does not depend, to the bit, on what runs beside it. `share=False` only turns sharing off.
    `pace` parts the chip between wide and small tiles; without it each kind is cut for all of it.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_context: int,
        group_size: int,
        block_size: int,
        alone: TileShape,
        beside: TileShape,
        wide: TileShape,
        cost: CostModel,
        share: bool = True,
        max_levels: int = 4,
        fixed_chunk: int | None = None,
        pace: Pace | None = None,
    ) -> None:
        assert alone.query_rows <= beside.query_rows
        check_sizes(group_size, alone, block_size)
        self._block_size = block_size
        self._max_context = max_context
        self._cost = cost
        self._pace = pace
        self._share = share and fixed_chunk is None
        self._max_levels = max_levels if self._share else 0
        self._alone, self._beside, self._wide = alone, beside, wide
        self._alone_rows, self._beside_rows = alone.rows(group_size), beside.rows(group_size)
        self._wide_rows = wide.rows(group_size)
        small_slots = max(alone.num_slots, beside.num_slots)
        self._fixed_units = None
        pieces = 0
        if fixed_chunk is not None:
            unit = self._unit(alone)
            self._fixed_units = -(-fixed_chunk // unit)
            pieces = max_rows * (-(-max_context // (self._fixed_units * unit)))
        shared = max_rows * self._max_levels
        max_entries = max_rows + shared + small_slots * self._beside_rows + wide.num_slots * self._wide_rows + pieces
        self.layout = PlanLayout.of(
            block_size=block_size,
            max_rows=max_rows,
            alone_slots=alone.num_slots,
            beside_slots=beside.num_slots,
            wide_slots=wide.num_slots,
            max_small_items=max_rows + shared + small_slots + pieces,
            max_wide_items=shared + wide.num_slots,
            max_entries=max_entries,
            max_partials=max_entries,
        )
        self._sharing: _Sharing | None = None

    def plan(
        self,
        tables: NDArray[np.int32],
        lengths: NDArray[np.int64],
        *,
        window: int | None = None,
        same_rows: bool = False,
        num_padding: int = 0,
        with_wide: bool | None = None,
    ) -> DecodePlan:
        """One step.

        `tables` [num_rows, max_blocks], of which a row's own blocks are read; `lengths` [num_rows], the tokens each
        row attends to, the one being decoded included. A row attends to the last `window` of them. `same_rows`
        promises that these are the rows of the plan before, at most longer; what they share is then not looked for
        again. The results of `num_padding` more rows, and of rows of length 0, are zero.
        `with_wide` asks for a plan for a graph that was captured with the wide kernel, or without it, in which case
        nothing is shared widely; None: as suits these rows.
        """
        num_rows = len(lengths)
        check_window(window)
        if num_rows + num_padding > self.layout.max_rows:
            raise PlanError(f"expected at most {self.layout.max_rows} rows, got {num_rows} and {num_padding} more")
        if num_rows and (longest := int(lengths.max())) > min(self._max_context, tables.shape[1] * self._block_size):
            raise PlanError(f"expected at most {self._max_context} tokens in {tables.shape[1]} blocks, got {longest}")
        lengths = lengths.astype(np.int64, copy=False)
        sharing = self._sharing if same_rows else None
        if sharing is None or len(sharing.order) != num_rows:
            sharing = self._sharing = self._find_sharing(tables, lengths)
        needs_wide = sharing.needs_wide
        if with_wide is False and needs_wide:
            sharing = self._share_nothing(num_rows)
        return self._pack(
            sharing, lengths, window, num_padding, with_wide=needs_wide if with_wide is None else with_wide
        )

    def _unit(self, tile: TileShape) -> int:
        """Tokens a share is counted in: whole tiles, which begin where blocks begin."""
        return max(tile.key_tokens, self._block_size)

    def _find_sharing(self, tables: NDArray[np.int32], lengths: NDArray[np.int64]) -> _Sharing:
        num_rows = len(lengths)
        if not self._share:
            return self._share_nothing(num_rows)
        forest = find_runs(tables, lengths // self._block_size)
        runs, covered = choose_shared(forest, self._block_size, self._cost, self._max_levels)
        small: list[tuple[int, int, int, int, int]] = []
        wide: list[tuple[int, int, int, int, int]] = []
        needs_wide = any(run.last - run.first > self._alone_rows for run in runs)
        small_rows = self._beside_rows if needs_wide else self._alone_rows
        for run in runs:
            count = run.last - run.first
            into, per_tile = (small, small_rows) if count <= small_rows else (wide, self._wide_rows)
            num_tiles = -(-count // per_tile)
            start, length = run.begin * self._block_size, (run.end - run.begin) * self._block_size
            for tile in range(num_tiles):
                first = run.first + count * tile // num_tiles
                last = run.first + count * (tile + 1) // num_tiles
                into.append((int(forest.order[first]), start, length, first, last - first))
        private_starts = np.empty(num_rows, dtype=np.int64)
        private_starts[forest.order] = covered * self._block_size
        wide_segments = segments_of(wide)
        return _Sharing(
            forest.order,
            private_starts,
            segments_of(small),
            wide_segments,
            {},
            needs_wide=needs_wide,
        )

    def _share_nothing(self, num_rows: int) -> _Sharing:
        nothing = segments_of([])
        starts = np.zeros(num_rows, dtype=np.int64)
        return _Sharing(np.arange(num_rows), starts, nothing, nothing, {}, needs_wide=False)

    def _choose_slots(self, wide_units: int, small_units: int, num_wide: int) -> tuple[int, int]:
        """How many slots `num_wide` wide segments and all small ones are cut for.

        All for both, which then run one after the other, or some multiprocessors for the wide ones and the others for
        the small ones, whichever takes less time. Wide segments are mostly alike, so that with a divisor or a multiple
        of their number most cuts fall on their ends: any other adds a partial result for each of its rows.
        """
        wide_slots, small_slots, pace = self._wide.num_slots, self._beside.num_slots, self._pace
        best, least = (wide_slots, small_slots), np.inf
        if pace is None:
            return best
        per_slot = max(1, round(small_slots / wide_slots))  # small programs in a wide one's place
        # From most to least, since of equal choices the one with more wide slots is less at memory's mercy.
        for wide in range(wide_slots, 0, -1):
            runs_alone = wide == wide_slots
            if wide % num_wide and num_wide % wide and not runs_alone:
                continue
            small = small_slots if runs_alone else max(1, small_slots - per_slot * wide)
            wide_us = -(-wide_units // wide) * pace.wide_tile
            small_us = small_units / min(small, pace.saturating * small_slots) * pace.small_tile
            us = wide_us + small_us + pace.start if runs_alone else max(wide_us, small_us)
            if us < least:
                best, least = (wide, small), us
        return best

    def _pack(
        self, sharing: _Sharing, lengths: NDArray[np.int64], window: int | None, num_padding: int, *, with_wide: bool
    ) -> DecodePlan:
        layout, num_rows = self.layout, len(lengths)
        starts, small, wide, cut_before = sharing.private_starts, sharing.small, sharing.wide, sharing.wide_items
        if window is not None:
            visible = np.maximum(0, lengths - window) // self._block_size * self._block_size
            starts = np.maximum(starts, visible)
            small, wide = (_trim(segments, visible[sharing.order]) for segments in (small, wide))
            cut_before = {}
        # Private segments in the forest's order, so that neighbours in memory are neighbours in time.
        order = sharing.order
        if num_padding:
            order = np.append(order, np.arange(num_rows, num_rows + num_padding))
            lengths, starts = (np.append(each, np.zeros(num_padding, dtype=np.int64)) for each in (lengths, starts))
        places = np.arange(len(order))
        private = Segments(order, starts[order], (lengths - starts)[order], places, np.ones_like(places))
        small = private if not len(small.rows) else Segments(*map(np.concatenate, zip(small, private, strict=True)))
        tile = self._beside if with_wide else self._alone
        unit = self._unit(tile)
        units = -(-small.lengths // unit)
        if lengths.min(initial=1) == 0:
            # A row without tokens is an item too: it is what writes the row's zeros.
            units[-len(order) :][lengths[order] == 0] = 1
        wide_unit = self._unit(self._wide)
        wide_units = -(-wide.lengths // wide_unit)
        wide_slots, small_slots = self._wide.num_slots, tile.num_slots
        if len(wide.rows):
            wide_slots, small_slots = self._choose_slots(int(wide_units.sum()), int(units.sum()), len(wide.rows))
        wide_items = cut_before.get(wide_slots)
        if wide_items is None:
            wide_items = cut(wide, wide_units, wide_unit, self._wide.num_slots, num_used=wide_slots)
            cut_before[wide_slots] = wide_items
        small_items = cut(small, units, unit, tile.num_slots, self._fixed_units, small_slots)
        work = Work(small, small_items, wide, wide_items)
        return pack(layout, order, lengths - 1, work, window, with_wide=with_wide)


def _trim(segments: Segments, visible: NDArray[np.int64]) -> Segments:
    """Drop from each segment's front what none of its rows sees; `visible` in the forest's order."""
    if not len(segments.rows):
        return segments
    pairs = np.stack([segments.first, segments.first + segments.count], axis=1).reshape(-1)
    low = np.minimum.reduceat(np.append(visible, visible[-1]), pairs)[::2]
    starts = np.maximum(segments.starts, low)
    return segments._replace(starts=starts, lengths=np.maximum(0, segments.starts + segments.lengths - starts))
