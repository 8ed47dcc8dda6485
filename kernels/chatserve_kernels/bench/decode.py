"""Decode attention, one layer: this package's kernels as replayed graphs, and which rivals do the same (`rivals`)."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch

from chatserve_kernels.bench import rivals, workloads
from chatserve_kernels.bench.tables import DTYPE, Bench, Row, free, table
from chatserve_kernels.bench.workloads import BLOCK, HEAD_DIM, HEADS, KV_HEADS, TOKEN_BYTES, Workload
from chatserve_kernels.configs import default_configs
from chatserve_kernels.device_plan import DecodeConfigs, DevicePlan, make_planner
from chatserve_kernels.forest import CostModel
from chatserve_kernels.forest_decode import DecodeWorkspace, forest_decode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

POOL_BYTES = 72 * 10**9
MOST_BLOCKS = 65_536
"""The largest rows' blocks; a row of more than half as many is measured on a pool of half as many layers."""


@table("flat")
def flat(bench: Bench) -> Iterator[Row]:
    return _decode(bench, "flat", workloads.FLAT)


@table("shared")
def shared(bench: Bench) -> Iterator[Row]:
    return _decode(bench, "shared", workloads.SHARED)


@table("levels")
def levels(bench: Bench) -> Iterator[Row]:
    return _decode(bench, "levels", workloads.LEVELS)


@table("uneven")
def uneven(bench: Bench) -> Iterator[Row]:
    return _decode(bench, "uneven", workloads.UNEVEN)


@table("break-even")
def break_even(bench: Bench) -> Iterator[Row]:
    """Sharing on and off where it hardly pays."""
    return _decode(Bench(bench.milliseconds, with_rivals=False), "break-even", workloads.BREAK_EVEN)


@table("plan")
def plan(bench: Bench) -> Iterator[Row]:
    """Host time of a step's plan: the forest found anew, and the rows of the step before."""
    del bench
    for work in (*workloads.SHARED[1:], workloads.even(256, 1024), workloads.even(256, 8192), *workloads.LEVELS):
        same_us = plan_us(work, same_rows=True)
        yield Row("plan", work.label, plan_us(work, same_rows=False), more={"same rows us": same_us})


def _decode(bench: Bench, name: str, works: Sequence[Workload]) -> Iterator[Row]:
    for num_layers in (32, 16):
        chosen = [work for work in works if (work.num_blocks > MOST_BLOCKS // 2) == (num_layers == 16)]
        if not chosen:
            continue
        ours = Ours(POOL_BYTES if num_layers == 32 else MOST_BLOCKS * 2**20, num_layers)
        for work in chosen:
            us, host_us = ours.decode_us(bench, work)
            row = Row(name, work.label, us, bytes=work.unique_bytes, flops=work.flops, more={"plan us": host_us})
            if work.levels:
                row.more["not shared us"], _ = ours.decode_us(bench, work, share=False)
            if bench.with_rivals:
                row.compare = rivals.of(bench, work, MOST_BLOCKS)
            yield row
        del ours
        free()


class Ours:
    """A block-major pool of `num_layers` layers, one of which is read."""

    def __init__(self, pool_bytes: int, num_layers: int) -> None:
        self.num_blocks = pool_bytes // (num_layers * BLOCK * TOKEN_BYTES)
        shape = (self.num_blocks, num_layers, 2, KV_HEADS, BLOCK, HEAD_DIM)
        self.pool = torch.empty(shape, device="cuda", dtype=DTYPE)
        # Only the layer that is read: filling all of it would take longer than the measurements.
        self.layer = self.pool[:, num_layers // 2]
        self.layer.normal_()
        self.processors = torch.cuda.get_device_properties(0).multi_processor_count

    def decode_us(
        self, bench: Bench, work: Workload, *, share: bool = True, configs: DecodeConfigs | None = None
    ) -> tuple[float, float]:
        """Time of the attention, and of a plan when the rows are those of the step before, in microseconds."""
        configs = configs or default_configs(HEAD_DIM, is_half=True, max_rows=work.batch)
        planner = make_planner(
            configs,
            num_processors=self.processors,
            max_rows=work.batch,
            max_context=int(work.lengths.max()),
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            block_size=BLOCK,
            cost=CostModel.measured(TOKEN_BYTES),
            share=share,
        )
        tables = work.tables(self.num_blocks)
        planner.plan(tables, work.lengths)
        plan = planner.plan(tables, work.lengths, same_rows=True)
        plan_us = _plan_us(lambda: planner.plan(tables, work.lengths, same_rows=True))
        device = DevicePlan(planner.layout, configs, torch.device("cuda"))
        device.send(plan)
        workspace = DecodeWorkspace(planner.layout, HEADS, KV_HEADS, HEAD_DIM, torch.device("cuda"))
        query = torch.randn(work.batch, HEADS, HEAD_DIM, device="cuda", dtype=DTYPE)
        out = torch.empty_like(query)
        on_device = torch.from_numpy(tables).cuda()
        us = bench.us(
            lambda: forest_decode(
                query,
                self.layer[:, 0],
                self.layer[:, 1],
                on_device,
                device,
                workspace,
                scale=HEAD_DIM**-0.5,
                out=out,
            )
        )
        return us, plan_us


def plan_us(work: Workload, *, same_rows: bool) -> float:
    """Host time of one plan on a machine with 132 multiprocessors; needs no GPU."""
    planner = make_planner(
        default_configs(HEAD_DIM, is_half=True, max_rows=work.batch),
        num_processors=132,
        max_rows=work.batch,
        max_context=int(work.lengths.max()),
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        block_size=BLOCK,
        cost=CostModel.measured(TOKEN_BYTES),
    )
    tables = work.tables(work.num_blocks)
    planner.plan(tables, work.lengths)
    return _plan_us(lambda: planner.plan(tables, work.lengths, same_rows=same_rows))


def _plan_us(fn: Callable[[], object]) -> float:
    times = []
    for _ in range(50):
        start = time.perf_counter()
        fn()
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e6
