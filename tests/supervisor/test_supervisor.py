"""The supervisor with fake children, which tell on its standard output when they start and end. The output's end is the
proof that nothing was left running: every child holds it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from redis import Redis, RedisError
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from chatserve.config import ServeSettings, WebSettings, decode_settings, encode_settings, hand_over_settings
from chatserve.supervisor import paths
from chatserve.supervisor.embedded_store import EmbeddedStore

TIMEOUT_S = 20


class Run:
    """A supervisor's process under test."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.pids: dict[str, int] = {}

    async def line(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(TIMEOUT_S):
            line = (await self.process.stdout.readline()).decode().strip()
        words = line.split()
        if len(words) == 3 and words[1] == "starts":
            self.pids[words[0]] = int(words[2])
        return line

    async def until(self, wanted: str) -> list[str]:
        """Lines up to the one that begins with `wanted`, which is the last."""
        seen: list[str] = []
        while not seen or not seen[-1].startswith(wanted):
            seen.append(await self.line())
            assert seen[-1], f"the output ended before {wanted!r}: {seen}"
        return seen

    async def rest(self) -> tuple[int, str, str]:
        """Exit code, and what else was said, once all have ended."""
        async with asyncio.timeout(TIMEOUT_S):
            out, err = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, out.decode(), err.decode()


@contextlib.asynccontextmanager
async def supervised(
    data_dir: Path, *, engine: str = "run", web: str = "run", store: str = "fake", **options: object
) -> AsyncIterator[Run]:
    settings = ServeSettings(data_dir=data_dir, cache_dir=data_dir, **{"port": 0, **options})  # type: ignore[arg-type]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("run_with_fakes.py")),
        encode_settings(settings),
        engine,
        web,
        store,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    try:
        yield Run(process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


async def test_prints_the_address_when_ready_and_ends_web_then_engine_then_store(tmp_path: Path) -> None:
    async with supervised(tmp_path) as run:
        seen = await run.until("ChatServe is ready at http://127.0.0.1:")
        assert {line.split()[0] for line in seen[:-1]} == {"store", "engine", "web"}
        run.process.send_signal(signal.SIGTERM)
        code, out, err = await run.rest()
        assert code == 0
        assert [line.split()[0] for line in out.splitlines() if "ends" in line] == ["web", "engine", "store"]
        assert err == ""


@pytest.mark.parametrize("child", ["engine", "web"])
async def test_a_dead_child_is_started_again(tmp_path: Path, child: str) -> None:
    async with supervised(tmp_path) as run:
        await run.until("ChatServe is ready")
        first = run.pids[child]
        os.kill(first, signal.SIGKILL)
        await run.until(f"{child} starts")
        assert run.pids[child] != first
        run.process.send_signal(signal.SIGINT)
        code, _, err = await run.rest()
        assert code == 0
        assert f"the {child} process ended with signal SIGKILL; starting it again" in err


async def test_an_engine_that_keeps_dying_is_said_to_and_the_rest_goes_on(tmp_path: Path) -> None:
    async with supervised(tmp_path) as run:
        await run.until("ChatServe is ready")
        for _ in range(2):
            os.kill(run.pids["engine"], signal.SIGKILL)
            await run.until("engine starts")
        os.kill(run.pids["engine"], signal.SIGKILL)
        assert run.process.stderr is not None
        async with asyncio.timeout(TIMEOUT_S):
            while b"3 times within 60 s" not in await run.process.stderr.readline():
                pass
        assert alive(run.pids["web"])
        run.process.send_signal(signal.SIGTERM)
        code, out, _ = await run.rest()
        assert code == 0
        assert "store ends" in out


async def test_nothing_outlives_a_supervisor_that_was_killed(tmp_path: Path) -> None:
    async with supervised(tmp_path) as run:
        await run.until("ChatServe is ready")
        run.process.kill()
        _, out, _ = await run.rest()  # the output ends when the last holder has ended
        assert {line.split()[0] for line in out.splitlines() if "ends" in line} == {"web", "engine"}
        # A process closes its output a moment before it is gone, and no event tells of a stranger's child.
        async with asyncio.timeout(TIMEOUT_S):
            while any(alive(pid) for name, pid in run.pids.items() if name != "store"):  # noqa: ASYNC110
                await asyncio.sleep(0)


def processes_of(data_dir: Path) -> set[int]:
    """All processes, wherever they hang in the tree, that were started with something in `data_dir`."""
    found = set()
    for process in psutil.process_iter(["pid", "cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(
            str(data_dir) in word for word in process.info["cmdline"] or ()
        ):
            found.add(process.info["pid"])
    return found


async def test_the_store_does_not_outlive_it_either_and_its_data_serves_the_next_one(tmp_path: Path) -> None:
    async with supervised(tmp_path, store="real") as run:
        await run.until("ChatServe is ready")
        running = processes_of(tmp_path)
        assert len(running) >= 4  # itself, engine, web, store and the shell that ties it to us
        run.process.kill()
        await run.rest()
        gone, alive = await asyncio.to_thread(
            psutil.wait_procs, [psutil.Process(pid) for pid in running if psutil.pid_exists(pid)], TIMEOUT_S
        )
        assert alive == [], gone
    async with supervised(tmp_path, store="real") as run:
        await run.until("ChatServe is ready")
        run.process.send_signal(signal.SIGTERM)
        assert (await run.rest())[0] == 0
    assert processes_of(tmp_path) == set()


async def test_a_dead_store_is_started_again(tmp_path: Path) -> None:
    async with supervised(tmp_path, store="real") as run:
        await run.until("ChatServe is ready")
        store = EmbeddedStore(tmp_path, paths.socket_dir(tmp_path) / "store.sock")
        with Redis.from_url(store.url) as redis:
            pid = redis.info("server")["process_id"]
            redis.set("kept", "value")
            os.kill(pid, signal.SIGKILL)
            assert run.process.stderr is not None
            async with asyncio.timeout(TIMEOUT_S):
                assert b"the store process ended; starting it again" in await run.process.stderr.readline()
        retrying = Redis.from_url(store.url, retry=Retry(ConstantBackoff(0.05), 200), retry_on_error=[RedisError])
        with retrying as redis:
            assert await asyncio.to_thread(redis.get, "kept") == b"value"
            assert redis.info("server")["process_id"] != pid
        run.process.send_signal(signal.SIGTERM)
        assert (await run.rest())[0] == 0


async def test_a_child_that_will_not_end_is_killed_in_time(tmp_path: Path) -> None:
    async with supervised(tmp_path, engine="stubborn") as run:
        await run.until("ChatServe is ready")
        run.process.send_signal(signal.SIGTERM)
        code, out, _ = await run.rest()
        assert code == 0
        assert not alive(run.pids["engine"])
        assert out.splitlines()[-1].startswith("store ends")


async def test_a_child_that_said_why_it_cannot_start_is_not_talked_over(tmp_path: Path) -> None:
    async with supervised(tmp_path, engine="exit-1") as run:
        code, out, err = await run.rest()
        assert code == 1
        assert err == ""
        assert "ready" not in out


@pytest.mark.parametrize(("mode", "said"), [("exit-3", "exit code 3"), ("kill", "signal SIGKILL")])
async def test_a_child_that_ended_without_a_word_is_named(tmp_path: Path, mode: str, said: str) -> None:
    async with supervised(tmp_path, engine=mode) as run:
        code, _, err = await run.rest()
        assert code == 1
        assert err.startswith(f"chatserve: the engine process ended with {said} before it was ready")
        assert len(err.splitlines()) == 1


async def test_a_second_server_on_the_same_data_is_refused(tmp_path: Path) -> None:
    async with supervised(tmp_path) as first:
        await first.until("ChatServe is ready")
        async with supervised(tmp_path) as second:
            code, out, err = await second.rest()
            assert code == 1
            assert f"another chatserve (process {first.process.pid}) is using {tmp_path}" in err
            assert len(err.splitlines()) == 1
            assert out == ""


async def test_a_taken_port_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        async with supervised(tmp_path, port=port) as run:
            code, out, err = await run.rest()
            assert code == 1
            assert err == f"chatserve: port {port} is taken by another program; stop it, or choose another --port\n"
            assert out == ""


async def test_a_port_that_a_killed_run_still_holds_is_waited_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        (tmp_path / "serve.pid").write_text("1\n")  # an orderly end would have removed it
        async with supervised(tmp_path, port=port) as run:
            assert run.process.stderr is not None
            async with asyncio.timeout(TIMEOUT_S):
                assert f"port {port} is still taken".encode() in await run.process.stderr.readline()
            held.close()
            await run.until("ChatServe is ready")
            run.process.send_signal(signal.SIGTERM)
            assert (await run.rest())[0] == 0
    assert not (tmp_path / "serve.pid").exists()


async def test_an_open_address_without_tokens_is_refused(tmp_path: Path) -> None:
    async with supervised(tmp_path, host="0.0.0.0") as run:
        code, out, err = await run.rest()
        assert code == 1
        assert "refusing to listen on 0.0.0.0 without a token" in err
        assert "--tokens-file" in err
        assert len(err.splitlines()) == 1
        assert out == ""


async def test_a_redis_that_is_away_at_the_start_is_one_line_without_its_password(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    async with supervised(tmp_path, redis_url=f"redis://:secret@127.0.0.1:{port}/0") as run:
        code, out, err = await run.rest()
        assert code == 1
        assert f"cannot reach Redis at redis://:***@127.0.0.1:{port}/0" in err
        assert "secret" not in err
        assert len(err.splitlines()) == 1
        assert out == ""


async def test_stopping_during_the_start_leaves_nothing(tmp_path: Path) -> None:
    async with supervised(tmp_path, web="stubborn") as run:
        await run.until("store starts")
        run.process.send_signal(signal.SIGTERM)
        code, out, _ = await run.rest()
        assert code == 0
        assert out.splitlines()[-1].startswith("store ends")


async def test_no_secret_of_the_settings_stands_on_a_childs_command_line(tmp_path: Path) -> None:
    settings = WebSettings(
        serve=ServeSettings(data_dir=tmp_path, cache_dir=tmp_path),
        model_dir=tmp_path,
        engine_socket=tmp_path / "engine.sock",
        redis_url="redis://:a-secret@127.0.0.1:6379",
    )
    path = tmp_path / "web.json"
    path.touch(mode=0o644)
    argument = hand_over_settings(settings, path)
    assert "a-secret" not in argument
    assert path.stat().st_mode & 0o777 == 0o600
    assert decode_settings(argument, WebSettings) == settings
