"""The whole program as its users run it: `Program`, whose processes tests name by what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chatserve.bench.chaos.program import Program


class Server(Program):
    """A running `chatserve serve` of a model, on a port and a data directory of its own."""

    def __init__(self, data_dir: Path, model: Path, **options: Any) -> None:
        super().__init__(data_dir, model=model, **options)

    def children(self) -> dict[str, int]:
        """A process id of each kind that runs: engine, web, store."""
        return {found.kind: found.pid for found in self.processes()}
