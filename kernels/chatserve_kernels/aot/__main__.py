r"""`python -m chatserve_kernels.aot`: compile what can be launched, and print what each binary needs. Needs no GPU.

By default every pair of values of two options stands together in some binary. `--cover all` makes the whole product,
which is for a few values only:

    python -m chatserve_kernels.aot --cover all --only attention --where elements="bfloat16 as queries" head_dim=128 \
        group=4 kv_heads=8 block_size=16
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from chatserve_kernels.aot.build import COVERS, Member, Usage, build_all, members


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cover", choices=[*COVERS], default="pairs", help="how much of the product of all options")
    parser.add_argument("--only", nargs="*", default=[], metavar="FAMILY", help="of calls; see --list")
    parser.add_argument("--where", nargs="*", default=[], metavar="OPTION=VALUE,...", help="only these values of it")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path, help="where to write the results")
    parser.add_argument("--list", action="store_true", help="print what would be compiled")
    parser.add_argument("--quiet", action="store_true", help="print the last line alone")
    chosen = parser.parse_args()
    if chosen.processes < 1:
        parser.error(f"expected at least 1 process, got {chosen.processes}")
    try:
        where = dict(_option(text) for text in chosen.where)
        found = members(chosen.cover, where, chosen.only)
    except ValueError as error:
        parser.error(str(error))
    if chosen.list:
        print(*(member.label for member in found), sep="\n")
        _write(chosen.json, [_row(member) for member in found])
        return
    started = time.monotonic()
    rows: list[dict[str, object]] = []
    failed = 0
    for member, usage in build_all(found, chosen.processes):
        if isinstance(usage, str):
            failed += 1
            print(f"failed: {member.label}: {usage}", file=sys.stderr, flush=True)
            continue
        rows.append(_row(member) | usage._asdict())
        if not chosen.quiet:
            print(_line(member, usage), flush=True)
    _write(chosen.json, rows)
    seconds, spilling = time.monotonic() - started, sum(bool(row["stack_bytes"]) for row in rows)
    print(f"{len(rows)} compiled in {seconds:.0f} s by {chosen.processes} processes, {spilling} spill; {failed} failed")
    sys.exit(1 if failed else 0)


def _row(member: Member) -> dict[str, object]:
    return {
        "label": member.label,
        "family": member.family,
        "options": member.choice,
        "kernel": member.specialisation.name,
        "arch": member.specialisation.target.arch,
        "constants": member.specialisation.constant_values,
    }


def _write(path: Path | None, rows: list[dict[str, object]]) -> None:
    if path:
        path.write_text(json.dumps(rows, indent=1))


def _option(text: str) -> tuple[str, list[str]]:
    name, equals, values = text.partition("=")
    if not equals:
        raise ValueError(f"expected OPTION=VALUE, got {text}")
    return name, values.split(",")


def _line(member: Member, usage: Usage) -> str:
    spilled = f"{usage.stack_bytes:4} B stack" if usage.stack_bytes else "            "
    return f"{usage.registers:3} registers  {usage.shared_bytes / 1024:5.1f} KiB  {spilled}  {member.label}"


if __name__ == "__main__":
    main()
