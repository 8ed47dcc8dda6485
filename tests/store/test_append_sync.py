"""What a store has acknowledged is forced to the disk soon, whichever file it stands in."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import redis

from chatserve.supervisor import append_sync
from chatserve.supervisor.append_sync import AppendSync, flush_to_disk
from chatserve.supervisor.embedded_store import EmbeddedStore

if TYPE_CHECKING:
    from collections.abc import Iterator


class Disk:
    """Notes up to where each file was forced to it."""

    def __init__(self) -> None:
        self.reached: dict[int, int] = {}
        """By inode, in bytes."""
        self.num_flushes = 0
        self.failures_left = 0
        self.flushed = threading.Event()

    def flush(self, descriptor: int) -> None:
        if self.failures_left:
            self.failures_left -= 1
            raise OSError(5, "Input/output error")
        flush_to_disk(descriptor)
        found = os.fstat(descriptor)
        self.reached[found.st_ino] = found.st_size
        self.num_flushes += 1
        self.flushed.set()

    def has(self, path: Path) -> bool:
        found = path.stat()
        return self.reached.get(found.st_ino, 0) == found.st_size


@pytest.fixture
def disk() -> Disk:
    return Disk()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EmbeddedStore]:
    store = EmbeddedStore(tmp_path, tmp_path / "run" / "store.sock")
    store.start()
    yield store
    store.stop()


def test_every_acknowledged_byte_is_forced_to_the_disk(store: EmbeddedStore, disk: Disk) -> None:
    files = store.directory / "appendonlydir"
    sync = AppendSync(files, disk.flush)
    with redis.Redis.from_url(store.url) as client:
        for number in range(3):
            client.set(f"k{number}", b"x" * 1000)
            sync.sync()
            assert all(disk.has(path) for path in files.glob("*.aof"))
        client.bgrewriteaof()  # from now on other files are appended to
        while client.info("persistence")["aof_rewrite_in_progress"]:
            client.ping()
        client.set("after", b"y" * 1000)
        sync.sync()
        grown = [path for path in files.glob("*.incr.aof") if path.stat().st_size > 0]
        assert grown
        assert all(disk.has(path) for path in grown)


def test_what_did_not_grow_is_left_alone(tmp_path: Path, disk: Disk) -> None:
    (tmp_path / "a.1.incr.aof").write_bytes(b"acknowledged")
    sync = AppendSync(tmp_path, disk.flush)
    sync.sync()
    sync.sync()
    assert disk.num_flushes == 1


def test_one_file_that_fails_does_not_keep_the_others_from_the_disk(tmp_path: Path, disk: Disk) -> None:
    files = [tmp_path / f"a.{number}.incr.aof" for number in range(3)]
    for path in files:
        path.write_bytes(b"acknowledged")
    disk.failures_left = 1
    sync = AppendSync(tmp_path, disk.flush)
    with pytest.raises(OSError, match="Input/output"):
        sync.sync()
    assert sum(disk.has(path) for path in files) == 2
    sync.sync()
    assert all(disk.has(path) for path in files)


def test_a_disk_that_fails_is_tried_again(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(append_sync, "SYNC_EVERY_S", 0.001)
    (tmp_path / "a.1.incr.aof").write_bytes(b"acknowledged")
    sync = AppendSync(tmp_path, disk.flush)
    disk.failures_left = 1
    with pytest.raises(OSError, match="Input/output"):
        sync.sync()
    disk.failures_left = 3
    sync.start()
    assert disk.flushed.wait(20)
    sync.stop()
    assert disk.has(tmp_path / "a.1.incr.aof")
    assert caplog.text.count("power must not fail now: [Errno 5] Input/output error") == 1


def test_files_that_go_meanwhile_are_nothing_to_complain_of(tmp_path: Path, disk: Disk) -> None:
    sync = AppendSync(tmp_path / "not made yet", disk.flush)
    sync.sync()
    assert disk.num_flushes == 0
