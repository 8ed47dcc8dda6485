"""The forest of running sessions, read off their block tables, and the choice of what to share.

A physical block holds one token sequence's KV, so two rows whose tables name the same block agree on every block before
it: tables form a forest of their own, and no other description of it is needed. A *run* is a maximal stretch of full
blocks that the same set of rows uses. `find_runs` finds all of them; `choose_shared` keeps those that are worth reading
once for all their rows, and leaves the others to each row. Plain numpy; must not know kernels or devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Run(NamedTuple):
    """Blocks `begin` to `end` of the tables of the rows `order[first:last]`."""

    first: int
    last: int
    begin: int
    end: int


class Forest(NamedTuple):
    order: NDArray[np.int64]
    """Rows in an order in which those that share a block are neighbours."""
    runs: list[Run]
    """Parents before children."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """When one read for n rows beats n reads, in the time of reading one token of one row's KV.

    Flat decode reads L tokens n times, but all reads after the first may come from the L2 cache, so that each costs
    `repeat_read` of a read from memory. Sharing reads them once and pays for n more partial results, each
    `partial_tokens`' worth of traffic. A run shorter than `min_tokens` is not worth its place in a pipeline. And all
    runs of a step together must save `step_tokens`, for the launches and the merging that come with the first of them.
    """

    min_tokens: int = 128
    partial_tokens: float = 8.0
    repeat_read: float = 0.7
    step_tokens: float = 0.0

    @classmethod
    def measured(cls, token_bytes: int) -> CostModel:
        """For KV of `token_bytes` a token and layer. On an H200 a step with shared runs takes 13 us longer before it
        saves anything; at 4.3 TB/s that, and half as much again to be sure of a gain, are 80 MB."""
        return cls(step_tokens=80e6 / token_bytes)

    def saved_tokens(self, num_rows: int, num_tokens: int) -> float:
        """What sharing a run saves; 0 or less: it does not pay."""
        if num_tokens < self.min_tokens:
            return 0.0
        return (num_rows - 1) * num_tokens * self.repeat_read - num_rows * self.partial_tokens


def find_runs(tables: NDArray[np.int32], num_full: NDArray[np.int64]) -> Forest:
    """`tables` [num_rows, max_blocks]; only the first `num_full[i]` entries of row i, its full blocks, are compared."""
    num_rows = len(tables)
    width = int(num_full.max(initial=0))
    if num_rows < 2 or width == 0:
        return Forest(np.arange(num_rows), [])
    # What all have in common, a system prompt say, would only be compared again and again.
    tails = np.ascontiguousarray(tables[:, _common_to_all(tables, int(num_full.min())) :])
    # Bytewise order is not numeric order, but it too puts equal beginnings side by side, at the speed of memcmp; what
    # lies past a row's own blocks then orders only rows that are equal before.
    keys = tails.view(np.dtype((np.void, tails.shape[1] * tails.itemsize)))[:, 0]
    order = np.argsort(keys, kind="stable")
    common = _common_beginnings(tables, order, num_full[order])
    runs: list[Run] = []
    open_runs: list[tuple[int, int]] = []  # (first row, depth in blocks), depths rising
    for position, depth in enumerate([*common.tolist(), 0], start=1):
        first = position - 1
        while open_runs and open_runs[-1][1] > depth:
            first, end = open_runs.pop()
            begin = max(depth, open_runs[-1][1] if open_runs else 0)
            runs.append(Run(first, position, begin, end))
        if depth > (open_runs[-1][1] if open_runs else 0):
            open_runs.append((first, depth))
    runs.sort(key=lambda run: (run.begin, run.first))
    return Forest(order, runs)


def _common_to_all(tables: NDArray[np.int32], num_full: int) -> int:
    """How many blocks all rows have in common, of `num_full` that each has, and at most one less than a table holds."""
    low, high = 0, min(num_full, tables.shape[1] - 1)
    while low < high:
        middle = (low + high) >> 1
        if (tables[:, middle] == tables[0, middle]).all():
            low = middle + 1
        else:
            high = middle
    return low


def _common_beginnings(
    tables: NDArray[np.int32], order: NDArray[np.int64], num_full: NDArray[np.int64]
) -> NDArray[np.int64]:
    """How many blocks each row of `order` has in common with the next one.

    Two rows that have the block at a depth in common have all before it in common, so that depth is found by bisection,
    for all pairs at a time: 10 comparisons a pair at 1,000 blocks.
    """
    blocks = tables.reshape(-1)
    first, second = order[:-1] * tables.shape[1], order[1:] * tables.shape[1]
    high = np.minimum(num_full[:-1], num_full[1:])
    low = np.zeros_like(high)
    for _ in range(int(high.max()).bit_length()):
        middle = (low + high) >> 1
        # Where the search has ended, middle is high, which may lie past the table.
        is_open = middle < high
        middle = np.where(is_open, middle, 0)
        is_common = is_open & (blocks[first + middle] == blocks[second + middle])
        low = np.where(is_common, middle + 1, low)
        high = np.where(is_open & ~is_common, middle, high)
    return low


def choose_shared(
    forest: Forest, block_size: int, cost: CostModel, max_levels: int
) -> tuple[list[Run], NDArray[np.int64]]:
    """The runs to read once, and for each row of `forest.order` the first block that is left to it alone.

    Top down: a run that does not pay joins its children, which thereby grow longer and may pay after all. No row takes
    part in more than `max_levels` shared runs. If all of them save too little for a step, nothing is shared.
    """
    covered = np.zeros(len(forest.order), dtype=np.int64)
    levels = np.zeros(len(forest.order), dtype=np.int64)
    shared: list[Run] = []
    total = 0.0
    for run in forest.runs:
        begin = int(covered[run.first])
        saved = cost.saved_tokens(run.last - run.first, (run.end - begin) * block_size)
        if saved > 0 and levels[run.first] < max_levels:
            total += saved
            shared.append(Run(run.first, run.last, begin, run.end))
            covered[run.first : run.last] = run.end
            levels[run.first : run.last] += 1
    if total < cost.step_tokens:
        return [], np.zeros_like(covered)
    return shared, covered
