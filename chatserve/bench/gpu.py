"""The GPU engine with a model's shape and random weights, through its client: decode steps, first tokens, prefill.

What is measured, and how, is what a script around another server would measure from outside: a decode step is the time
that 64 more tokens of every request take, prompts cached; a first token is timed from the submission to the token at
the client. `turn` has an engine of its own, whose pool holds four of ten histories. With `--rival-python` vLLM is
measured after it, in the same run, by its own client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chatserve.bench import _rival
from chatserve.bench._compile_ahead import compile_ahead
from chatserve.bench._engine_process import SHAPES, Driver, starting_engine
from chatserve.bench._gpu_sections import SECTIONS, Bench, work

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

TRACE_NAME = "trace.json"


async def run(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """All sections that were asked for. Engines start side by side and are measured one after the other."""
    results: dict[str, Any] = {"shape": options.shape}
    # Once steps have been recorded, launches cost more.
    sections: list[str] = sorted(options.sections.split(","), key=lambda section: section == "trace")
    if options.device == "cuda":
        start = time.perf_counter()
        await compile_ahead(options.shape, directory)
        print(f"kernels compiled after {time.perf_counter() - start:.1f} s", flush=True)

    async def measure(driver: Driver, names: Sequence[str]) -> None:
        bench = Bench(driver, options.repeats, options.scale)
        await driver.generate([driver.tokens(64)], 8)
        for name in names:
            start = time.perf_counter()
            print(f"{name}:", flush=True)
            section: Callable[[], Awaitable[Any]] = getattr(bench, name)
            results[name] = await section()
            print(f"  ({time.perf_counter() - start:.1f} s)", flush=True)

    wanted = _engines(options, sections)
    # Starts take longer than measurements, so engines that fit a GPU together start together.
    async with AsyncExitStack() as engines:
        begun = time.perf_counter()
        drives = [
            (name, await engines.enter_async_context(starting_engine(options.shape, directory / name, **settings)))
            for name, settings in wanted.items()
        ]
        drivers = [(name, await drive()) for name, drive in drives]
        print(f"ready after {time.perf_counter() - begun:.1f} s", flush=True)
        for name, driver in drivers:
            await measure(driver, [section for section in sections if _engine_of(section) == name])
    found = directory / "main" / TRACE_NAME
    if found.is_file():
        results["trace"] = json.loads(found.read_text())
        _print_trace(results["trace"])
    if options.rival_python is not None:
        asked = work(options.repeats, options.scale)
        theirs = await _rival.measure(options.rival_python, options.shape, asked, sections, directory)
        print(f"  {'':34} {'ours':>10} {'vLLM':>10} {'ratio':>7}", *_rival.comparison(results, theirs), sep="\n")
        results["vllm"] = theirs
    return results


def _engine_of(section: str) -> str:
    return "turn" if section in {"turn", "idle"} else "main"


def _engines(options: argparse.Namespace, sections: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Settings of the engines that the sections need."""
    common = {"device": options.device, "attention": options.attention}
    wide = {
        **common,
        "kv_cache_memory": options.kv_cache_memory,
        "host_cache_memory": "0",
        "context_tokens": 20480,
    }
    settings = {
        "turn": {
            **common,
            "kv_cache_memory": f"{int(2112 * options.scale) + 64 * (options.scale < 1)}blocks",
            "host_cache_memory": options.host_cache_memory,
            "max_running": 32,
            "context_tokens": 16384,
        },
        "main": {**wide, "module": "chatserve.bench._traced_engine"} if "trace" in sections else wide,
    }
    # While host memory is pinned, for some seconds after a start, launches wait now and then: `turn` comes last.
    return {name: settings[name] for name in ("main", "turn") if name in map(_engine_of, sections)}


def _print_trace(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        print(
            f"trace of {report['steps']} steps, {report['kind']}, {report['rows']} rows that decode, "
            f"{report['tokens']} tokens: {report['step_ms']:.2f} ms a step, "
            f"the device idle {100 * report['idle']:.1f} % of the time"
        )
        for kernel in report["kernels"]:
            print(f"  {kernel['us']:9.1f} us in {kernel['count']:6.1f}  {kernel['name'][:100]}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="chatserve bench gpu", description=__doc__)
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"some of {', '.join(SECTIONS)}")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--repeats", type=int, default=2, help="of which the best counts")
    parser.add_argument("--scale", type=float, default=1.0, help="of batches and contexts, to try the program itself")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--attention", default="auto")
    parser.add_argument(
        "--kv-cache-memory",
        default="35000blocks",
        help="as of `serve`, for all sections but `turn`; by default what the largest row of `decode` needs",
    )
    parser.add_argument("--host-cache-memory", default="16G", help="of the section `turn`")
    parser.add_argument(
        "--rival-python", type=Path, metavar="PATH", help="a Python that has vLLM, which is measured afterwards"
    )
    parser.add_argument("--json", type=Path, help="write all figures there")
    options = parser.parse_args(argv)
    unknown = set(options.sections.split(",")) - set(SECTIONS)
    if unknown:
        parser.error(f"unknown sections: {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    with tempfile.TemporaryDirectory(prefix="chatserve-bench-") as directory:
        results = asyncio.run(run(options, Path(directory)))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
