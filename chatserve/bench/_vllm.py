"""vLLM, measured as `gpu` measures our engine: a script for a Python that has vLLM, and needs nothing of this package.

`python _vllm.py WORK RESULTS`: `WORK` is a JSON file with what `gpu` asks for, `RESULTS` gets the figures under
our names, section by section, so that an early end loses only what came after. It was written against vLLM 0.26.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would be compiled first
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


class Rival:
    """One vLLM engine, and the sections of `gpu` that it can be asked for."""

    def __init__(self, work: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams  # type: ignore[import-not-found]  # noqa: PLC0415 - after the environment is set

        self._work = work
        self._sampling = SamplingParams
        self._rng = random.Random(0)
        self._vocab_size = work["config"]["vocab_size"]
        self._prompts: list[list[int]] = []
        self._llm = LLM(
            skip_tokenizer_init=True,
            load_format="dummy",
            enable_prefix_caching=True,
            disable_log_stats=True,
            **work["engine"],
        )
        self._generate([self._tokens(64)], 8)

    def _tokens(self, count: int) -> list[int]:
        return self._rng.choices(range(self._vocab_size // 128, self._vocab_size - self._vocab_size // 16), k=count)

    def _some(self, batch: int, length: int) -> list[list[int]]:
        while len(self._prompts) < batch:
            self._prompts.append([])
        for prompt in self._prompts[:batch]:
            prompt.extend(self._tokens(length - len(prompt)) if len(prompt) < length else ())
        return [prompt[:length] for prompt in self._prompts[:batch]]

    def _params(self, num_output: int, **fields: Any) -> Any:
        return self._sampling(
            max_tokens=num_output, ignore_eos=True, detokenize=False, **({"temperature": 0.0} | fields)
        )

    def _generate(self, prompts: list[list[int]], num_output: int, **fields: Any) -> float:
        """Seconds."""
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        start = time.perf_counter()
        self._llm.generate(asked, self._params(num_output, **fields), use_tqdm=False)
        return time.perf_counter() - start

    def _step_ms(self, prompts: list[list[int]], **fields: Any) -> float:
        steps: int = self._work["steps"]
        repeats: int = self._work["repeats"]
        self._generate(prompts, 1, **fields)
        first = min(self._generate(prompts, 1, **fields) for _ in range(repeats))
        all_s = min(self._generate(prompts, 1 + steps, **fields) for _ in range(repeats))
        return (all_s - first) / steps * 1e3

    def decode(self) -> list[dict[str, Any]]:
        return [
            {"batch": batch, "context": context, "step_ms": self._step_ms(self._some(batch, context))}
            for batch, context in self._work["decode"]
        ]

    def shared(self) -> list[dict[str, Any]]:
        rows = []
        for batch, shared, own in self._work["shared"]:
            prefix = self._tokens(shared)
            step_ms = self._step_ms([prefix + self._tokens(own) for _ in range(batch)])
            rows.append({"batch": batch, "shared": shared, "own": own, "step_ms": step_ms})
        return rows

    def sampling(self) -> dict[str, float]:
        prompts = self._some(*self._work["sampling"])
        drawn = {"temperature": 0.8, "top_p": 0.95, "seed": 1}
        return {"greedy_ms": self._step_ms(prompts), "drawn_ms": self._step_ms(prompts, **drawn)}

    def prefill(self) -> dict[str, float]:
        (batch, length), alone = self._work["prefill"]
        repeats = range(self._work["repeats"])
        seconds = min(self._generate([self._tokens(length) for _ in range(batch)], 1) for _ in repeats)
        cold = min(self._generate([self._tokens(alone)], 1) for _ in repeats)
        return {"tokens_s": batch * length / seconds, "cold_8192_ms": cold * 1e3}

    def mixed(self) -> dict[str, float]:
        """As `Bench.mixed`: tokens are timed where the engine's front end hands them to its caller."""
        from vllm.sampling_params import RequestOutputKind  # type: ignore[import-not-found]  # noqa: PLC0415

        batch, context, length, seconds = self._work["mixed"]
        engine, count = self._llm.llm_engine, itertools.count()
        times: dict[str, list[float]] = {}
        begun: dict[str, float] = {}

        def add(prompt: list[int], num_output: int) -> str:
            name = f"mixed{next(count)}"
            times[name], begun[name] = [], time.perf_counter()
            engine.add_request(
                name,
                {"prompt_token_ids": prompt},
                self._params(num_output, output_kind=RequestOutputKind.DELTA),
            )
            return name

        def step() -> None:
            for output in engine.step():
                now = time.perf_counter()
                times[output.request_id].extend([now] * len(output.outputs[0].token_ids))

        def waits(names: list[str], start: float, end: float) -> list[float]:
            return [
                (b - a) * 1e3 for name in names for a, b in itertools.pairwise(times[name]) if start <= a and b <= end
            ]

        prompts = self._some(batch, context)
        self._generate(prompts, 1)
        alone = [add(prompt, 1 + 2 * self._work["steps"]) for prompt in prompts]
        while engine.has_unfinished_requests():
            step()
        unmixed = statistics.median(waits(alone, 0.0, float("inf")))
        running = [add(prompt, int(seconds * 1e3 / unmixed * 0.8)) for prompt in prompts]
        while not all(times[name] for name in running):
            step()
        start = time.perf_counter()
        arrivals: list[str] = []
        while engine.has_unfinished_requests():
            if len(arrivals) < seconds and time.perf_counter() >= start + len(arrivals):
                arrivals.append(add(self._tokens(length), 1))
            step()
        between = sorted(waits(running, start, start + seconds))
        return {
            "unmixed_median_ms": unmixed,
            "median_ms": statistics.median(between),
            "p99_ms": between[min(len(between) - 1, int(0.99 * len(between)))],
            "longest_ms": between[-1],
            "first_token_ms": max((times[name][0] - begun[name]) * 1e3 for name in arrivals),
        }

    def turn(self) -> dict[str, float]:
        length, new = self._work["turn"]
        sessions = [self._tokens(length) for _ in range(10)]

        def first_ms(prompt: list[int]) -> float:
            return self._generate([prompt], 1) * 1e3

        cold = [first_ms(session) for session in sessions]
        time.sleep(1.0)  # for what is written to the host
        resident = [first_ms(sessions[9] + self._tokens(new)) for _ in range(5)]
        host = [first_ms(session + self._tokens(new)) for session in sessions[:6]]
        gone = [first_ms(self._tokens(length + new)) for _ in range(3)]
        named = {"resident": resident, "host": host, "gone": gone, "cold": cold}
        return {name: statistics.median(values) for name, values in named.items()}


def main(work_path: Path, results_path: Path) -> None:
    work = json.loads(work_path.read_text())
    model = work_path.parent / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(work["config"]))
    work["engine"]["model"] = str(model)
    started = time.perf_counter()
    rival = Rival(work)
    print(f"  vLLM is ready after {time.perf_counter() - started:.0f} s", flush=True)
    results: dict[str, Any] = {}
    for section in work["sections"]:
        results[section] = getattr(rival, section)()
        results_path.write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
