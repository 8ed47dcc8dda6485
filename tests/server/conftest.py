"""What tests of a running server begin with."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.server.harness import Server, running_server


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    """On a fake runner, with a store in memory and nothing set."""
    async with running_server() as running:
        yield running
