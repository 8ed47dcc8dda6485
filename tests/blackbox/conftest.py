"""One server with roomy settings for all tests here; `start_server` for those that need settings of their own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chatserve.bench.chaos.tiny_model import make_tiny_model
from chatserve.supervisor.paths import default_cache_dir
from tests.blackbox.client import ChatClient
from tests.blackbox.server import Server


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small random layers behind the default model's tokenizer and template: fast, and as wild in what it says as
    Unicode allows."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny-model"), default_cache_dir())


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("shared") / "data", tiny_model, kv_cache_memory="2048blocks") as running:
        yield running


@pytest.fixture
def start_server(tmp_path: Path, tiny_model: Path) -> Iterator[Callable[..., Server]]:
    """Start servers with options of one's own; they are stopped at the end."""
    running: list[Server] = []
    numbers = itertools.count()  # two threads never get the same one

    def start(**options: Any) -> Server:
        data_dir = options.pop("data_dir", None) or tmp_path / f"data{next(numbers)}"
        made = Server(data_dir, options.pop("model", tiny_model), **options)
        running.append(made)
        made.start()
        return made

    yield start
    for made in running:
        made.__exit__()


@pytest.fixture
def connect(server: Server) -> Callable[..., ChatClient]:
    return lambda **options: ChatClient(server.ws_url, **options)
