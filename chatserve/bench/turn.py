"""First token of a next turn, by where the history's KV is: on the device, on the host, in a snapshot, or nowhere.

Drives the engine in this process, without sockets: what is measured is scheduling, swapping and the model. Random token
ids cost what real ones do. The cases are interleaved in one run, and their ratios are what counts. For the snapshot the
engine is ended and a new one made around the same model, whose first request this is; the file is in the system's
cache, as after any restart but the machine's.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chatserve.config import EngineSettings
from chatserve.engine.build import build_engine
from chatserve.engine.messages import Finished, Submit
from chatserve.model.catalog import pull, resolve
from chatserve.model.runner import build_runner
from chatserve.supervisor.paths import default_cache_dir
from chatserve.types import RequestId, SamplingParams, UserId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatserve.engine.engine import Engine
    from chatserve.engine.messages import PathRef

USER = UserId("bench")
CASES = ("gone", "snapshot", "host", "resident")


class Driver:
    """Runs one request at a time through an engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.count = 0

    def first_token(
        self, base: PathRef | None, token_ids: Sequence[int], num_output: int = 1
    ) -> tuple[float, Finished]:
        """Seconds until the first token, and how the request ended. `base` counts with the engine that gave it."""
        self.count += 1
        request_id = RequestId(str(self.count))
        num_tokens = len(token_ids) + (base.num_tokens if base else 0)
        start = time.perf_counter()
        self.engine.handle(
            Submit(
                request_id=request_id,
                user=USER,
                base=base,
                token_ids=tuple(token_ids),
                num_shared_tokens=0,
                num_prompt_tokens=num_tokens,
                sampling=SamplingParams(temperature=0.0, max_tokens=num_output, seed=0),
                stop_token_ids=(),
            )
        )
        first: float | None = None
        while True:
            output = self.engine.step()
            if output is None:  # a chunk of a prompt has nothing to say
                continue
            if output.deltas and first is None:
                first = time.perf_counter() - start
            for end in output.finished:
                assert first is not None, f"ended without a token: {end}"
                return first, end


def run(history: int = 2_000, new: int = 20, repeats: int = 5, model: str = "smollm2-135m") -> dict[str, Any]:
    """Median seconds to the first token of each case."""
    with tempfile.TemporaryDirectory() as directory:
        return _run(history, new, repeats, model, Path(directory))


def _run(history: int, new: int, repeats: int, model: str, snapshot: Path) -> dict[str, Any]:
    cache_dir = default_cache_dir()
    model_dir = resolve(model, cache_dir) or pull(model, cache_dir, lambda *_: None)
    block_size = 16
    blocks = -(-(history + 4 * new) // block_size) + 2
    settings = EngineSettings(
        model_dir=Path(model_dir),
        model_name=model,
        block_size=block_size,
        kv_cache_memory=f"{2 * blocks}blocks",
        host_cache_memory=f"{8 * blocks}blocks",
        kv_snapshot=snapshot,
    )
    runner = build_runner(settings)
    driver = Driver(build_engine(settings, runner))
    rng = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1_000, runner.vocab_size) for _ in range(count)]

    driver.first_token(None, tokens(new))
    times: dict[str, list[float]] = {name: [] for name in (*CASES, "save")}
    for _ in range(repeats):
        prompt = tokens(history + new)
        seconds, end = driver.first_token(None, prompt)
        times["gone"].append(seconds)
        seconds, _ = driver.first_token(end.path, tokens(new))
        times["resident"].append(seconds)
        for _ in range(2):  # push it out to the host
            driver.first_token(None, tokens(history))
        seconds, _ = driver.first_token(end.path, tokens(new))
        times["host"].append(seconds)
        start = time.perf_counter()
        driver.engine.save_snapshot()
        times["save"].append(time.perf_counter() - start)
        driver = Driver(build_engine(settings, runner))
        seconds, end = driver.first_token(None, [*prompt, *tokens(new)])
        times["snapshot"].append(seconds)
    return {
        "model": model,
        "device": str(runner.device),
        "history": history,
        "new": new,
        "seconds": {name: statistics.median(values) for name, values in times.items()},
        "all": times,
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="chatserve bench turn", description=__doc__)
    parser.add_argument("--history", type=int, default=2_000, help="tokens before the turn")
    parser.add_argument("--new", type=int, default=20, help="tokens of the turn")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args(argv)
    results = run(options.history, options.new, options.repeats, options.model)
    seconds = results["seconds"]
    print(f"{results['model']} on {results['device']}: {results['new']} new tokens on {results['history']:,}")
    for name in CASES:
        sooner = seconds["gone"] / seconds[name]
        print(f"  history {name:8}: first token after {seconds[name] * 1e3:8.1f} ms ({sooner:.1f} x)")
