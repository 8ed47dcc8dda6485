"""One server with roomy settings for all tests here; `start_server` for those that need settings of their own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from chatserve.model import catalog
from chatserve.supervisor.paths import default_cache_dir
from tests.blackbox.client import ChatClient
from tests.blackbox.server import Server


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small random layers behind the default model's tokenizer and template: fast, and as wild in what it says as
    Unicode allows."""
    source = catalog.resolve("smollm2-135m", default_cache_dir())
    assert source is not None, "run `chatserve model pull smollm2-135m` first; scripts/test does"
    target = tmp_path_factory.mktemp("tiny-model")
    for file in source.iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "chat_template", "generation_config")):
            shutil.copy(file, target)
    config = AutoConfig.from_pretrained(source)
    config.update(
        {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
        }
    )
    config.max_position_embeddings = 4096
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                # Wide enough that greedy choices are not near-ties that rounding could turn.
                parameter.normal_(0, 0.4)
    model.save_pretrained(target)
    assert json.loads((target / "config.json").read_text())["num_hidden_layers"] == 2
    return target


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("shared") / "data", tiny_model, kv_cache_memory="2048blocks") as running:
        yield running


@pytest.fixture
def start_server(tmp_path: Path, tiny_model: Path) -> Iterator[Callable[..., Server]]:
    """Start servers with options of one's own; they are stopped at the end."""
    running: list[Server] = []

    def start(**options: Any) -> Server:
        made = Server(
            options.pop("data_dir", tmp_path / f"data{len(running)}"), options.pop("model", tiny_model), **options
        )
        running.append(made)
        made.start()
        return made

    yield start
    for made in running:
        made.__exit__()


@pytest.fixture
def connect(server: Server) -> Callable[..., ChatClient]:
    return lambda **options: ChatClient(server.ws_url, **options)
