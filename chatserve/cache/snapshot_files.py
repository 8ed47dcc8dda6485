"""A snapshot's directory: blocks and manifest on disk, whole or not at all.

A writer fills a file of a new name and, when all its blocks are there, puts the manifest over the old one in one
rename; a reader that comes at any moment, or after a crash at any moment, finds the old snapshot or the new one.
Nothing is forced to the disk: what a power failure leaves out does not have its checksum. Files are readable by their
owner alone, for token ids are text.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

from chatserve.cache.snapshot import Manifest, SnapshotError, decode_manifest, encode_manifest

if TYPE_CHECKING:
    from collections.abc import Iterable

MANIFEST_NAME: Final = "manifest"
_DATA_SUFFIX: Final = ".blocks"
_TEMP_SUFFIX: Final = ".partial"
RESERVED_BYTES: Final = 256 * 1024 * 1024
"""Left free on the disk, for whoever else writes to it: a conversation is worth more than its KV."""


class SnapshotWriter:
    """`append` blocks, then `commit`; `discard` where that fails. All raise `OSError`."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = directory
        self.data_file = f"{secrets.token_hex(8)}{_DATA_SUFFIX}"
        self._temp = directory / f"{self.data_file}{_TEMP_SUFFIX}"
        self._fd = os.open(self._temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def room_bytes(self) -> int:
        """Bytes that may be written without taking what others need."""
        return max(0, shutil.disk_usage(self._directory).free - RESERVED_BYTES)

    def append(self, block: memoryview) -> int:
        """Write a block's bytes behind the others. Its checksum."""
        checksum = zlib.crc32(block)
        while block:
            block = block[os.write(self._fd, block) :]
        return checksum

    def commit(self, manifest: Manifest) -> None:
        """Make the snapshot the directory's, and remove what it replaces."""
        assert manifest.data_file == self.data_file
        os.close(self._fd)
        self._fd = -1
        self._temp.rename(self._directory / self.data_file)
        temp = self._directory / f"{MANIFEST_NAME}{_TEMP_SUFFIX}"
        with contextlib.suppress(FileNotFoundError):
            temp.unlink()
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:  # noqa: PTH123 - a descriptor, for its mode
            file.write(encode_manifest(manifest))
        temp.replace(self._directory / MANIFEST_NAME)
        _remove(self._stale())

    def discard(self) -> None:
        """Remove what was written; the snapshot that was there before stays."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        _remove([self._temp, self._directory / self.data_file, self._directory / f"{MANIFEST_NAME}{_TEMP_SUFFIX}"])

    def clear(self) -> None:
        """Leave the directory without a snapshot."""
        _remove([self._directory / MANIFEST_NAME, *self._stale()])

    def _stale(self) -> list[Path]:
        """Data files that the manifest does not name, whole or left over from a writer that died."""
        ours = (_DATA_SUFFIX, f"{_DATA_SUFFIX}{_TEMP_SUFFIX}")
        return [path for path in self._directory.iterdir() if path.name.endswith(ours) and path.name != self.data_file]


def read_manifest(directory: Path) -> Manifest:
    """A directory's manifest.

    Raises:
        SnapshotError: it has none that can be used.
        OSError: it cannot be read.
    """
    with open(_open(directory / MANIFEST_NAME), "rb") as file:
        manifest = decode_manifest(file.read())
    name = manifest.data_file
    if Path(name).name != name or not name.endswith(_DATA_SUFFIX):
        raise SnapshotError(f"its manifest names {name!r} as the file of its blocks")
    return manifest


def remove_snapshot(directory: Path, manifest: Manifest) -> None:
    """Take a snapshot from its directory; who reads it may go on.

    Raises:
        OSError: it stays.
    """
    (directory / MANIFEST_NAME).unlink()
    (directory / manifest.data_file).unlink(missing_ok=True)


class SnapshotReader:
    """A directory's snapshot, held open: a writer may replace it meanwhile."""

    def __init__(self, directory: Path) -> None:
        """Read the manifest and open the blocks.

        Raises:
            FileNotFoundError: there is no snapshot.
            SnapshotError: there is one that cannot be used.
        """
        try:
            self.manifest = read_manifest(directory)
            self._fd = _open(directory / self.manifest.data_file)
        except FileNotFoundError as error:
            if (directory / MANIFEST_NAME).exists():
                raise SnapshotError(f"{error.filename} is missing") from error
            raise
        except OSError as error:
            raise SnapshotError(f"it cannot be read: {error.strerror}") from error

    def read(self, index: int, checksum: int, into: memoryview) -> bool:
        """Read block number `index`. False: it is not there, or not what was written; `into` holds garbage then."""
        offset = index * len(into)
        rest = into
        try:
            while rest:
                num_read = os.preadv(self._fd, [rest], offset + len(into) - len(rest))
                if not num_read:
                    return False
                rest = rest[num_read:]
        except OSError:
            return False
        return zlib.crc32(into) == checksum

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._fd)


def _open(path: Path) -> int:
    """A descriptor to read a file, and nothing that only looks like one: a pipe would be waited for, a device has no
    end.

    Raises:
        SnapshotError: it is no file.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise SnapshotError(f"{path.name} is no file")
    return fd


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()
