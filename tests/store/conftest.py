"""Real servers for the store's tests: each test runs against the packaged Valkey and the system's Redis."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from chatserve.chat.redis_store import RedisStore, open_store
from chatserve.supervisor.embedded_store import EmbeddedStore, find_server
from chatserve.types import UserId


@pytest.fixture(scope="session", params=["valkey", "redis"])
def binary(request: pytest.FixtureRequest) -> Path:
    if request.param == "valkey":
        return find_server()
    found = shutil.which("redis-server")
    if found is None:
        pytest.skip("no redis-server on this machine")
    return Path(found)


@pytest.fixture(scope="session")
def server(binary: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedStore]:
    """One server for all tests; each test is a user of its own there."""
    directory = tmp_path_factory.mktemp("store")
    embedded = EmbeddedStore(directory, directory / "run" / "store.sock", binary=binary)
    embedded.start()
    yield embedded
    embedded.stop()


@pytest.fixture
async def store(server: EmbeddedStore) -> AsyncIterator[RedisStore]:
    opened = await open_store(server.url, event_history=4096)
    yield opened
    await opened.close()


@pytest.fixture
def user() -> UserId:
    return UserId(f"user {uuid.uuid4()}")
