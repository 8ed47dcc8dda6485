"""Writing a snapshot: in time, as far as there is room, whole or not at all, and for its owner alone."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from chatserve.cache import snapshot_files
from chatserve.config import KV_SNAPSHOT_S
from tests.engine.talk import Talk, make_runner, manifest_of, prompt_of, warnings_of


def test_files_are_their_owners_alone(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "snapshot"
    talk = Talk(directory)
    talk.say(prompt_of(1, 30))
    talk.end()
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}


@pytest.mark.parametrize("fail_at", [0, 1, 5, 12])
def test_a_full_disk_costs_a_line_and_leaves_the_old_snapshot(
    fail_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk is full at the n-th write, manifest included."""
    before = Talk(tmp_path)
    said = before.say(prompt_of(1, 36))
    before.end()
    files = {path.name for path in tmp_path.iterdir()}
    between = Talk(tmp_path)
    between.say([*said, 1, 2])
    writes = 0
    real = os.write

    def write(fd: int, content: memoryview) -> int:
        nonlocal writes
        writes += 1
        if writes > fail_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, content[: len(content) // 2 + 1])  # and never all at once

    monkeypatch.setattr(os, "write", write)
    between.end()
    monkeypatch.undo()
    (line,) = warnings_of(caplog)
    assert "No space left on device" in line
    assert {path.name for path in tmp_path.iterdir()} == files
    after = Talk(tmp_path)
    after.say([*said, 1])
    assert after.computed() <= 2


def test_a_disk_without_room_is_left_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = shutil.disk_usage(tmp_path)
    block_bytes = make_runner().block_bytes().block_bytes
    for free, num_blocks in ((snapshot_files.RESERVED_BYTES + 3 * block_bytes, 3), (1000, 3)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        talk = Talk(tmp_path)
        talk.say(prompt_of(1, 36))
        talk.end()
        assert len(manifest_of(tmp_path).blocks) == num_blocks
    assert "no room" in warnings_of(caplog)[0]


def test_it_ends_in_time_with_what_it_has(tmp_path: Path) -> None:
    """By a clock on which each look takes a while: a disk that is slow."""
    talk = Talk(tmp_path, make_runner(512, 0))
    said = [talk.say(prompt_of(seed, 200)) for seed in range(6)]
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 4.5
        return now

    assert talk.engine._snapshot is not None
    talk.engine._snapshot._clock = clock
    talk.end()
    assert now <= KV_SNAPSHOT_S + 3 * 4.5
    saved = len(manifest_of(tmp_path).blocks)
    assert 0 < saved < 6 * 50
    after = Talk(tmp_path, make_runner(512, 512))
    after.say([*said[-1], 1])
    assert after.computed() <= 2


def test_a_directory_that_cannot_be_written_costs_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    talk = Talk(tmp_path / "file" / "below")
    talk.say(prompt_of(1, 10))
    (tmp_path / "file").write_text("in the way")
    talk.end()
    assert len(warnings_of(caplog)) == 1


def test_what_a_dead_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    writer = snapshot_files.SnapshotWriter(tmp_path)
    writer.append(memoryview(b"half of a snapshot"))
    talk = Talk(tmp_path)
    talk.say(prompt_of(1, 10))
    talk.end()
    assert len(list(tmp_path.iterdir())) == 2
    writer.discard()


def test_a_reader_keeps_its_blocks_when_a_writer_replaces_the_snapshot(tmp_path: Path) -> None:
    first = Talk(tmp_path)
    said = first.say(prompt_of(1, 40))
    first.end()
    reader = Talk(tmp_path)
    other = Talk(tmp_path, model="other")
    other.say(prompt_of(2, 10))
    other.end()
    reader.say([*said, 1])
    assert reader.computed() <= 2
