"""Greedy text of our runner against transformers' own `generate`, token by token.

The rule: two texts are equal, or their first difference is a near tie, where the oracle's two best scores lie within
1e-3 of each other (batch shapes round differently). Near ties are counted; more than 1 % of texts, or any other
difference, fails.
"""

from __future__ import annotations

import argparse
import enum
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

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

NEAR_TIE = 1e-3
MAX_NEAR_TIES = 0.01
_TOPICS = (
    "the tides", "bread", "the city of Lisbon", "prime numbers", "a thunderstorm", "the human heart", "chess",
    "volcanoes", "the violin", "compilers",
)  # fmt: skip
_QUESTIONS = (
    "Explain {} in one sentence.",
    "Write two lines of verse about {}.",
    "What should a child know about {}?",
    "List three facts about {}.",
    "Why would anybody care about {}? Answer briefly.",
)
PROMPTS = tuple(question.format(topic) for question in _QUESTIONS for topic in _TOPICS)


class Outcome(enum.StrEnum):
    EQUAL = "equal"
    NEAR_TIE = "near tie"
    DIFFERENT = "different"


class OracleText(NamedTuple):
    token_ids: list[int]
    gaps: list[float]
    """For each token, how far the best score lies above the second best."""


class Comparison(NamedTuple):
    outcome: Outcome
    position: int | None
    """Where the texts part; None: nowhere."""
    gap: float | None


def compare(ours: Sequence[int], oracle: OracleText) -> Comparison:
    """Apply the rule to one text."""
    for position, (mine, theirs) in enumerate(zip(ours, oracle.token_ids, strict=True)):
        if mine != theirs:
            gap = oracle.gaps[position]
            return Comparison(Outcome.NEAR_TIE if gap < NEAR_TIE else Outcome.DIFFERENT, position, gap)
    return Comparison(Outcome.EQUAL, None, None)


def passes(comparisons: Sequence[Comparison]) -> bool:
    """Whether a set of texts counts as equal."""
    ties = sum(each.outcome is Outcome.NEAR_TIE for each in comparisons)
    return ties <= MAX_NEAR_TIES * len(comparisons) and not any(
        each.outcome is Outcome.DIFFERENT for each in comparisons
    )


def oracle_generate(model: Any, prompt: Sequence[int], num_tokens: int) -> OracleText:
    """Greedy `generate` of exactly `num_tokens` tokens with a transformers model."""
    ids = torch.tensor([list(prompt)], device=model.device)
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=num_tokens,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    tops = [torch.topk(step[0].float(), 2).values for step in output.logits]
    return OracleText(output.sequences[0, len(prompt) :].tolist(), [float(top[0] - top[1]) for top in tops])


def runner_generate(runner: ModelRunner, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
    """Greedy texts of all prompts in one batch, each in blocks of its own, without a scheduler."""
    block_size = runner.storage.shape.block_size
    greedy = SamplingParams(temperature=0.0, seed=0)
    admitted = []
    next_block = 0
    for index, prompt in enumerate(prompts):
        count = -(-(len(prompt) + num_tokens) // block_size)
        blocks = tuple(BlockId(next_block + offset) for offset in range(count))
        next_block += count
        admitted.append(Admitted(RequestId(str(index)), tuple(prompt), len(prompt), 0, blocks, greedy))
    assert next_block <= runner.num_blocks, f"{next_block} blocks are needed, the pool has {runner.num_blocks}"
    rows = tuple(Row(each.request_id, 0, len(each.token_ids), (), sample=True) for each in admitted)
    steps = [runner.launch(StepPlan(0, (), Transfers(), tuple(admitted), rows)).wait().token_ids]
    for step in range(1, num_tokens):
        rows = tuple(Row(each.request_id, len(each.token_ids) + step - 1, 1, (), sample=True) for each in admitted)
        steps.append(runner.launch(StepPlan(step, (), Transfers(), (), rows)).wait().token_ids)
    runner.launch(StepPlan(num_tokens, tuple(each.request_id for each in admitted), Transfers(), (), ())).wait()
    return [list(text) for text in zip(*steps, strict=True)]


def load_oracle(directory: Path) -> Any:
    """The transformers model of a directory, in float32, whose `generate` does not stop at an end token."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    model.eval()
    model.generation_config.eos_token_id = None
    return model


def encode_prompts(directory: Path, num_prompts: int) -> list[list[int]]:
    """The first prompts, through the model's chat template."""
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    encoded = []
    for text in PROMPTS[:num_prompts]:
        turns = [{"role": "user", "content": text}]
        ids: Any = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=True, return_dict=True)
        encoded.append(list(ids["input_ids"]))
    return encoded


def run(
    num_prompts: int = 50,
    num_tokens: int = 16,
    impls: Sequence[str] = ("llama", "hf"),
    model: str = catalog.DEFAULT_MODEL,
    cache_dir: Path | None = None,
) -> dict[str, Any]:
    """Compare each implementation, alone and in batches of 16, with the oracle. `passed` says whether all hold."""
    assert num_prompts <= len(PROMPTS)
    directory = catalog.pull(model, cache_dir or default_cache_dir())
    prompts = encode_prompts(directory, num_prompts)
    oracle = load_oracle(directory)
    expected = [oracle_generate(oracle, prompt, num_tokens) for prompt in prompts]
    del oracle
    results: dict[str, Any] = {"model": model, "num_tokens": num_tokens, "rows": [], "passed": True}
    for impl in impls:
        settings = EngineSettings(
            model_dir=directory,
            model_name=model,
            model_impl=impl,
            device="cpu",
            kv_cache_memory="512blocks",
            host_cache_memory="0",
        )
        runner = build_runner(settings)
        for batch in (1, 16):
            texts = [
                text
                for start in range(0, num_prompts, batch)
                for text in runner_generate(runner, prompts[start : start + batch], num_tokens)
            ]
            found = [compare(text, theirs) for text, theirs in zip(texts, expected, strict=True)]
            row: dict[str, Any] = {"impl": impl, "batch": batch, "texts": num_prompts, "passed": passes(found)}
            for outcome in Outcome:
                row[outcome.value] = sum(each.outcome is outcome for each in found)
            row["places"] = [
                {"prompt": index, "position": each.position, "gap": each.gap}
                for index, each in enumerate(found)
                if each.outcome is not Outcome.EQUAL
            ]
            results["rows"].append(row)
            results["passed"] = results["passed"] and row["passed"]
        del runner
    return results


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="chatserve bench equality", description=__doc__)
    parser.add_argument("--prompts", type=int, default=50, choices=range(1, len(PROMPTS) + 1), metavar="N")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--model", default=catalog.DEFAULT_MODEL)
    options = parser.parse_args(argv)
    results = run(options.prompts, options.tokens, model=options.model)
    print(f"{results['model']}, {results['num_tokens']} greedy tokens a text, against transformers' generate (float32)")
    print(f"  {'impl':6} {'batch':>5} {'texts':>5} {'equal':>5} {'near tie':>8} {'different':>9}")
    for row in results["rows"]:
        print(
            f"  {row['impl']:6} {row['batch']:5} {row['texts']:5} {row['equal']:5} {row['near tie']:8} "
            f"{row['different']:9}"
        )
        for place in row["places"]:
            print(f"    prompt {place['prompt']} parts at token {place['position']}, gap {place['gap']:.2e}")
    print("passed" if results["passed"] else "FAILED")
    return 0 if results["passed"] else 1
