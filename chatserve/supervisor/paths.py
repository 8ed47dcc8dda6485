"""Where the program keeps its files, and the checks that they can be kept there.

Owns directories and the lock on the data directory; starts nothing.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import stat
import tempfile
import uuid
from pathlib import Path
from typing import Final

import filelock
import platformdirs

from chatserve.errors import StartupError

MIN_FREE_BYTES: Final = 64 * 1024 * 1024
"""Below this a start is refused: the append-only file could not even be rewritten once."""

_MAX_SOCKET_PATH_BYTES: Final = 100
"""A Unix socket's path holds 104 bytes on macOS and 108 on Linux, its closing NUL included."""


def default_data_dir() -> Path:
    """Sessions live here unless `--data-dir` says otherwise."""
    return platformdirs.user_data_path("chatserve", appauthor=False)


def default_cache_dir() -> Path:
    """Downloaded and converted models live here unless `--cache-dir` says otherwise."""
    return platformdirs.user_cache_path("chatserve", appauthor=False)


def prepare_data_dir(data_dir: Path, *, min_free_bytes: int = MIN_FREE_BYTES) -> None:
    """Make the data directory, private to its owner, and see that it can be written.

    Raises:
        StartupError: not a directory, not writable, or too little space.
    """
    probe = data_dir / ".write-probe"
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        probe.write_bytes(b"\0" * 4096)
        probe.unlink()
        free_bytes = shutil.disk_usage(data_dir).free
    except OSError as error:
        raise StartupError(_sentence(data_dir, error)) from error
    if free_bytes < min_free_bytes:
        raise StartupError(
            f"the disk of {data_dir} is full: {free_bytes >> 20} MiB are free and at least {min_free_bytes >> 20} MiB "
            "are needed; free some space or choose another --data-dir"
        )


def prepare_snapshot_dir(directory: Path) -> str | None:
    """Make the directory of KV snapshots, or narrow one that is there, private to its owner, and see that it can be
    written. Returns a line for whoever runs the server where it stays open to others.

    Raises:
        StartupError: not a directory, or not writable. A full disk is said when there is something to save.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        is_private = _make_private(directory)
    except OSError as error:
        raise StartupError(_sentence(directory, error, "--kv-snapshot")) from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise StartupError(f"cannot write to {directory}; change its owner or choose another --kv-snapshot")
    if is_private:
        return None
    return (
        f"{directory} is open to other users, who may see when KV is saved and how much, and remove it if they may "
        "write there; give --kv-snapshot a directory of its own"
    )


def _make_private(directory: Path) -> bool:
    """Take a directory from everybody else, where it is ours and nobody loses anything by it: not one that all share,
    nor one that holds what others may read. Whether it is private now.
    """
    found = directory.stat()
    if stat.S_IMODE(found.st_mode) & 0o077 == 0:
        return True
    is_shared = found.st_uid != os.getuid() or bool(found.st_mode & stat.S_ISVTX)
    if is_shared or any(entry.lstat().st_mode & 0o077 for entry in directory.iterdir()):
        return False
    directory.chmod(0o700)
    return True


def _sentence(data_dir: Path, error: OSError, option: str = "--data-dir") -> str:
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return f"the disk of {data_dir} is full; free some space or choose another {option}"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return f"cannot write to {data_dir} ({error.strerror}); change its owner or choose another {option}"
        case errno.EEXIST | errno.ENOTDIR:
            return f"{data_dir} is not a directory; choose another {option}"
        case _:
            return f"cannot use {data_dir}: {error.strerror}; choose another {option}"


class DataDirLock:
    """Says whose a data directory is; made by `lock_data_dir`."""

    def __init__(self, lock: filelock.BaseFileLock, pid_file: Path) -> None:
        self._lock = lock
        self._pid_file = pid_file
        self.follows_a_kill = pid_file.exists()
        """Whether the server before did not end in order, and may have left processes that are about to end."""
        pid_file.write_text(f"{os.getpid()}\n")

    def release(self) -> None:
        self._pid_file.unlink(missing_ok=True)
        self._lock.release()


def lock_data_dir(data_dir: Path) -> DataDirLock:
    """Take the lock that says whose the data directory is, until the process ends or the lock is released.

    Raises:
        StartupError: another server has it.
    """
    lock = filelock.FileLock(data_dir / "serve.lock")
    pid_file = data_dir / "serve.pid"
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout as error:
        pid = pid_file.read_text().strip() if pid_file.exists() else ""
        by = f" (process {pid})" if pid else ""
        raise StartupError(
            f"another chatserve{by} is using {data_dir}; stop it, or give this one its own --data-dir"
        ) from error
    return DataDirLock(lock, pid_file)


def server_id(data_dir: Path) -> str:
    """What this server is called among those that share a store: the same as long as it has its data directory."""
    file = data_dir / "server-id"
    if not file.exists():
        file.write_text(f"{uuid.uuid4().hex}\n")
    return file.read_text().strip()


def in_use(data_dir: Path) -> bool:
    """Whether a server has the data directory's lock right now."""
    if not (data_dir / "serve.lock").exists():
        return False
    lock = filelock.FileLock(data_dir / "serve.lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return True
    lock.release()
    return False


def socket_dir(data_dir: Path) -> Path:
    """A private directory for Unix sockets: in the data directory, or where that path is too long for one, in the
    system's temporary directory under a name derived from it.

    Raises:
        StartupError: the short directory exists and is not ours alone.
    """
    data_dir = data_dir.absolute()
    run_dir = data_dir / "run"
    if len(os.fsencode(run_dir / "engine.sock")) > _MAX_SOCKET_PATH_BYTES:
        digest = hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:12]
        run_dir = Path(tempfile.gettempdir()) / f"chatserve-{os.getuid()}-{digest}"
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = run_dir.lstat()
    except OSError as error:
        raise StartupError(f"cannot make {run_dir} for the program's sockets: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise StartupError(f"{run_dir} belongs to somebody else or others may write to it; remove it")
    return run_dir


def short_socket_path(wanted: Path) -> Path:
    """`wanted`, or where its name is too long for a socket, a place of the same user's under the temporary directory
    that only depends on `wanted`.

    Raises:
        OSError: that place belongs to somebody else.
    """
    if len(os.fsencode(wanted)) <= _MAX_SOCKET_PATH_BYTES:
        return wanted
    name = hashlib.sha256(os.fsencode(wanted)).hexdigest()[:16]
    directory = Path(tempfile.gettempdir()) / f"chatserve-{os.getuid()}-{name}"
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(errno.EACCES, "not a private directory of this user", str(directory))
    return directory / "store.sock"
