"""One server with roomy settings for all tests here; `start_server` for those that need settings of their own."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chatserve.bench.chaos.tiny_model import make_tiny_model
from chatserve.supervisor.embedded_store import EmbeddedStore
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


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Redis, which is not what the program brings along."""
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("no redis-server on this machine")
    directory = tmp_path_factory.mktemp("redis")
    store = EmbeddedStore(directory, directory / "redis.sock", binary=Path(found))
    store.start()
    yield store.url
    store.stop()


@pytest.fixture(params=["valkey", "redis"])
def store_options(request: pytest.FixtureRequest) -> dict[str, str]:
    """For `start_server` in a test that is about what is stored: once on the packaged Valkey, once on a Redis."""
    return {"redis_url": request.getfixturevalue("redis_url")} if request.param == "redis" else {}


@pytest.fixture(scope="session")
def server_on_redis(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, redis_url: str) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("on-redis") / "data"
    with Server(directory, tiny_model, kv_cache_memory="2048blocks", redis_url=redis_url) as running:
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


class Connect:
    """Clients of one server."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def __call__(self, **options: Any) -> ChatClient:
        return ChatClient(self.server.ws_url, **options)


@pytest.fixture
def connect(request: pytest.FixtureRequest) -> Connect:
    """To the one on its own Valkey, unless a test is one `ON_EITHER_STORE`."""
    return Connect(request.getfixturevalue(getattr(request, "param", "server")))
