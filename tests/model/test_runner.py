"""The runner executes plans exactly: text does not depend on blocks, swaps, copies, chunks or neighbours."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from chatserve.bench.equality import Outcome, compare, oracle_generate, runner_generate
from chatserve.config import EngineSettings
from chatserve.errors import StartupError
from chatserve.model.runner import ModelRunner, build_runner
from chatserve.sched.plan import Admitted, BlockCopy, Row, StepPlan, SwapIn, SwapOut, Transfers
from chatserve.types import SamplingParams
from tests.model.tiny import OUR_FAMILIES, VOCAB, make_model

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

GREEDY = SamplingParams(temperature=0.0, seed=0)
BLOCK = 4


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_model(path, OUR_FAMILIES["llama"])
    return path


def settings_of(directory: Path, **fields: Any) -> EngineSettings:
    return EngineSettings(
        **{
            "model_dir": directory,
            "model_name": "tiny",
            "device": "cpu",
            "block_size": BLOCK,
            "kv_cache_memory": "64blocks",
            "host_cache_memory": "16blocks",
            "threads": 1,
            **fields,
        }
    )


@pytest.fixture
def runner(model_dir: Path) -> ModelRunner:
    made = build_runner(settings_of(model_dir))
    made.storage.device_pool.fill_(torch.nan)
    made.storage.host_pool.fill_(torch.nan)
    return made


def some_ids(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, VOCAB, length).tolist())


def step(
    runner: ModelRunner,
    rows: Iterable[Row] = (),
    *,
    admitted: Iterable[Admitted] = (),
    transfers: Transfers | None = None,
    removed: Iterable[str] = (),
) -> tuple[int, ...]:
    plan = StepPlan(1, tuple(removed), transfers or Transfers(), tuple(admitted), tuple(rows))
    result = runner.launch(plan).wait()
    assert result.step == 1
    runner.check()
    return result.token_ids


def decode(runner: ModelRunner, name: str, start: int, count: int) -> list[int]:
    return [step(runner, [Row(name, start + index, 1, (), True)])[0] for index in range(count)]


def generate(
    runner: ModelRunner, ids: Sequence[int], blocks: Sequence[int], count: int, params: SamplingParams = GREEDY
) -> list[int]:
    """Alone, in one chunk, then token by token."""
    first = step(
        runner,
        [Row("x", 0, len(ids), (), True)],
        admitted=[Admitted("x", tuple(ids), len(ids), 0, tuple(blocks), params)],
    )
    text = [*first, *decode(runner, "x", len(ids), count - 1)]
    step(runner, removed=["x"])
    return text


def test_greedy_text_equals_transformers_generate(model_dir: Path, runner: ModelRunner) -> None:
    from transformers import AutoModelForCausalLM

    oracle = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    oracle.generation_config.eos_token_id = None
    prompts = [some_ids(5 + 4 * seed, seed) for seed in range(5)]
    texts = runner_generate(runner, prompts, 12)
    for prompt, text in zip(prompts, texts, strict=True):
        assert compare(text, oracle_generate(oracle, prompt, 12)).outcome is Outcome.EQUAL


def test_text_does_not_depend_on_which_blocks_hold_it(runner: ModelRunner) -> None:
    ids = some_ids(13)
    assert generate(runner, ids, range(8), 10) == generate(runner, ids, [63, 2, 40, 7, 11, 30, 1, 0], 10)


def test_blocks_may_come_when_they_are_needed_and_chunks_end_anywhere(runner: ModelRunner) -> None:
    ids = some_ids(13)
    expected = generate(runner, ids, range(8), 6)
    got = step(
        runner,
        [Row("a", 0, 6, (20, 50), False)],
        admitted=[Admitted("a", ids, 13, 0, (), GREEDY)],
    )
    assert got == ()
    step(runner, [Row("a", 6, 1, (), False)])
    text = list(step(runner, [Row("a", 7, 6, (3, 33), True)]))
    for index in range(5):
        new = (60 - index,) if (13 + index) % BLOCK == 0 else ()
        text += step(runner, [Row("a", 13 + index, 1, new, True)])
    # Token 16 is the first of the fifth block.
    assert text == expected


def test_a_swapped_out_and_in_request_goes_on_as_if_nothing_had_been(runner: ModelRunner) -> None:
    ids = some_ids(14)
    expected = generate(runner, ids, range(8), 10)
    blocks = (10, 11, 12, 13, 14, 15)
    text = list(step(runner, [Row("a", 0, 14, (), True)], admitted=[Admitted("a", ids, 14, 0, blocks, GREEDY)]))
    text += decode(runner, "a", 14, 3)
    out = tuple(SwapOut(block, 15 - index) for index, block in enumerate(blocks))
    step(runner, removed=["a"], transfers=Transfers(swap_out=out))
    runner.storage.device_pool.fill_(torch.nan)
    moved = tuple(40 + block for block in blocks)
    back = tuple(SwapIn(15 - index, block) for index, block in enumerate(moved))
    known = ids + tuple(text)
    text += step(
        runner,
        [Row("a", 17, 1, (), True)],
        admitted=[Admitted("a", known, 14, 17, moved, GREEDY)],
        transfers=Transfers(swap_in=back),
    )
    text += decode(runner, "a", 18, 5)
    assert text == expected


def test_a_fork_inside_a_block_copies_it_and_both_sides_go_on(runner: ModelRunner) -> None:
    shared, left, right = some_ids(10), some_ids(3, 1), some_ids(4, 2)
    expected = [generate(runner, shared + tail, range(8), 8) for tail in (left, right)]
    runner.storage.device_pool.fill_(torch.nan)
    step(
        runner,
        [Row("a", 0, 13, (), True)],
        admitted=[Admitted("a", shared + left, 13, 0, (1, 2, 3, 4, 5, 6), GREEDY)],
    )
    step(runner, removed=["a"])
    texts: list[list[int]] = [[], []]
    both = [
        Admitted("a", shared + left, 13, 12, (1, 2, 3, 4, 5, 6), GREEDY),
        Admitted("b", shared + right, 14, 10, (1, 2, 30, 31, 32, 33), GREEDY),
    ]
    rows = [Row("a", 12, 1, (), True), Row("b", 10, 4, (), True)]
    for index in range(8):
        # Block 3 holds tokens 8 to 11; the fork keeps 8 and 9 of it.
        copy = Transfers(copies=(BlockCopy(3, 30, 2),)) if index == 0 else None
        for text, token in zip(
            texts, step(runner, rows, admitted=both if index == 0 else (), transfers=copy), strict=True
        ):
            text.append(token)
        rows = [Row("a", 13 + index, 1, (), True), Row("b", 14 + index, 1, (), True)]
    assert texts == expected


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(temperature=1.3, top_p=0.9, seed=11)], ids=["greedy", "drawn"]
)
def test_text_alone_equals_text_in_a_batch_that_changes(runner: ModelRunner, params: SamplingParams) -> None:
    names = "abcd"
    prompts = {name: some_ids(3 + 5 * index, index) for index, name in enumerate(names)}
    expected = {name: generate(runner, prompts[name], range(8), 8, params) for name in names}
    texts: dict[str, list[int]] = {name: [] for name in names}
    for turn in range(12):
        admitted = []
        rows = []
        for index, name in enumerate(names):  # each joins two steps after the one before it
            age = turn - 2 * index
            if age == 0:
                blocks = tuple(range(16 * index, 16 * index + 10))
                admitted.append(Admitted(name, prompts[name], len(prompts[name]), 0, blocks, params))
                rows.append(Row(name, 0, len(prompts[name]), (), True))
            elif 0 < age < 8:
                rows.append(Row(name, len(prompts[name]) + age - 1, 1, (), True))
        rows.reverse()
        for row, token in zip(rows, step(runner, rows, admitted=admitted), strict=True):
            texts[row.request_id].append(token)
    for name in names:
        assert texts[name] == expected[name][: len(texts[name])]
        assert texts[name]


def test_steps_may_be_launched_before_the_ids_of_those_before_them_are_known(runner: ModelRunner) -> None:
    """Requests join, sample and leave, their slots go to others, and nobody has looked at an id yet."""
    params = SamplingParams(temperature=1.0, seed=3)
    prompts = [some_ids(6 + index, index) for index in range(4)]
    expected = [generate(runner, prompt, range(8), 6, params) for prompt in prompts]
    launched = []
    for index, prompt in enumerate(prompts):
        name = f"r{index}"
        blocks = tuple(range(8 * index, 8 * index + 8))
        for turn in range(6):
            row = Row(name, 0, len(prompt), (), True) if turn == 0 else Row(name, len(prompt) + turn - 1, 1, (), True)
            admitted = (Admitted(name, prompt, len(prompt), 0, blocks, params),) if turn == 0 else ()
            removed = (f"r{index - 1}",) if turn == 0 else ()
            launched.append(runner.launch(StepPlan(turn, removed, Transfers(), admitted, (row,))))
    texts = [step.wait().token_ids[0] for step in launched]
    assert [texts[6 * index : 6 * index + 6] for index in range(4)] == expected


def test_a_request_resubmitted_after_a_crash_draws_the_same_tokens(model_dir: Path, runner: ModelRunner) -> None:
    params = SamplingParams(temperature=1.0, seed=5, presence_penalty=0.7, repetition_penalty=1.2)
    ids = some_ids(9)
    expected = generate(runner, ids, range(8), 10, params)
    again = build_runner(settings_of(model_dir))
    known = ids + tuple(expected[:4])
    text = step(
        again,
        [Row("a", 0, 13, (), True)],
        admitted=[Admitted("a", known, 9, 0, tuple(range(20, 28)), params)],
    )
    assert [*text, *decode(again, "a", 13, 5)] == expected[4:]


def test_an_empty_plan_and_pure_transfers_are_steps_too(runner: ModelRunner) -> None:
    assert step(runner) == ()
    assert step(runner, transfers=Transfers(swap_out=(SwapOut(0, 0),))) == ()
    assert step(runner, removed=["never seen"]) == ()


def test_sizes_and_context_follow_the_settings(model_dir: Path) -> None:
    runner = build_runner(settings_of(model_dir, kv_cache_memory="8blocks", host_cache_memory="0"))
    assert (runner.num_blocks, runner.num_host_blocks) == (8, 0)
    assert runner.context_tokens == 8 * BLOCK
    assert runner.vocab_size == VOCAB
    assert build_runner(settings_of(model_dir, context_tokens=20)).context_tokens == 20
    assert build_runner(settings_of(model_dir, kv_cache_memory="1M")).context_tokens == 256


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"kv_cache_memory": "lots"}, "kv-cache-memory must be auto.*'lots'"),
        ({"kv_cache_memory": "1blocks"}, "at least 2 blocks, not '1blocks'"),
        ({"kv_cache_memory": "100"}, "at least 2 blocks of .* bytes, not '100'"),
        ({"kv_cache_memory": "4000T"}, "only .* free"),
        ({"host_cache_memory": "-3"}, "host-cache-memory must be"),
        ({"device": "tpu"}, "device must be auto, cpu, cuda.*'tpu'"),
        ({"device": "cpu:1"}, "device must be"),
        ({"block_size": 0}, "block-size must be at least 1"),
        ({"threads": -1}, "threads must be 0"),
        ({"model_dir": Path("/nowhere/at/all")}, "config.json is missing"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_met_are_one_line(model_dir: Path, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(StartupError, match=words) as caught:
        build_runner(settings_of(model_dir, **fields))
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has what the test says is missing")
def test_cuda_on_a_machine_without_is_said(model_dir: Path) -> None:
    with pytest.raises(StartupError, match="sees no CUDA device"):
        build_runner(settings_of(model_dir, device="cuda"))


def test_a_cuda_device_without_triton_is_one_line(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "chatserve.model.cuda_setup", None)  # what an import that fails leaves
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(StartupError, match=r"cuda.* needs triton, .*; choose --device cpu") as caught:
        build_runner(settings_of(model_dir, device="cuda"))
    assert "\n" not in str(caught.value)
