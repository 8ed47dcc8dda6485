"""Users who chat while everything is killed, stopped and cut off; then every acknowledged word is looked for.

Starts the whole program with an append-only store, lets simulated users send, branch, edit, regenerate, stop, fork,
delete and reconnect, each by a seed of its own, and meanwhile kills, stops and cuts what there is, by another. At the
end every acknowledged message must be there once, every streamed text equal the stored one, no client may have seen a
gap or a repeat, and nothing may be left over: no request, block, task, process or key.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from chatserve.bench.chaos.report import show
from chatserve.bench.chaos.run import ChaosRun, Plan
from chatserve.bench.chaos.tiny_model import make_tiny_model
from chatserve.supervisor.paths import default_cache_dir

TINY: Final = "tiny"


def main(argv: list[str]) -> int:
    """Exit code 1 where a promise was broken."""
    parser = argparse.ArgumentParser(prog="chatserve bench chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="how long things go wrong")
    parser.add_argument("--min-kills", type=int, default=0, help="go on until so many processes were killed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--users", type=int, default=50)
    parser.add_argument("--servers", type=int, default=1, help="more than one share a store")
    parser.add_argument(
        "--serve", action="append", default=[], metavar="NAME=VALUE", help="an option of chatserve serve (repeatable)"
    )
    parser.add_argument("--every", type=float, default=4.0, metavar="S", help="seconds between two faults, on average")
    parser.add_argument("--pause", type=float, default=1.0, metavar="S", help="seconds between a user's actions")
    parser.add_argument(
        "--model", default=TINY, help="tiny is a random one that starts quickly; else as for chatserve serve"
    )
    parser.add_argument("--directory", type=Path, help="keep data and logs here, in an empty directory")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there too")
    options = parser.parse_args(argv)
    if options.directory is None:
        with tempfile.TemporaryDirectory(prefix="chatserve-chaos-") as made:
            return _run(options, Path(made))
    options.directory.mkdir(parents=True, exist_ok=True)
    return _run(options, options.directory.absolute())


def _run(options: argparse.Namespace, directory: Path) -> int:
    model = options.model
    if model == TINY:
        model = str(make_tiny_model(directory / "tiny-model", default_cache_dir()))
    plan = Plan(
        directory=directory,
        model=model,
        minutes=options.minutes,
        min_kills=options.min_kills,
        seed=options.seed,
        num_users=options.users,
        every_s=options.every,
        pause_s=options.pause,
        num_servers=options.servers,
        options=dict(each.partition("=")[::2] for each in options.serve),
    )
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - started:7.1f} s  {line}", file=sys.stderr, flush=True)

    outcome = asyncio.run(ChaosRun(plan, say).run())
    if options.json is not None:
        figures = {"seed": plan.seed, "users": plan.num_users, "minutes": plan.minutes, "problems": outcome.problems}
        options.json.write_text(json.dumps({**figures, **outcome.tally.summary()}, indent=2) + "\n")
    show(outcome)
    return int(bool(outcome.problems))
