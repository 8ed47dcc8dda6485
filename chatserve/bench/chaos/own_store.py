"""A store that belongs to no server, for several that share it: started, killed and started again by the run itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatserve.supervisor.embedded_store import EmbeddedStore

if TYPE_CHECKING:
    from pathlib import Path


class OwnStore:
    """Valkey with an append-only file in `directory`. Synchronous, as `Program` is."""

    def __init__(self, directory: Path) -> None:
        self._store = EmbeddedStore(directory, directory / "store.sock")

    @property
    def url(self) -> str:
        return self._store.url

    @property
    def pid(self) -> int | None:
        """None while it does not run."""
        return self._store.pid

    def start(self) -> None:
        self._store.start()

    def start_again(self) -> None:
        """After it was killed."""
        self._store.stop()
        self._store.start()

    def stop(self) -> None:
        self._store.stop()
