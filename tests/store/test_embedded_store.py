"""The server that comes with the program: its files, its life, its death."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import redis

from chatserve.errors import StartupError
from chatserve.supervisor.embedded_store import EmbeddedStore, find_server
from chatserve.supervisor.paths import short_socket_path
from chatserve.supervisor.store_advice import explain_log


@pytest.fixture
def make(binary: Path, tmp_path: Path) -> Iterator[Callable[..., EmbeddedStore]]:
    made: list[EmbeddedStore] = []

    def build(directory: Path = tmp_path, **options: object) -> EmbeddedStore:
        made.append(EmbeddedStore(directory, directory / "run" / "store.sock", **{"binary": binary, **options}))
        return made[-1]

    yield build
    for store in made:
        store.stop()


@contextlib.contextmanager
def client(store: EmbeddedStore) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(store.url) as opened:
        yield opened


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


OTHER_PARENT = """
    import sys
    from pathlib import Path
    import redis
    from chatserve.supervisor.embedded_store import EmbeddedStore
    store = EmbeddedStore(Path(sys.argv[1]), Path(sys.argv[1]) / "run" / "store.sock", binary=Path(sys.argv[2]))
    store.start()
    with redis.Redis.from_url(store.url) as client:
        client.set("acknowledged", "yes")
    print(store.pid, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def other_parent(binary: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Another process that runs a store on `tmp_path` and has had a write acknowledged; and the store's pid."""
    command = [sys.executable, "-c", textwrap.dedent(OTHER_PARENT), str(tmp_path), str(binary)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        yield process, pid
        process.kill()
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()


def test_data_survive_a_stop_and_nothing_else_is_left(make: Callable[..., EmbeddedStore]) -> None:
    store = make()
    store.start()
    with client(store) as opened:
        opened.set("k", "\0")
        assert opened.config_get("port")["port"] == "0"
        assert opened.config_get("maxmemory-policy")["maxmemory-policy"] == "noeviction"
        # `everysec` would hold writes back while the disk is busy, and acknowledge them: a SIGKILL then loses them.
        assert opened.config_get("appendfsync")["appendfsync"] == "no"
    pid = store.pid
    assert pid is not None
    assert store.poll() is None
    assert not psutil.Process(pid).net_connections("tcp")
    assert os.getsid(pid) != os.getsid(0)
    store.stop()
    assert not is_running(pid)
    assert not store.socket_path.exists()
    assert {path.name for path in store.directory.iterdir()} == {"appendonlydir", "store.log"}
    store.stop()

    store.start()
    with client(store) as opened:
        assert opened.get("k") == b"\0"


def test_only_the_user_can_reach_what_is_kept(make: Callable[..., EmbeddedStore]) -> None:
    store = make()
    store.start()
    for path in (store.directory, store.socket_path, store.socket_path.parent, *store.directory.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_fsync_can_be_set_to_always(make: Callable[..., EmbeddedStore]) -> None:
    store = make(fsync="always")
    store.start()
    with client(store) as opened:
        assert opened.config_get("appendfsync")["appendfsync"] == "always"


def test_a_path_with_blanks_quotes_and_accents_works(make: Callable[..., EmbeddedStore], tmp_path: Path) -> None:
    store = make(tmp_path / 'a "b"\\ ?c#% é')
    store.start()
    with client(store) as opened:
        assert opened.ping()


def test_a_path_too_long_for_a_socket_is_replaced_by_a_private_one(
    make: Callable[..., EmbeddedStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / ("long" * 30)
    store = make(directory)
    store.start()
    assert len(os.fsencode(store.socket_path)) <= 100
    assert stat.S_IMODE(store.socket_path.parent.stat().st_mode) == 0o700
    with client(store) as opened:
        assert opened.ping()
    store.stop()
    assert not store.socket_path.parent.exists()
    # Somebody else was there first.
    store.socket_path.parent.mkdir(mode=0o777)
    store.socket_path.parent.chmod(0o777)
    try:
        with pytest.raises(StartupError, match="cannot keep sessions"):
            store.start()
        with pytest.raises(PermissionError):
            short_socket_path(directory / "run" / "store.sock")
    finally:
        store.socket_path.parent.rmdir()


def test_the_server_dies_with_a_parent_that_is_killed_and_keeps_what_it_acknowledged(
    make: Callable[..., EmbeddedStore], other_parent: tuple[subprocess.Popen[str], int]
) -> None:
    parent, pid = other_parent
    parent.kill()
    wait_until(lambda: not is_running(pid))
    store = make()
    store.start()
    with client(store) as opened:
        assert opened.get("acknowledged") == b"yes"


def test_a_server_left_over_from_a_killed_run_is_seen_out(
    make: Callable[..., EmbeddedStore], other_parent: tuple[subprocess.Popen[str], int]
) -> None:
    parent, pid = other_parent
    for watcher in psutil.Process(pid).children():
        watcher.kill()  # so that nothing ends the server when its parent is gone
    parent.kill()
    parent.wait()
    assert is_running(pid)
    store = make()
    store.start()
    assert not is_running(pid)
    assert store.pid != pid
    with client(store) as opened:
        assert opened.get("acknowledged") == b"yes"


def test_a_stale_pid_file_harms_nobody(make: Callable[..., EmbeddedStore], tmp_path: Path) -> None:
    store = make()
    store.start()
    store.stop()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as bystander:
        for content in (str(bystander.pid), "", "no number", "-1", "0"):
            (store.directory / "store.pid").write_text(content)
            with contextlib.closing(socket.socket(socket.AF_UNIX)) as stale:
                stale.bind(str(store.socket_path))
            store.start()
            store.stop()
        assert bystander.poll() is None
        bystander.communicate(b"\n")


def test_a_killed_server_can_be_started_again(make: Callable[..., EmbeddedStore]) -> None:
    store = make()
    store.start()
    url = store.url
    with client(store) as opened:
        opened.set("k", "v")
    assert store.pid is not None
    os.kill(store.pid, signal.SIGKILL)
    wait_until(lambda: store.poll() is not None)
    store.stop()
    store.start()
    assert store.url == url
    with client(store) as opened:
        assert opened.get("k") == b"v"


def append_only_file(store: EmbeddedStore) -> Path:
    (found,) = (store.directory / "appendonlydir").glob("*.incr.aof")
    return found


def test_a_torn_end_of_the_append_only_file_costs_that_end_only(make: Callable[..., EmbeddedStore]) -> None:
    store = make()
    store.start()
    with client(store) as opened:
        opened.mset({f"k{i}": "v" for i in range(100)})
        opened.set("last", "v")
    store.stop()
    os.truncate(append_only_file(store), append_only_file(store).stat().st_size - 3)
    store.start()
    with client(store) as opened:
        assert opened.dbsize() == 100
        assert opened.get("last") is None


def test_a_damaged_append_only_file_is_refused_with_a_way_to_repair_it(make: Callable[..., EmbeddedStore]) -> None:
    store = make()
    store.start()
    with client(store) as opened:
        for i in range(100):
            opened.set(f"k{i}", "v")
    store.stop()
    data = append_only_file(store).read_bytes()
    middle = data.index(b"k50") - 4
    append_only_file(store).write_bytes(data[:middle] + b"xxxxxxxx" + data[middle + 8 :])
    with pytest.raises(StartupError) as failed:
        store.start()
    line = str(failed.value)
    assert "damaged" in line
    assert "\n" not in line

    repair = line.partition("begins with: ")[2].partition(" (it said")[0]
    subprocess.run(repair, shell=True, input=b"y\n", check=True, stdout=subprocess.DEVNULL)
    store.start()
    with client(store) as opened:
        assert opened.get("k49") == b"v"
        assert opened.get("k51") is None


def test_a_directory_that_cannot_be_made_is_one_clear_line(make: Callable[..., EmbeddedStore], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StartupError, match=r"cannot keep sessions in .*--data-dir") as failed:
        make(tmp_path / "file").start()
    assert "\n" not in str(failed.value)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
def test_a_full_disk_is_one_clear_line(make: Callable[..., EmbeddedStore]) -> None:
    store = make()
    store.directory.mkdir(parents=True)
    (store.directory / "probe").symlink_to("/dev/full")
    with pytest.raises(StartupError, match="No space left on device; free some space") as failed:
        store.start()
    assert "\n" not in str(failed.value)
    store.start()  # the probe is gone, and there is room


FAKE_SERVER = """\
    #!{python}
    import socket, sys
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(sys.argv[sys.argv.index("--unixsocket") + 1])
    listener.listen()
    loading = b"-LOADING the dataset is being read\\r\\n"
    pings = [loading, loading, loading, b"+PONG\\r\\n"]
    while pings:
        connection, _ = listener.accept()
        while data := connection.recv(4096):
            if b"PING" in data:
                connection.sendall(pings.pop(0))
            else:
                connection.sendall(b"+OK\\r\\n" * max(1, data.count(b"*")))
"""


def fake_server(directory: Path, text: str) -> Path:
    path = directory / "fake-server"
    path.write_text(textwrap.dedent(text).replace("{python}", sys.executable))
    path.chmod(0o700)
    return path


def test_loading_is_waited_for(tmp_path: Path) -> None:
    store = EmbeddedStore(tmp_path, tmp_path / "s.sock", binary=fake_server(tmp_path, FAKE_SERVER))
    store.start()
    assert store._process is not None
    assert store._process.wait(20) == 0, "it ends when it has been asked often enough to have loaded all"
    store.stop()


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("Can't open or create append-only dir x: No space left on device", "is full; free some space"),
        ("Can't open the append-only file: Permission denied", "cannot be written; check its owner"),
        ("1:M Fatal: something new", "something new"),
        ("", "it said nothing"),
    ],
)
def test_a_server_that_gives_up_is_explained_in_one_line(tmp_path: Path, said: str, expected: str) -> None:
    failing = fake_server(tmp_path, f'#!/bin/sh\necho first line\necho "{said}"\nexit 1\n' if said else "#!/bin/sh\n")
    store = EmbeddedStore(tmp_path, tmp_path / "s.sock", binary=failing)
    with pytest.raises(StartupError) as failed:
        store.start()
    assert expected in str(failed.value)
    assert "\n" not in str(failed.value)
    assert store.pid is None


def test_a_server_that_is_killed_at_its_start_is_said_to_be(tmp_path: Path) -> None:
    killed = fake_server(tmp_path, "#!/bin/sh\necho all is well\nkill -KILL $$\n")
    with pytest.raises(StartupError, match="it ended with signal SIGKILL"):
        EmbeddedStore(tmp_path, tmp_path / "s.sock", binary=killed).start()


def test_a_process_that_cannot_be_made_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    store = EmbeddedStore(tmp_path, tmp_path / "s.sock", binary=Path("/bin/true"))
    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(StartupError, match="the store cannot be started: " + os.strerror(errno.EAGAIN)):
        store.start()
    assert store.pid is None


def test_an_earlier_runs_log_does_not_explain_this_one(tmp_path: Path) -> None:
    store = EmbeddedStore(
        tmp_path, tmp_path / "s.sock", binary=fake_server(tmp_path, "#!/bin/sh\necho fatal\nexit 1\n")
    )
    store.directory.mkdir()
    store.log_path.write_text("No space left on device\n")
    with pytest.raises(StartupError, match="fatal"):
        store.start()
    assert "it said nothing" in explain_log("", tmp_path, find_server())
