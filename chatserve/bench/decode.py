"""Decode and prefill speed of our runner against transformers' `generate`, in one run.

Both sides hold the same float32 weights and the same random prompts, and take turns, so that whatever else the machine
does falls on both: the ratios are what counts. Decode is timed a step, from token to token, without the prompt.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from chatserve.config import EngineSettings
from chatserve.model import catalog
from chatserve.model.runner import build_runner
from chatserve.sched.plan import Admitted, Row, StepPlan, Transfers
from chatserve.supervisor.paths import default_cache_dir
from chatserve.types import BlockId, RequestId, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from chatserve.model.runner import ModelRunner

_CHUNK = 512
"""Prompt tokens a step, as the engine's default on a CPU."""


class _Clock(StoppingCriteria):
    """Notes when each token of `generate` is there; never stops it."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, _scores: torch.Tensor, **_kwargs: Any) -> torch.Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def time_generate(model: Any, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[float, list[float]]:
    """Seconds to the first token, and of each later step, of transformers' `generate` on a batch."""
    clock = _Clock()
    ids = torch.tensor([list(prompt) for prompt in prompts], device=model.device)
    start = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=num_tokens,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    return clock.times[0] - start, _differences(clock.times)


def time_runner(runner: ModelRunner, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[float, list[float]]:
    """The same of our runner, with prompts in chunks and blocks in random order."""
    block_size = runner.storage.shape.block_size
    blocks = [BlockId(block) for block in range(runner.num_blocks)]
    random.Random(0).shuffle(blocks)
    greedy = SamplingParams(temperature=0.0, seed=0)
    admitted = []
    for index, prompt in enumerate(prompts):
        count = -(-(len(prompt) + num_tokens) // block_size)
        taken, blocks = blocks[:count], blocks[count:]
        admitted.append(Admitted(RequestId(str(index)), tuple(prompt), len(prompt), 0, tuple(taken), greedy))
    times = []
    start = time.perf_counter()
    new = tuple(admitted)
    for each in admitted:
        length = len(each.token_ids)
        for done in range(0, length, _CHUNK):
            count = min(_CHUNK, length - done)
            row = Row(each.request_id, done, count, (), sample=done + count == length)
            runner.launch(StepPlan(0, (), Transfers(), new, (row,))).wait()
            new = ()
    times.append(time.perf_counter())
    for step in range(num_tokens - 1):
        rows = tuple(Row(each.request_id, len(each.token_ids) + step, 1, (), sample=True) for each in admitted)
        runner.launch(StepPlan(0, (), Transfers(), (), rows)).wait()
        times.append(time.perf_counter())
    runner.launch(StepPlan(0, tuple(each.request_id for each in admitted), Transfers(), (), ())).wait()
    return times[0] - start, _differences(times)


def run(
    num_tokens: int = 32,
    context: int = 128,
    long_prompt: int = 2000,
    rounds: int = 3,
    batches: Sequence[int] = (1, 16),
    model: str = catalog.DEFAULT_MODEL,
    impl: str = "auto",
    device: str = "cpu",
    cache_dir: Path | None = None,
) -> dict[str, Any]:
    """Tokens a second of both sides and their ratios, medians over all steps of all rounds."""
    directory = catalog.pull(model, cache_dir or default_cache_dir())
    longest = max([long_prompt, *(batch * (context + num_tokens) for batch in batches)])
    runner = build_runner(
        EngineSettings(
            model_dir=directory,
            model_name=model,
            device=device,
            model_impl=impl,
            kv_cache_memory=f"{longest // 16 + 64}blocks",
            host_cache_memory="0",
        )
    )
    dtype = runner.storage.device_pool.dtype
    theirs: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)
    theirs = theirs.eval().to(runner.device)
    theirs.generation_config.eos_token_id = None
    rng = random.Random(0)

    def prompts(count: int, length: int) -> list[list[int]]:
        return [[rng.randrange(runner.vocab_size) for _ in range(length)] for _ in range(count)]

    rows = []
    for batch in batches:
        given = prompts(batch, context)
        ours: list[float] = []
        other: list[float] = []
        for _ in range(rounds):
            ours += time_runner(runner, given, num_tokens)[1]
            other += time_generate(theirs, given, num_tokens)[1]
        rows.append(_row(f"decode, {batch} session{'s' * (batch > 1)}, context {context}", batch, ours, other))
    if long_prompt:
        given = prompts(1, long_prompt)
        ours, other = [], []
        for _ in range(rounds):
            ours.append(time_runner(runner, given, 1)[0])
            other.append(time_generate(theirs, given, 1)[0])
        rows.append(_row(f"prompt of {long_prompt}", long_prompt, ours, other))
    return {
        "model": model,
        "device": str(runner.device),
        "impl": runner.model.info.impl,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "rows": rows,
    }


def _row(what: str, tokens: int, ours: Sequence[float], other: Sequence[float]) -> dict[str, Any]:
    mine, theirs = statistics.median(ours), statistics.median(other)
    return {
        "what": what,
        "ours_tokens_per_s": tokens / mine,
        "transformers_tokens_per_s": tokens / theirs,
        "ratio": theirs / mine,
        "ours_best_ms": min(ours) * 1e3,
        "transformers_best_ms": min(other) * 1e3,
    }


def _differences(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="chatserve bench decode", description=__doc__)
    parser.add_argument("--tokens", type=int, default=32, help="tokens generated a text")
    parser.add_argument("--context", type=int, default=128, help="tokens before them")
    parser.add_argument("--long-prompt", type=int, default=2000, help="tokens of the prefill row; 0: none")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default=catalog.DEFAULT_MODEL)
    parser.add_argument("--impl", default="auto", choices=("auto", "llama", "hf"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args(argv)
    results = run(
        options.tokens,
        options.context,
        options.long_prompt,
        options.rounds,
        model=options.model,
        impl=options.impl,
        device=options.device,
    )
    if options.json:
        print(json.dumps(results, indent=2))
        return 0
    print(
        f"{results['model']} ({results['impl']}) on {results['device']}, {results['threads']} threads, "
        f"torch {results['torch']}; tokens/s"
    )
    print(f"  {'':38} {'ours':>8} {'transformers':>13} {'ratio':>6}")
    for row in results["rows"]:
        print(
            f"  {row['what']:38} {row['ours_tokens_per_s']:8.1f} {row['transformers_tokens_per_s']:13.1f} "
            f"{row['ratio']:6.2f}"
        )
    return 0
