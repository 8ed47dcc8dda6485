"""What the supervisor starts and asks by way of others, and tests put fakes in the place of. Imported where it is used:
most of it takes a tenth of a second or more.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol


class EmbeddedStoreLike(Protocol):
    """A store that the supervisor starts and ends."""

    @property
    def url(self) -> str: ...

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def poll(self) -> int | None:
        """The exit status; None while it runs."""

    def watch_room(self) -> str | None:
        """Look after the room on its disk; a line for a person when something has changed."""


class StoreFactory(Protocol):
    def __call__(
        self, data_dir: Path, socket_path: Path, *, fsync: Literal["everysec", "always"]
    ) -> EmbeddedStoreLike: ...


ResolveModel = Callable[[str, Path], Path | None]
"""From a model's name and the cache directory: its directory, or None where it must be fetched first."""


def embedded_store(data_dir: Path, socket_path: Path, *, fsync: Literal["everysec", "always"]) -> EmbeddedStoreLike:
    from chatserve.supervisor.embedded_store import EmbeddedStore  # noqa: PLC0415 - not needed with a Redis elsewhere

    return EmbeddedStore(data_dir, socket_path, fsync=fsync)


def resolve_model(name: str, cache_dir: Path) -> Path | None:
    from chatserve.model import catalog  # noqa: PLC0415 - loads the hub client

    return catalog.resolve(name, cache_dir)
