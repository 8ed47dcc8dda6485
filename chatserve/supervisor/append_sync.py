"""Forces a store's append-only file to the disk once a second, from beside the store.

A server that does so itself (`appendfsync everysec`) holds its writes back while a flush of the one before is under
way, for up to two seconds, and acknowledges them all the same: a SIGKILL in these moments loses them. A server that
leaves it to others (`appendfsync no`) hands every write to the system before it replies, and what the system has
survives the death of any process. So a loss of power may cost the last second or so, and a killed process nothing.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = logging.getLogger(__name__)

SYNC_EVERY_S: Final = 1.0


def flush_to_disk(descriptor: int) -> None:
    """`fsync` that also empties the disk's own cache, where the system has that apart."""
    if sys.platform == "darwin":
        import fcntl  # noqa: PLC0415 - not everywhere

        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    else:
        os.fsync(descriptor)


class AppendSync:
    """`start()` when the server answers, `stop()` when it has ended."""

    def __init__(self, directory: Path, flush: Callable[[int], None] = flush_to_disk) -> None:
        """`directory` has the append-only files, and no other `*.aof`."""
        self._directory = directory
        self._flush = flush
        self._sizes: dict[str, int] = {}
        """Of each file when it was last forced to the disk."""
        self._ending: threading.Event | None = None

    def start(self) -> None:
        assert self._ending is None, "started already"
        self._ending = threading.Event()
        threading.Thread(target=self._run, args=(self._ending,), name="append-sync", daemon=True).start()

    def stop(self) -> None:
        """Does nothing where nothing runs. A flush may outlive it: a disk that hangs must not hold up the end."""
        if self._ending is not None:
            self._ending.set()
            self._ending = None

    def sync(self) -> None:
        """Force to the disk whatever was appended since the last time.

        Raises:
            OSError: the disk did not take it; the next call tries again.
        """
        sizes: dict[str, int] = {}
        failure: OSError | None = None
        for path in self._directory.glob("*.aof"):
            try:
                with path.open("rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    if self._sizes.get(path.name) != size:
                        self._flush(file.fileno())
                    sizes[path.name] = size
            except FileNotFoundError:
                continue  # the server has rewritten its files, and forced the new ones to the disk itself
            except OSError as error:
                failure = error  # the other files may be on a better part of the disk
        self._sizes = sizes
        if failure is not None:
            raise failure

    def _run(self, ending: threading.Event) -> None:
        has_failed = False
        while not ending.wait(SYNC_EVERY_S):
            try:
                self.sync()
            except OSError as error:
                if not has_failed:
                    log.warning("what the store has cannot be forced to the disk; power must not fail now: %s", error)
                has_failed = True
            else:
                has_failed = False
