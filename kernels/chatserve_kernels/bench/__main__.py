"""`python -m chatserve_kernels.bench`: the tables of kernels/README.md, on this machine's GPU.

Prints each row as it is measured, and writes all of them to `--json` and `--plot`. Rivals that may have to be compiled
come after all tables; those that are not installed are left out. They are compiled beforehand, all at once, by

    python -m chatserve_kernels.bench --prepare --rival-cache DIRECTORY

and found by the runs that name the same directory. To add a table, register a function (`tables.table`) in a module
that is imported here.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from chatserve_kernels.bench import decode, fused, prefill, rivals, sampling, swap  # noqa: F401 - most register tables
from chatserve_kernels.bench.plot import svg
from chatserve_kernels.bench.tables import TABLES, Bench, Ceilings, Row, free

if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="*", choices=[*TABLES], default=[*TABLES])
    parser.add_argument("--json", type=Path, help="where to write the measurements")
    parser.add_argument("--plot", type=Path, help="where to write a plot of them, SVG")
    parser.add_argument("--milliseconds", type=int, default=Bench().milliseconds, help="a measurement")
    parser.add_argument("--no-rivals", action="store_true")
    parser.add_argument("--rival-cache", type=Path, metavar="DIRECTORY", help="where compiled rivals are kept")
    parser.add_argument("--prepare", action="store_true", help="compile the rivals, and measure nothing")
    parser.add_argument("--prepare-one", choices=rivals.NAMES, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("expected a CUDA device")
    if chosen.rival_cache:
        os.environ[rivals.CACHE_VARIABLE] = str(chosen.rival_cache.resolve())  # read when FlashInfer is imported
    if chosen.prepare_one:
        rivals.compile_one(chosen.prepare_one)
        return
    if chosen.prepare:
        if not rivals.is_installed():
            parser.error("expected FlashInfer to be installed")
        failed = rivals.prepare(chosen.rival_cache and chosen.rival_cache.resolve())
        sys.exit(f"failed: {', '.join(failed)}" if failed else 0)
    ceilings = Ceilings.measured()
    title = (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copy {ceilings.copy_bytes_per_s / 1e12:.2f} TB/s, "
        f"matrix product {ceilings.matrix_flops_per_s / 1e12:.0f} TFLOP/s"
    )
    print(title, flush=True)
    bench = Bench(chosen.milliseconds, with_rivals=not chosen.no_rivals)
    rows: list[Row] = []
    failed = []

    def write() -> None:
        """After each table, so that a run that is cut short leaves what it has measured."""
        if chosen.json:
            chosen.json.write_text(json.dumps(report(rows, ceilings), indent=1))
        if chosen.plot:
            chosen.plot.write_text(svg(rows, title))

    for name in chosen.tables:
        try:
            for row in TABLES[name](bench):
                print(row.line(ceilings), flush=True)
                rows.append(row)
        except Exception:  # noqa: BLE001 - the other tables can still be measured
            traceback.print_exc()
            failed.append(name)
            free()
        write()

    def said(row: Row) -> None:
        print(row.line(ceilings), flush=True)
        write()

    failed += measure_rivals(rows, said)
    for line in summary(rows):
        print(line)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def measure_rivals(rows: list[Row], said: Callable[[Row], object]) -> list[str]:
    """Measure what rows are yet to be compared with, one rival on all rows before the next, so that none waits for the
    compilation of another; `said` is told of each row. Returns which rivals failed, and are left there."""
    failed = []
    for name in dict.fromkeys(name for row in rows for name in row.compare):
        print(f"{name}, which may have to be compiled:", flush=True)
        try:
            for row in rows:
                if name in row.compare:
                    row.rivals[name] = row.compare[name]()
                    said(row)
        except Exception:  # noqa: BLE001 - ours are measured, and the other rivals can be
            traceback.print_exc()
            failed.append(name)
    return failed


def report(rows: list[Row], ceilings: Ceilings) -> dict[str, object]:
    """What `--json` holds."""
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "copy_bytes_per_s": ceilings.copy_bytes_per_s,
        "matrix_flops_per_s": ceilings.matrix_flops_per_s,
        "rows": [row.as_json(ceilings) for row in rows],
    }


def summary(rows: list[Row]) -> list[str]:
    """What the goals are set on."""
    lines = []
    ratios = [row.us / min(row.rivals.values()) for row in rows if row.table == "flat" and row.rivals]
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        lines.append(f"flat: time over FlashInfer's, geometric mean {mean:.3f}, worst {max(ratios):.3f}")
    uneven = [row.us for row in rows if row.table == "uneven"]
    if len(uneven) == 2:
        lines.append(f"uneven over even: {uneven[0] / uneven[1]:.2f}")
    costs = [row.us / row.more["not shared us"] for row in rows if "not shared us" in row.more]
    if costs:
        lines.append(f"sharing on over off: at worst {max(costs):.3f}")
    return lines


if __name__ == "__main__":
    main()
