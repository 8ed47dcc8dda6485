"""A disk that fills up: what was acknowledged is kept, and writing goes on when there is room."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from chatserve.supervisor.store_room import ENOUGH_FREE_BYTES, LEAST_FREE_BYTES, RESERVE_BYTES, StoreRoom


def test_it_is_short_below_the_least_and_until_there_is_enough(tmp_path: Path) -> None:
    free = ENOUGH_FREE_BYTES
    room = StoreRoom(tmp_path, lambda _: free)
    for free, short in (
        (LEAST_FREE_BYTES, False),
        (LEAST_FREE_BYTES - 1, True),
        (LEAST_FREE_BYTES + RESERVE_BYTES, True),
        (ENOUGH_FREE_BYTES - 1, True),
        (ENOUGH_FREE_BYTES, False),
        (LEAST_FREE_BYTES, False),
    ):
        assert room.judge() is short, free
    assert room.judge(is_failing=True), "a quota may leave the disk free and still refuse"


def test_the_reserve_takes_real_room_and_gives_it_back(tmp_path: Path) -> None:
    room = StoreRoom(tmp_path)
    assert not room.prepare()
    assert (tmp_path / "reserve").stat().st_blocks * 512 >= RESERVE_BYTES
    room.set_aside()
    room.give_up()
    room.give_up()
    assert list(tmp_path.iterdir()) == []


def test_without_room_there_is_no_reserve(tmp_path: Path) -> None:
    room = StoreRoom(tmp_path, lambda _: LEAST_FREE_BYTES - 1)
    (tmp_path / "reserve").touch()
    assert room.prepare()
    assert list(tmp_path.iterdir()) == []


FILL_THE_DISK = """
    import os, shutil, signal, sys, time
    from pathlib import Path
    import redis
    from chatserve.supervisor.embedded_store import EmbeddedStore
    disk = Path(sys.argv[1])
    store = EmbeddedStore(disk / "data", disk / "s", binary=Path(sys.argv[2]))
    acknowledged = []

    def write_until_refused():
        with redis.Redis.from_url(store.url) as client:
            while True:
                name = f"k{len(acknowledged)}"
                try:
                    client.set(name, "x" * 20_000)
                except redis.ResponseError as error:
                    return str(error)
                acknowledged.append(name)

    def fill():
        (disk / "others").write_bytes(bytes(shutil.disk_usage(disk).free - 300_000))

    def missing():
        with redis.Redis.from_url(store.url) as client:
            return [name for name in acknowledged if not client.exists(name)]

    store.start()
    # Sooner full than anybody looks: the server finds out by itself, after a reply.
    fill()
    assert "No space left" in write_until_refused()
    assert "is full: no more is saved until 48 MiB are free" in store.watch_room()
    assert store.watch_room() is None, "said once"
    with redis.Redis.from_url(store.url) as client:
        deadline = time.monotonic() + 20
        while client.info("persistence")["aof_last_write_status"] != "ok":
            assert time.monotonic() < deadline
    assert write_until_refused().startswith("NOREPLICAS"), "the room was for what had been taken"
    os.kill(store.pid, signal.SIGKILL)
    store._process.wait()
    store.stop()
    store.start()
    assert missing() == [], "killed"
    assert write_until_refused().startswith("NOREPLICAS"), "a successor takes nothing either"

    (disk / "others").unlink()
    assert "has room again" in store.watch_room()
    with redis.Redis.from_url(store.url) as client:
        client.set("again", "x")

    # Full, and ended in order before anybody looks.
    fill()
    assert "No space left" in write_until_refused()
    store.stop()
    (disk / "others").unlink()
    store.start()
    assert missing() == [], "ended"
    store.stop()

    # Slowly full: it ends before the server sees an error.
    store.start()
    (disk / "others").write_bytes(bytes(shutil.disk_usage(disk).free - (15 << 20)))
    store.watch_room()
    assert write_until_refused().startswith("NOREPLICAS")
    store.stop()
    print("kept", len(acknowledged))
"""


def in_a_small_disk(directory: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command with a file system of 80 MiB at `directory` that nobody else sees."""
    mounted = f'mount -t tmpfs -o size=80m tmpfs "{directory}" && exec "$@"'
    return subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mounted, "sh", *command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_what_was_acknowledged_on_a_disk_that_filled_up_outlives_the_server(binary: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    try:
        tried = in_a_small_disk(disk, ["true"])
    except FileNotFoundError:
        pytest.skip("no unshare on this machine")
    if tried.returncode:
        pytest.skip(f"no file system of one's own here: {tried.stderr.strip()}")
    ran = in_a_small_disk(disk, [sys.executable, "-c", textwrap.dedent(FILL_THE_DISK), str(disk), str(binary)])
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout.split()[1]) > 20
