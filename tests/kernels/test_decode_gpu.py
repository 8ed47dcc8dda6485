"""On a real GPU: real sizes, captured graphs, and copies that race with what they replace."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from chatserve_kernels.configs import default_configs
from chatserve_kernels.device_plan import DecodeConfigs, DevicePlan, make_planner
from chatserve_kernels.forest import CostModel
from chatserve_kernels.forest_decode import DecodeWorkspace, forest_decode
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.decode_cases import Case, Heads, assert_close, flat, forest
from tests.kernels.test_plan import forests

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
LLAMA = Heads(num_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)


def configs_for(heads: Heads, max_rows: int) -> DecodeConfigs:
    return default_configs(heads.head_dim, is_half=heads.dtype != torch.float32, max_rows=max_rows)


@settings(max_examples=40, deadline=None)
@given(forests(max_tokens=5000), st.booleans(), st.integers(0, 3), st.sampled_from([None, 700]))
def test_any_forest(rows, share, num_padding, window):
    case = Case(rows, LLAMA, num_padding=num_padding, window=window)
    case.check(configs=configs_for(LLAMA, 256), num_processors=132, share=share)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("max_rows", [1, 256])
def test_head_sizes_and_types(head_dim, dtype, max_rows):
    heads = Heads(14, 2, head_dim, dtype=dtype)
    paths = [[("system", 512), (str(row), 7 * row + 1)] for row in range(40)]
    case = Case(forest(paths, 16), heads, softcap=20.0)
    case.check(configs=configs_for(heads, max_rows), num_processors=132)
    Case(flat([700, 3, 0], 16), heads).check(configs=configs_for(heads, max_rows), num_processors=132)


@pytest.mark.parametrize("num_sharing", [2, 5, 16, 17, 40, 70])
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
def test_runs_shared_by_few_and_by_many(num_sharing, kv_dtype):
    heads = Heads(32, 8, 128, dtype=torch.bfloat16, kv_dtype=kv_dtype)
    paths = [[("system", 1040), (str(row), 60 * row)] for row in range(1, num_sharing + 1)]
    case = Case(forest([*paths, [("other", 333)]], 16), heads)
    if kv_dtype is not None:
        case.key_scale = torch.linspace(0.5, 2.0, 8, device=CUDA)
        case.value_scale = torch.linspace(3.0, 0.2, 8, device=CUDA)
    case.check(configs=configs_for(heads, 256), num_processors=132)


def test_rows_that_end_where_the_shared_run_ends():
    """They have no tokens of their own, so that nothing but the wide kernel reads keys for them."""
    paths = [[("system", 1024), (f"own {row}", row % 2 * 7)] for row in range(40)]
    case = Case(forest(paths, 16), LLAMA)
    case.check(configs=configs_for(LLAMA, 256), num_processors=132)


def test_fixed_chunks_make_a_row_independent_of_the_others_to_the_bit():
    lengths = [1300, 3000, 20, 999, 64]
    configs = configs_for(LLAMA, 256)
    crowd = Case(flat(lengths, 16), LLAMA)
    alone = Case(flat(lengths, 16), LLAMA)
    alone.forest = alone.forest._replace(tables=alone.forest.tables[1:2], lengths=alone.forest.lengths[1:2])
    alone.query, alone.tables = alone.query[1:2], alone.tables[1:2]
    options = {"configs": configs, "fixed_chunk": 512}
    assert torch.equal(crowd.run(**options, num_processors=132)[1], alone.run(**options, num_processors=132)[0])


def test_long_rows_keep_their_precision():
    case = Case(flat([131_072, 100_001], 16), LLAMA)
    case.check(configs=configs_for(LLAMA, 1), num_processors=132)


@pytest.mark.parametrize("num_sharing", [2, 40])
def test_blocks_at_the_top_of_a_large_pool(num_sharing):
    """Read by small tiles alone, and by wide ones and those beside them."""
    paths = [[("system", 1024), (str(row), 9 * row + 1)] for row in range(num_sharing)]
    case = Case(forest(paths, 16), LLAMA)
    case.move_to_top_of_pool(6 * 2**30 // (2 * 8 * 16 * 128 * 2))
    case.check(configs=configs_for(LLAMA, num_sharing), num_processors=132)


class Replayed:
    """A captured graph of `batch` rows of `heads`, replayed with plans sent to it."""

    def __init__(self, case: Case, *, with_wide: bool) -> None:
        heads, self.case, self.with_wide = case.heads, case, with_wide
        batch = len(case.query)
        configs = configs_for(heads, batch)
        self.planner = make_planner(
            configs,
            num_processors=132,
            max_rows=batch,
            max_context=8192,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            block_size=heads.block_size,
            cost=CostModel(),
        )
        self.plan = DevicePlan(self.planner.layout, configs, CUDA)
        self.workspace = DecodeWorkspace(self.planner.layout, heads.num_heads, heads.num_kv_heads, heads.head_dim, CUDA)
        self.out = torch.full_like(case.query, torch.nan)
        self.send(case.forest.tables, case.forest.lengths)
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self._launch()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._launch()

    def send(self, tables: np.ndarray, lengths: np.ndarray) -> None:
        num_padding = len(self.case.query) - len(lengths)
        self.plan.send(self.planner.plan(tables, lengths, num_padding=num_padding, with_wide=self.with_wide))

    def _launch(self) -> None:
        case = self.case
        forest_decode(
            case.query,
            case.key,
            case.value,
            case.tables,
            self.plan,
            self.workspace,
            scale=case.scale,
            out=self.out,
        )


@pytest.mark.parametrize("with_wide", [False, True])
def test_a_graph_serves_smaller_steps_and_touches_nothing_else(with_wide):
    paths = [[("system", 512), (str(row), 100 * row + 1)] for row in range(24)]
    case = Case(forest(paths, 16), LLAMA)
    replayed = Replayed(case, with_wide=with_wide)
    pool = case.pool.clone()
    for num_rows in (24, 3, 9, 1, 24):
        replayed.send(case.forest.tables[:num_rows], case.forest.lengths[:num_rows])
        case.tables[:num_rows] = torch.from_numpy(case.forest.tables[:num_rows]).cuda()
        case.tables[num_rows:] = 10**8  # poison
        replayed.out.fill_(torch.nan)
        replayed.graph.replay()
        smaller = Case(
            case.forest._replace(tables=case.forest.tables[:num_rows], lengths=case.forest.lengths[:num_rows]), LLAMA
        )
        smaller.query = case.query[:num_rows]
        assert_close(replayed.out[:num_rows], smaller.reference())
        assert not replayed.out[num_rows:].any()
        assert not replayed.workspace.arrivals.any()
    assert torch.equal(torch.nan_to_num(case.pool.double(), -1.0), torch.nan_to_num(pool.double(), -1.0))


def test_plans_sent_while_their_copies_are_late_arrive_in_order():
    """Five plans are queued behind a slow kernel; each must be the one its replay reads."""
    case = Case(flat([500, 900, 77, 1300], 16), LLAMA)
    replayed = Replayed(case, with_wide=False)
    steps = [np.array([500 - 16 * step, 900 - 5 * step, 77, 1300 - 300 * step]) for step in range(5)]
    results = []
    torch.cuda._sleep(50_000_000)
    for lengths in steps:
        replayed.send(case.forest.tables, lengths)
        replayed.graph.replay()
        results.append(replayed.out.clone())
    for lengths, result in zip(steps, results, strict=True):
        shorter = Case(case.forest, LLAMA)
        shorter.forest = case.forest._replace(lengths=lengths)
        assert_close(result, shorter.reference())
