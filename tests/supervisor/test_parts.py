"""Parts of the supervisor by themselves: restart policy, addresses, directories."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chatserve.config import KV_SNAPSHOT_S, ServeSettings
from chatserve.errors import StartupError
from chatserve.server import auth
from chatserve.supervisor import network, paths
from chatserve.supervisor.children import RestartPolicy, describe_exit
from chatserve.supervisor.supervisor import GraceTimes, Supervisor


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=30))
def test_restarts_are_slow_exactly_while_three_deaths_lie_within_the_window(gaps: list[float]) -> None:
    policy = RestartPolicy(deaths=3, window_s=60.0, first_delay_s=0.25, slow_delay_s=30.0)
    now, times = 0.0, []
    for gap in gaps:
        now += gap
        times.append(now)
        delay_s = policy.died(now)
        recent = [time for time in times if time > now - 60.0]
        assert policy.failing == (len(recent) >= 3)
        assert delay_s == (30.0 if policy.failing else 0.25 * 2 ** (len(recent) - 1))


def test_an_exit_is_described_for_a_person() -> None:
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-9) == "signal SIGKILL"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost", "LOCALHOST."])
def test_loopback_needs_no_token(host: str) -> None:
    network.check_exposure(host, None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "example.org", "localhost.example.org", ""])
def test_any_other_host_needs_one(host: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="chatserve token"):
        network.check_exposure(host, None)
    tokens = tmp_path / "tokens"
    with pytest.raises(StartupError, match="there is no token file"):
        network.check_exposure(host, tokens)
    auth.add_token(tokens, "alice")
    network.check_exposure(host, tokens)


async def test_a_snapshot_directory_that_cannot_be_one_is_said_before_anything_is_started(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = ServeSettings(data_dir=tmp_path / "data", cache_dir=tmp_path, port=0, kv_snapshot=tmp_path / "file")
    with pytest.raises(StartupError, match="file is not a directory; choose another --kv-snapshot"):
        await Supervisor(settings).run()


def test_an_engine_that_saves_its_kv_is_given_the_time(tmp_path: Path) -> None:
    settings = ServeSettings(data_dir=tmp_path, cache_dir=tmp_path)
    saving = ServeSettings(data_dir=tmp_path, cache_dir=tmp_path, kv_snapshot=tmp_path)
    assert GraceTimes.of(saving).engine_s == GraceTimes.of(settings).engine_s + KV_SNAPSHOT_S


async def test_an_allowed_origin_that_is_none_is_said_before_anything_is_started(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    settings = ServeSettings(data_dir=data_dir, cache_dir=tmp_path, port=0, allowed_origins=("app.example.org",))
    with pytest.raises(StartupError, match="--allowed-origin 'app"):
        await Supervisor(settings).run()
    assert not data_dir.exists()


def test_a_socket_listens_before_anybody_serves_it() -> None:
    with network.listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        pass


def test_an_address_of_another_machine_is_refused_in_a_sentence() -> None:
    with pytest.raises(StartupError, match="is not an address of this machine"):
        network.listen("192.0.2.1", 0)


@pytest.mark.parametrize(
    ("listen", "reach"),
    [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("localhost", "localhost")],
)
def test_the_printed_address_can_be_opened(listen: str, reach: str) -> None:
    assert network.reachable_host(listen) == reach


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:secret@h:1/0", "redis://:***@h:1/0"),
        ("rediss://user:se@cret@h/0", "rediss://user:***@h/0"),
        ("redis://h/0", "redis://h/0"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
    ],
)
def test_a_shown_url_has_no_password(url: str, shown: str) -> None:
    assert network.without_password(url) == shown


def test_a_full_disk_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"the disk of .* is full"):
        paths.prepare_data_dir(tmp_path, min_free_bytes=1 << 62)


def test_a_file_in_the_way_is_refused_in_a_sentence(tmp_path: Path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    for data_dir in (in_the_way, in_the_way / "below"):
        with pytest.raises(StartupError, match="is not a directory"):
            paths.prepare_data_dir(data_dir)


def test_the_data_directory_is_private(tmp_path: Path) -> None:
    paths.prepare_data_dir(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777, 0o2770])
def test_the_snapshot_directory_is_private_even_if_it_was_there(tmp_path: Path, mode: int) -> None:
    kept = tmp_path / "kv" / "manifest"
    kept.parent.mkdir()
    kept.touch(mode=0o600)
    kept.parent.chmod(mode)
    assert paths.prepare_snapshot_dir(kept.parent) is None
    assert kept.parent.stat().st_mode & 0o777 == 0o700
    assert kept.exists()
    assert paths.prepare_snapshot_dir(tmp_path / "new" / "kv") is None
    assert (tmp_path / "new" / "kv").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("mode", "file_mode"), [(0o1777, 0o600), (0o755, 0o644)])
def test_a_snapshot_directory_that_others_use_is_left_to_them_and_said(
    tmp_path: Path, mode: int, file_mode: int
) -> None:
    theirs = tmp_path / "shared" / "file"
    theirs.parent.mkdir()
    theirs.touch()
    theirs.chmod(file_mode)
    theirs.parent.chmod(mode)
    said = paths.prepare_snapshot_dir(theirs.parent)
    assert said is not None
    assert str(theirs.parent) in said
    assert "--kv-snapshot" in said
    assert theirs.parent.stat().st_mode & 0o7777 == mode


def test_the_lock_is_free_again_after_its_release(tmp_path: Path) -> None:
    paths.lock_data_dir(tmp_path).release()
    paths.lock_data_dir(tmp_path).release()


def test_sockets_fit_however_long_the_data_directory_is(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 90) / ("y" * 90)
    deep.mkdir(parents=True)
    run_dir = paths.socket_dir(deep)
    assert run_dir == paths.socket_dir(deep) != paths.socket_dir(deep.parent)
    assert run_dir.stat().st_mode & 0o777 == 0o700
    with socket.socket(socket.AF_UNIX) as probe:
        probe.bind(str(run_dir / "engine.sock"))
    (run_dir / "engine.sock").unlink()
    run_dir.rmdir()


def test_a_socket_directory_that_others_may_write_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    taken = paths.socket_dir(deep)
    os.chmod(taken, 0o777)  # noqa: PTH101
    with pytest.raises(StartupError, match="remove it"):
        paths.socket_dir(deep)
