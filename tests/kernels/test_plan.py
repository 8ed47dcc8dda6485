"""The planner: every key of every row exactly once, in equal shares, with room for every partial result."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from chatserve_kernels.device_plan import DecodeConfigs, make_planner
from chatserve_kernels.forest import CostModel, find_runs
from chatserve_kernels.plan import DecodePlanner
from chatserve_kernels.tiles import Pace
from chatserve_kernels.work import ENTRY_FIELDS, ITEM_FIELDS, MERGE_FIELDS, DecodePlan, PlanError
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.decode_cases import SMALL_CONFIGS, Forest, flat, forest

BLOCK = 16


def planner_for(rows: Forest, *, configs: DecodeConfigs = SMALL_CONFIGS, **options) -> DecodePlanner:
    settings = {
        "num_processors": 6,
        "max_rows": len(rows.lengths) + 4,
        "max_context": 4096,
        "cost": CostModel(),
    } | options
    return make_planner(configs, num_heads=4, num_kv_heads=2, block_size=BLOCK, **settings)


def read(planner: DecodePlanner, plan: DecodePlan) -> tuple[list[list[tuple]], list[list[tuple]], Counter, dict]:
    """Items of each small and each wide slot as (table row, first token, tokens, rows), the keys each row reads, and
    its partial slots."""
    layout, packed = planner.layout, plan.packed
    entries = packed[layout.entries].reshape(-1, ENTRY_FIELDS)
    reads: Counter = Counter()
    slots: dict[int, list[int]] = {}

    def items(starts: np.ndarray, table: np.ndarray) -> list[list[tuple]]:
        result = []
        for first, last in itertools.pairwise(starts):
            result.append([])
            for row, token, length, entry, count in table.reshape(-1, ITEM_FIELDS)[first:last].tolist():
                rows = entries[entry : entry + count].tolist()
                result[-1].append((row, token, length, [fields[0] for fields in rows]))
                for query_row, slot, *_ in rows:
                    reads.update((query_row, key) for key in range(token, token + length))
                    slots.setdefault(query_row, []).append(slot)
        return result

    starts = layout.beside_starts if plan.with_wide else layout.alone_starts
    small = items(packed[starts], packed[layout.small_items])
    wide = items(packed[layout.wide_starts], packed[layout.wide_items])
    return small, wide, reads, slots


def check(rows: Forest, planner: DecodePlanner, plan: DecodePlan, window: int | None = None) -> None:
    small, wide, reads, slots = read(planner, plan)
    assert max(reads.values(), default=1) == 1, "a key is read twice for one row"
    for row, length in enumerate(rows.lengths.tolist()):
        low = 0 if window is None else max(0, length - window)
        keys = {key for owner, key in reads if owner == row}
        assert set(range(low, length)) <= keys <= set(range(length)), f"row {row} misses keys, or reads foreign ones"
    for table_row, token, length, sharers in (item for slot in [*small, *wide] for item in slot):
        blocks = slice(token // BLOCK, -(-(token + length) // BLOCK))
        assert token % BLOCK == 0
        for row in sharers:
            if row < len(rows.tables):
                assert (rows.tables[row, blocks] == rows.tables[table_row, blocks]).all(), (
                    "rows share what is not shared"
                )
    merges = planner.layout.merges
    merged = plan.packed[merges].reshape(-1, MERGE_FIELDS)[: plan.packed[planner.layout.num_merges][0]].tolist()
    assert sorted(row for row, _, _ in merged) == sorted(row for row, own in slots.items() if len(own) > 1)
    places = []
    for row, first, count in merged:
        assert sorted(slots[row]) == list(range(first, first + count)), "a row's partials lie side by side"
        places += slots[row]
    assert len(set(places)) == len(places)
    assert max(places, default=0) < planner.layout.max_partials
    assert set(slots) == set(range(plan.num_rows)), "a row that nothing writes"


@st.composite
def forests(draw, max_tokens: int = 300) -> Forest:
    """Trees of up to three levels of shared nodes, in random rows order."""
    num_rows = draw(st.integers(1, 12))
    trunks = draw(st.lists(st.integers(0, max_tokens // 3 // BLOCK), min_size=1, max_size=3))
    branches = draw(st.lists(st.integers(0, max_tokens // 3 // BLOCK), min_size=1, max_size=4))
    paths = []
    for row in range(num_rows):
        path = []
        if draw(st.booleans()):
            trunk = draw(st.integers(0, len(trunks) - 1))
            path.append((f"trunk {trunk}", trunks[trunk] * BLOCK))
            if draw(st.booleans()):
                branch = draw(st.integers(0, len(branches) - 1))
                path.append((f"trunk {trunk} branch {branch}", branches[branch] * BLOCK))
        path.append((f"own {row}", draw(st.integers(0 if not path else 1, max_tokens // 3))))
        paths.append(path)
    return forest(paths, BLOCK)


COSTS = st.sampled_from([CostModel(), CostModel(min_tokens=1, partial_tokens=0.0), CostModel(min_tokens=48)])


@settings(max_examples=60, deadline=None)
@given(forests(), COSTS, st.booleans(), st.sampled_from([None, 1, 40, 200]), st.integers(0, 3))
def test_any_forest_is_read_completely_and_once(rows, cost, share, window, num_padding):
    planner = planner_for(rows, cost=cost, share=share)
    plan = planner.plan(rows.tables, rows.lengths, window=window, num_padding=num_padding)
    assert plan.num_rows == len(rows.lengths) + num_padding
    check(rows, planner, plan, window)


@settings(max_examples=40, deadline=None)
@given(
    forests(),
    st.floats(0.1, 10.0),
    st.floats(0.1, 10.0),
    st.floats(0.3, 1.0),
    st.sampled_from([None, 40]),
)
def test_any_parting_of_the_chip_reads_any_forest(rows, wide_tile, small_tile, saturating, window):
    configs = replace(SMALL_CONFIGS, pace=Pace(wide_tile, small_tile, saturating, start=1.0))
    planner = planner_for(rows, configs=configs, num_processors=14, cost=CostModel(min_tokens=16))
    check(rows, planner, planner.plan(rows.tables, rows.lengths, window=window), window)
    check(rows, planner, planner.plan(rows.tables, rows.lengths, same_rows=True))


def used(slots: list[list[tuple]]) -> int:
    assert not any(slots[sum(map(bool, slots)) :]), "programs without work come last"
    return sum(map(bool, slots))


@pytest.mark.parametrize(
    ("saturating", "shared", "own", "shares"),
    [
        (
            0.5,
            512,
            32,
            (4, 4),
        ),  # half of the small programs keep memory busy, so that half the chip is free for wide ones
        (0.9, 512, 320, (1, 7)),  # nearly all are needed
        (0.5, 3072, 16, (8, 8)),  # the wide ones need all, and the small ones follow
    ],
)
def test_wide_and_small_items_get_the_programs_that_their_work_asks_for(saturating, shared, own, shares):
    """Of 16 processors and 2 KV heads: 8 wide programs a head, or as many small ones in their place."""
    configs = replace(SMALL_CONFIGS, pace=Pace(wide_tile=1.0, small_tile=1.0, saturating=saturating, start=10.0))
    rows = forest([[("system", shared), (str(row), own)] for row in range(64)], BLOCK)  # 4 tiles of 16 rows
    planner = planner_for(rows, configs=configs, num_processors=16)
    plan = planner.plan(rows.tables, rows.lengths)
    check(rows, planner, plan)
    small, wide, _, _ = read(planner, plan)
    assert (used(wide), used(small)) == shares


@settings(max_examples=30, deadline=None)
@given(forests(), COSTS, st.integers(1, 20))
def test_a_plan_of_the_same_rows_grown_longer_is_a_plan_of_them(rows, cost, growth):
    planner = planner_for(rows, cost=cost)
    before = rows.lengths - np.minimum(rows.lengths % BLOCK, growth)  # what was shared stays shared
    planner.plan(rows.tables, before)
    check(rows, planner, planner.plan(rows.tables, rows.lengths, same_rows=True))


@settings(max_examples=30, deadline=None)
@given(forests(), st.integers(1, 100))
def test_fixed_chunks_do_not_depend_on_other_rows(rows, chunk):
    planner = planner_for(rows, fixed_chunk=chunk)
    plan = planner.plan(rows.tables, rows.lengths)
    check(rows, planner, plan)
    small, wide, _, _ = read(planner, plan)
    assert not any(wide)
    every = -(-chunk // 32) * 32
    for row, token, length, sharers in (item for slot in small for item in slot):
        assert sharers == [row]
        assert token % every == 0
        assert length == min(every, rows.lengths[row] - token)


@pytest.mark.parametrize("lengths", [[3000] + [64] * 15, [1000] * 16, [1], [4096] * 3])
def test_shares_are_equal_however_uneven_the_rows(lengths):
    rows = flat(lengths, BLOCK)
    planner = planner_for(rows, num_processors=14)
    small, _, _, _ = read(planner, planner.plan(rows.tables, rows.lengths))
    tiles = [sum(-(-length // 32) for _, _, length, _ in slot) for slot in small]
    assert max(tiles) - min(tiles) <= 1


def test_a_shared_run_is_read_once_for_all_and_by_wide_tiles_if_many_share_it():
    rows = forest([[("system", 256), (str(row), 20)] for row in range(40)], BLOCK)
    planner = planner_for(rows)
    plan = planner.plan(rows.tables, rows.lengths)
    small, wide, _, _ = read(planner, plan)
    assert plan.with_wide
    assert all(length <= 32 for slot in small for _, _, length, _ in slot)
    per_tile = 16  # 32 query rows, groups of 2
    assert sum(length for slot in wide for _, _, length, _ in slot) == 256 * -(-40 // per_tile)


def test_what_few_share_needs_no_wide_tiles():
    rows = forest([[("system", 256), (str(row), 20)] for row in range(8)], BLOCK)
    planner = planner_for(rows)
    plan = planner.plan(rows.tables, rows.lengths)
    assert not plan.with_wide
    small, _, _, _ = read(planner, plan)
    assert sum(length for slot in small for _, _, length, _ in slot) == 256 + 8 * 20


def test_a_short_run_is_left_to_its_children_which_may_share_more():
    paths = [[("system", 64), (f"trunk {row // 4}", 96), (str(row), 20)] for row in range(8)]
    rows = forest(paths, BLOCK)
    planner = planner_for(rows)
    small, _, _, _ = read(planner, planner.plan(rows.tables, rows.lengths))
    shared = {(token, tuple(sorted(sharers))) for slot in small for _, token, _, sharers in slot if len(sharers) > 1}
    assert {sharers for _, sharers in shared} == {(0, 1, 2, 3), (4, 5, 6, 7)}
    assert min(token for token, _ in shared) == 0, "the trunks' runs begin with the prefix that did not pay"


def test_nothing_is_shared_where_all_of_it_saves_less_than_sharing_costs():
    rows = forest([[("system", 256), (str(row), 20)] for row in range(40)], BLOCK)
    saved = CostModel().saved_tokens(40, 256)
    for step_tokens, shares in ((saved - 1, True), (saved + 1, False)):
        planner = planner_for(rows, cost=CostModel(step_tokens=step_tokens))
        assert planner.plan(rows.tables, rows.lengths).with_wide == shares


def test_partial_blocks_are_never_shared():
    tables = np.array([[4, 7], [4, 7]], dtype=np.int32)
    assert find_runs(tables, np.array([1, 1])).runs == [(0, 2, 0, 1)]
    assert find_runs(tables, np.array([1, 0])).runs == []


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_runs_are_the_longest_stretches_that_the_same_rows_share(data):
    """Any tree, with a beginning common to all or without, rows that end early, rows that are equal. What a row has
    after its full blocks is its own."""
    parents = [-1, *(data.draw(st.integers(-1, block)) for block in range(data.draw(st.integers(0, 12))))]
    paths = []
    for leaf in data.draw(st.lists(st.integers(0, len(parents) - 1), min_size=1, max_size=8)):
        path = [leaf]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        paths.append(path)
    num_full = np.array([data.draw(st.integers(0, len(path))) for path in paths])
    tables = np.full((len(paths), max(map(len, paths)) + data.draw(st.integers(0, 2))), 10**6, dtype=np.int32)
    tables += np.arange(len(paths), dtype=np.int32)[:, None]
    for table, path, count in zip(tables, paths, num_full, strict=True):
        table[:count] = path[:count]
    users: dict[int, set[int]] = {}
    for row, (path, count) in enumerate(zip(paths, num_full, strict=True)):
        for block in path[:count]:
            users.setdefault(block, set()).add(row)
    shared = {block: frozenset(rows) for block, rows in users.items() if len(rows) > 1}
    found = find_runs(tables, num_full)
    assert sorted(found.order.tolist()) == list(range(len(paths)))
    for run in found.runs:
        rows = frozenset(found.order[run.first : run.last].tolist())
        blocks = tables[min(rows), run.begin : run.end].tolist()
        assert blocks, "a run of nothing"
        for block in blocks:
            assert shared.pop(block) == rows, "another set of rows, or a block of two runs"
    assert not shared, "blocks that are shared and in no run"


def test_a_plan_without_wide_tiles_can_be_asked_for():
    rows = forest([[("system", 256), (str(row), 20)] for row in range(40)], BLOCK)
    planner = planner_for(rows)
    plan = planner.plan(rows.tables, rows.lengths, with_wide=False)
    assert not plan.with_wide
    check(rows, planner, plan)


def test_rows_beyond_what_the_planner_was_made_for_are_refused():
    rows = flat([10] * 3, BLOCK)
    planner = planner_for(rows, max_rows=3, max_context=10)
    with pytest.raises(PlanError, match="at most 3 rows, got 3 and 1 more"):
        planner.plan(rows.tables, rows.lengths, num_padding=1)
    with pytest.raises(PlanError, match="at most 10 tokens in 1 blocks, got 11"):
        planner.plan(rows.tables, rows.lengths + 1)
    with pytest.raises(PlanError, match="group size from 1 to 16, got 32"):
        make_planner(
            SMALL_CONFIGS,
            num_processors=6,
            max_rows=1,
            max_context=1,
            num_heads=32,
            num_kv_heads=1,
            block_size=BLOCK,
            cost=CostModel(),
        )
