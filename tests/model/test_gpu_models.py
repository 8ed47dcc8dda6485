"""Whole models on a GPU: an 8B's layers in float32 against transformers' own code, and other models' graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chatserve.bench.equality import Outcome, compare, oracle_generate, runner_generate
from chatserve.config import EngineSettings
from chatserve.errors import StartupError
from chatserve.model.runner import build_runner
from tests.model.tiny import OUR_FAMILIES, VOCAB, make_model

pytestmark = pytest.mark.gpu


def settings_of(directory: Path, **fields: Any) -> EngineSettings:
    return EngineSettings(
        **{
            "model_dir": directory,
            "model_name": "test",
            "device": "cuda",
            "dtype": "float32",
            "kv_cache_memory": "400blocks",
            "host_cache_memory": "0",
            "max_running": 8,
            "max_batched_tokens": 1024,
            **fields,
        }
    )


def prompts_of(vocab: int, count: int) -> list[list[int]]:
    rng = np.random.default_rng(4)
    return [rng.integers(3, vocab, 9 + 17 * index).tolist() for index in range(count)]


@pytest.fixture(scope="module")
def four_layers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    from transformers import AutoModelForCausalLM, LlamaConfig

    directory = tmp_path_factory.mktemp("four-layers")
    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=4,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=32_000,
        max_position_embeddings=4096,
        rope_theta=500_000.0,
    )
    torch.manual_seed(1)
    with torch.device("cuda"):
        oracle = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    oracle.save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}")
    oracle.generation_config.eos_token_id = None
    return directory, oracle.float()


@pytest.mark.parametrize("impl", ["llama", "hf"])
def test_four_layers_of_an_8b_equal_transformers(four_layers: tuple[Path, Any], impl: str) -> None:
    directory, oracle = four_layers
    prompts = prompts_of(32_000, 8)
    texts = runner_generate(build_runner(settings_of(directory, model_impl=impl)), prompts, 24)
    found = [compare(text, oracle_generate(oracle, prompt, 24)) for prompt, text in zip(prompts, texts, strict=True)]
    assert all(each.outcome is not Outcome.DIFFERENT for each in found), found
    assert sum(each.outcome is Outcome.EQUAL for each in found) >= 7


def test_in_sixteen_bits_graphs_and_plain_launches_agree(four_layers: tuple[Path, Any]) -> None:
    directory, _ = four_layers
    prompts = prompts_of(32_000, 8)
    texts = [
        runner_generate(build_runner(settings_of(directory, dtype="bfloat16", graphs=graphs)), prompts, 16)
        for graphs in (True, False)
    ]
    # Few rows and many are multiplied by different kernels, and the two ways pad differently.
    assert sum(one == other for one, other in zip(*texts, strict=True)) >= 6


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_a_transformers_model_is_replayed_or_says_why_not(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    oracle = make_model(tmp_path, {**OUR_FAMILIES[family], "head_dim": 16})
    oracle.generation_config.eos_token_id = None
    caplog.set_level("INFO")
    runner = build_runner(settings_of(tmp_path, model_impl="hf"))
    assert "captured" in caplog.text
    prompts = prompts_of(VOCAB, 5)
    texts = runner_generate(runner, prompts, 12)
    for prompt, text in zip(prompts, texts, strict=True):
        assert compare(text, oracle_generate(oracle, prompt, 12)).outcome is Outcome.EQUAL


def test_a_pool_that_cannot_be_is_refused_with_its_numbers(tmp_path: Path) -> None:
    make_model(tmp_path, OUR_FAMILIES["llama"])
    with pytest.raises(StartupError, match=r"gpu-memory-utilization 0.001 allows"):
        build_runner(settings_of(tmp_path, kv_cache_memory="auto", gpu_memory_utilization=0.001))
    with pytest.raises(StartupError, match=r"kv-cache-memory 100T is .* MiB, but only"):
        build_runner(settings_of(tmp_path, kv_cache_memory="100T"))
