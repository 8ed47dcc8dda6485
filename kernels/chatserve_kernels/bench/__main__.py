"""`python -m chatserve_kernels.bench`: the tables of kernels/README.md, on this machine.

Prints each row as it is measured, and writes all of them to `--json`. Rivals that are not installed are left out.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import torch

from chatserve_kernels.bench import fused, sampling, swap, workloads
from chatserve_kernels.bench.decode import FlashInfer, Ours, copy_bandwidth, free, plan_us
from chatserve_kernels.bench.workloads import Workload

POOL_BYTES = 72 * 10**9
MOST_BLOCKS = 65_536
"""The largest rows' blocks; such a row is measured on a pool of half as many layers."""
TABLES = {
    "flat": workloads.FLAT,
    "shared": workloads.SHARED,
    "levels": workloads.LEVELS,
    "uneven": workloads.UNEVEN,
    "break-even": workloads.BREAK_EVEN,
}
OTHER_TABLES = ("fused", "sampling", "swap")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", nargs="*", choices=[*TABLES, *OTHER_TABLES], default=[*TABLES, *OTHER_TABLES])
    parser.add_argument("--json", type=Path, help="where to write the measurements")
    parser.add_argument("--rep", type=int, default=100, help="milliseconds a measurement")
    parser.add_argument("--no-rivals", action="store_true")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("expected a CUDA device")
    ceiling = copy_bandwidth()
    free()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; copy {ceiling / 1e12:.2f} TB/s")
    rows: list[dict[str, object]] = []
    if "fused" in chosen.tables:
        rows += _fused(ceiling, chosen.rep)
    if "sampling" in chosen.tables:
        rows += _with_rates([*sampling.measure(256, chosen.rep), *sampling.measure(1, chosen.rep)], ceiling)
    if "swap" in chosen.tables:
        for row in swap.measure():
            _print(row)
            rows.append(row)
        free()
    tables = [table for table in TABLES if table in chosen.tables]
    if tables:
        rows += _ours(tables, ceiling, chosen.rep)
        if not chosen.no_rivals and FlashInfer.is_installed():
            _rivals(rows, tables, chosen.rep)
    _summary(rows)
    if chosen.json:
        report = {"device": torch.cuda.get_device_name(), "copy_bytes_per_s": ceiling, "rows": rows}
        chosen.json.write_text(json.dumps(report, indent=1))


def _fused(ceiling: float, rep: int) -> list[dict[str, object]]:
    return _with_rates([*fused.measure(4096, rep), *fused.measure(64, rep), fused.measure_block_copy(rep)], ceiling)


def _with_rates(rows: list[dict[str, object]], ceiling: float) -> list[dict[str, object]]:
    for row in rows:
        per_s = float(str(row["bytes"])) / float(str(row["us"])) * 1e6
        row |= {"tb_per_s": per_s / 1e12, "of_copy": per_s / ceiling}
        _print(row)
    free()
    return rows


def _named(tables: list[str]) -> list[tuple[str, Workload]]:
    return [(table, work) for table in tables for work in TABLES[table]]


def _label(work: Workload) -> str:
    own = f"{work.own[0]}" if len(set(work.own)) == 1 else f"{work.own[0]}, {work.batch - 1} x {work.own[1]}"
    return f"{work.batch} x ({' + '.join([*(f'{t} in {n}' for t, n in work.levels), own])})"


def _ours(tables: list[str], ceiling: float, rep: int) -> list[dict[str, object]]:
    rows = []
    for num_layers in (32, 16):
        ours = Ours(POOL_BYTES if num_layers == 32 else MOST_BLOCKS * 2**20, num_layers)
        for table, work in _named(tables):
            if (work.num_blocks > 33_000) != (num_layers == 16):
                continue
            us, host_us = ours.decode_us(work, rep=rep)
            row: dict[str, object] = {"table": table, "work": _label(work), "us": us, "plan_us": host_us}
            row["forest_plan_us"] = plan_us(work, same_rows=False)
            row["tb_per_s"] = work.unique_bytes / us / 1e6
            row["of_copy"] = work.unique_bytes / us * 1e6 / ceiling
            if work.levels:
                row["unshared_us"], _ = ours.decode_us(work, share=False, rep=rep)
            rows.append(row)
            _print(row)
        del ours
        free()
    return rows


def _rivals(rows: list[dict[str, object]], tables: list[str], rep: int) -> None:
    rival = FlashInfer(MOST_BLOCKS)
    print(f"FlashInfer {rival.version}")
    by_name = {(row["table"], row["work"]): row for row in rows}
    for table, work in _named(tables):
        if table == "break-even":
            continue
        row = by_name[table, _label(work)]
        times = [rival.flat_us(work, rep)]
        row["flashinfer_us"] = times[0]
        if work.levels:
            times.append(rival.cascade_us(work, rep))
            row["flashinfer_cascade_us"] = times[1]
        us = row["us"]
        assert isinstance(us, float)
        row["speedup"] = min(times) / us
        _print(row)


def _print(row: dict[str, object]) -> None:
    print(
        "  ".join(f"{name} {value:.3g}" if isinstance(value, float) else f"{value}" for name, value in row.items()),
        flush=True,
    )


def _summary(rows: list[dict[str, object]]) -> None:
    ratios = [1 / float(str(row["speedup"])) for row in rows if row["table"] == "flat" and "speedup" in row]
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"flat: time over FlashInfer's, geometric mean {mean:.3f}, worst {max(ratios):.3f}")
    uneven = [float(str(row["us"])) for row in rows if row["table"] == "uneven"]
    if len(uneven) == 2:
        print(f"uneven over even: {uneven[0] / uneven[1]:.2f}")
    costs = [float(str(row["us"])) / float(str(row["unshared_us"])) for row in rows if row["table"] == "break-even"]
    if costs:
        print(f"sharing on over off where it hardly pays: worst {max(costs):.3f}")


if __name__ == "__main__":
    main()
