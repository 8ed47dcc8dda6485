"""The planner of prefill: which segments a step of several new tokens a row has. As `plan`, in plain numpy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from chatserve_kernels.work import (
    DecodePlan,
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


class PrefillPlanner:
    """Plans the attention of new tokens over their own rows' paged KV, themselves included.

    A segment is a tile of neighbouring tokens of one row, over all keys that the last of them sees; each token masks
    what lies past it. So that a few new tokens on a long history fill the chip as evenly as many on none, segments are
    cut like those of decode. `tile` is the kernel's; `max_tokens` in all and `max_rows` in a plan.
    """

    def __init__(self, *, max_tokens: int, max_rows: int, group_size: int, block_size: int, tile: TileShape) -> None:
        check_sizes(group_size, tile, block_size)
        self._tile, self._block_size = tile, block_size
        self._tokens = tile.rows(group_size)
        max_segments = max_rows + max_tokens // self._tokens
        self.layout = PlanLayout.of(
            block_size=block_size,
            max_rows=max_tokens,
            alone_slots=tile.num_slots,
            beside_slots=tile.num_slots,
            wide_slots=tile.num_slots,
            max_small_items=0,
            max_wide_items=max_segments + tile.num_slots,
            max_entries=max_tokens + tile.num_slots * self._tokens,
            max_partials=2 * tile.num_slots * self._tokens,  # the segments on both sides of each cut
        )

    def plan(
        self,
        starts: NDArray[np.int64],
        lengths: NDArray[np.int64],
        *,
        window: int | None = None,
        num_padding: int = 0,
    ) -> DecodePlan:
        """Row i's tokens `starts[i]` to `starts[i] + lengths[i]` are new; the batch holds one row's after another's,
        and `num_padding` more tokens, for which nothing is read or written."""
        num_tokens = int(lengths.sum())
        check_window(window)
        if num_tokens + num_padding > self.layout.max_rows:
            raise PlanError(f"expected at most {self.layout.max_rows} tokens, got {num_tokens} and {num_padding} more")
        tiles = -(-lengths // self._tokens)
        rows = np.repeat(np.arange(len(lengths)), tiles)
        offsets = (np.arange(len(rows)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * self._tokens
        counts = np.minimum(self._tokens, lengths[rows] - offsets)
        first_tokens = (np.cumsum(lengths) - lengths)[rows] + offsets
        first_positions = starts[rows] + offsets
        low = np.zeros_like(first_positions)
        if window is not None:
            low = np.maximum(0, first_positions + 1 - window) // self._block_size * self._block_size
        segments = Segments(rows, low, first_positions + counts - low, first_tokens, counts)
        unit = max(self._tile.key_tokens, self._block_size)
        items = cut(segments, -(-segments.lengths // unit), unit, self._tile.num_slots)
        nothing = segments_of([])
        nothing_cut = cut(nothing, nothing.lengths, unit, self._tile.num_slots)
        positions = np.arange(num_tokens) - np.repeat(np.cumsum(lengths) - lengths - starts, lengths)
        positions = np.append(positions, np.full(num_padding, -1))
        work = Work(nothing, nothing_cut, segments, items)
        return pack(
            self.layout, np.arange(num_tokens + num_padding), positions, work, window, with_wide=True, is_causal=True
        )
