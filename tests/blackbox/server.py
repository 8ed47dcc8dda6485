"""The whole program as its users run it: `Program`, whose processes tests name by what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chatserve.bench.chaos.program import Program

ON_EITHER_STORE = pytest.mark.parametrize(
    "connect", ["server", "server_on_redis"], indirect=True, ids=["valkey", "redis"]
)
"""For a test of `connect` that is about what is stored: once on the packaged Valkey, once on a Redis."""


class Server(Program):
    """A running `chatserve serve` of a model, on a port and a data directory of its own."""

    def __init__(self, data_dir: Path, model: Path, **options: Any) -> None:
        super().__init__(data_dir, model=model, **options)

    @property
    def store_url(self) -> str:
        """Where its conversations are."""
        return str(self.options.get("redis_url", f"unix://{self.data_dir / 'run' / 'store.sock'}"))

    def children(self) -> dict[str, int]:
        """A process id of each kind that runs: engine, web, store."""
        return {found.kind: found.pid for found in self.processes()}
