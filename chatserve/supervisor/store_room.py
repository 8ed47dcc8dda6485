"""Room on the store's disk: when to take no more writes, and a reserve for those that were taken.

A server that cannot write its append-only file refuses what comes after, but has by then replied to the write that
failed: that one is only in its memory, and gone with it, even when it ends in order. So writing ends before the disk
is full; and where something else fills the disk faster than that is seen, a file that was set aside makes room for
what was replied to.

Owns that file and the decision. Knows nothing of the server.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

START_BYTES: Final = 1 << 20
"""Must be free for a start."""
RESERVE_BYTES: Final = 16 << 20
LEAST_FREE_BYTES: Final = 16 << 20
"""Below this no more is written, while the reserve is still there."""
ENOUGH_FREE_BYTES: Final = 48 << 20
"""From this on it is written again: room for another reserve, and for more than the moment."""


def _free_bytes(directory: Path) -> int:
    return shutil.disk_usage(directory).free


class StoreRoom:
    """Of one directory."""

    def __init__(self, directory: Path, free_bytes: Callable[[Path], int] = _free_bytes) -> None:
        self._directory = directory
        self._file = directory / "reserve"
        self._free_bytes = free_bytes
        self._found_bytes = 0
        """Free at the last `judge`."""
        self.is_short = False
        """Whether nothing more may be written, by the last `judge`."""

    def prepare(self) -> bool:
        """Before a server starts: `judge`, and have what it says.

        Raises:
            OSError: there is no room even to start, or nothing can be written.
        """
        if self.judge():
            self.give_up()
        else:
            self.set_aside()
        probe = self._directory / "probe"
        try:
            with probe.open("wb") as file:
                file.write(bytes(START_BYTES))
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)
        return self.is_short

    def judge(self, *, is_failing: bool = False) -> bool:
        """Whether nothing more may be written; `is_failing`: the server could not write just now.

        Raises:
            OSError: the directory is gone.
        """
        least = ENOUGH_FREE_BYTES if self.is_short else LEAST_FREE_BYTES
        self._found_bytes = self._free_bytes(self._directory)
        self.is_short = is_failing or self._found_bytes < least
        return self.is_short

    def set_aside(self) -> None:
        """Take the reserve; without room for it, or where files cannot be made, there is none."""
        if self._file.exists():
            return
        try:
            self._file.touch(mode=0o600)
            with self._file.open("wb") as file:
                if hasattr(os, "posix_fallocate"):  # not on macOS
                    os.posix_fallocate(file.fileno(), 0, RESERVE_BYTES)
                else:
                    file.write(bytes(RESERVE_BYTES))
        except OSError:
            self.give_up()

    def give_up(self) -> None:
        """Make room for what still has to be written."""
        with contextlib.suppress(OSError):
            self._file.unlink(missing_ok=True)

    def describe(self) -> str:
        """The last judgement, for a person."""
        free = f"{self._found_bytes >> 20} MiB"
        if self.is_short:
            enough = f"{ENOUGH_FREE_BYTES >> 20} MiB"
            return f"the disk of {self._directory} is full: no more is saved until {enough} are free ({free} are)"
        return f"the disk of {self._directory} has room again ({free} are free)"
