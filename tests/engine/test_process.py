"""The engine as a process of its own: start, death, signals. The model is a fake, everything else is real."""

from __future__ import annotations

import asyncio
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
import pytest

from chatserve.config import EngineSettings, encode_settings
from chatserve.engine.client import EngineClient
from chatserve.engine.messages import EngineDown, Hello, StepOutput
from chatserve.errors import EngineUnavailableError
from tests.fakes.engines import Transcript, make_submit
from tests.fakes.fake_runner import FakeRunner

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 30.0
GREEDY = make_submit("x", (1,)).sampling


@pytest.fixture
def run_dir() -> Iterator[Path]:
    # Not tmp_path: a socket's path is at most 107 bytes long.
    with tempfile.TemporaryDirectory(prefix="cs") as directory:
        yield Path(directory)


def settings_of(run_dir: Path, **changes: object) -> EngineSettings:
    settings = EngineSettings(model_dir=run_dir, model_name="fake", socket_path=run_dir / "engine.sock")
    return msgspec.structs.replace(settings, **changes)


@contextmanager
def engine_process(
    settings: EngineSettings, *, gate: Path | None = None, module: str = "tests.fakes.fake_engine_process"
) -> Iterator[subprocess.Popen[str]]:
    environment = dict(os.environ, PYTHONPATH=f"{ROOT}:{ROOT / 'kernels'}")
    if gate is not None:
        environment["CHATSERVE_TEST_GATE"] = str(gate)
    process = subprocess.Popen(
        [sys.executable, "-m", module, "--settings", encode_settings(settings)],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=TIMEOUT_S)


@asynccontextmanager
async def connected(settings: EngineSettings) -> AsyncIterator[EngineClient]:
    client = EngineClient(settings.socket_path)
    await client.connect(TIMEOUT_S)
    try:
        yield client
    finally:
        await client.close()


async def read_until_finished(client: EngineClient, request_ids: Sequence[str]) -> Transcript:
    transcript = Transcript()
    async with asyncio.timeout(TIMEOUT_S):
        async for event in client.events():
            if isinstance(event, StepOutput):
                transcript.add(event)
            if set(request_ids) <= set(transcript.finished):
                break
    return transcript


async def test_it_serves_says_when_it_is_ready_and_ends_with_its_parents_pipe(run_dir: Path) -> None:
    settings = settings_of(run_dir)
    with engine_process(settings) as process:
        async with connected(settings) as client:
            assert client.info is not None
            assert client.info.model == "fake"
            client.submit(make_submit("a", range(20)))
            transcript = await read_until_finished(client, ["a"])
            assert transcript.text("a") == FakeRunner().oracle(range(20), GREEDY, num_output_tokens=8)
        _, log = await asyncio.to_thread(process.communicate, "", TIMEOUT_S)  # closes its stdin
        assert process.returncode == 0
    assert len([line for line in log.splitlines() if "ready: fake" in line]) == 1
    assert not settings.socket_path.exists()


async def test_a_parent_that_goes_while_the_model_loads_is_missed_at_once(run_dir: Path) -> None:
    gate = run_dir / "gate"
    os.mkfifo(gate)  # which nobody opens: the model is loaded for ever
    settings = settings_of(run_dir)
    with engine_process(settings, gate=gate) as process:
        async with asyncio.timeout(TIMEOUT_S):
            while not settings.socket_path.exists():  # noqa: ASYNC110 - another process makes it
                await asyncio.sleep(0.01)
        _, log = await asyncio.to_thread(process.communicate, "", TIMEOUT_S)  # closes its stdin
        assert process.returncode == 0
    assert "the parent process is gone" in log
    with engine_process(settings) as successor:
        async with connected(settings) as client:
            assert client.info is not None
        await asyncio.to_thread(successor.communicate, "", TIMEOUT_S)
        assert successor.returncode == 0


async def test_sigterm_lets_what_runs_finish(run_dir: Path) -> None:
    settings = settings_of(run_dir)
    with engine_process(settings) as process:
        async with connected(settings) as client:
            client.submit(make_submit("a", range(20), max_tokens=60))
            async with asyncio.timeout(TIMEOUT_S):
                async for event in client.events():
                    if isinstance(event, StepOutput) and event.started:
                        break
            process.send_signal(signal.SIGTERM)
            transcript = Transcript()
            async with asyncio.timeout(TIMEOUT_S):
                async for event in client.events():
                    if isinstance(event, EngineDown):
                        break
                    if isinstance(event, StepOutput):
                        for finished in event.finished:
                            transcript.finished[finished.request_id] = finished
        assert transcript.finished["a"].reason == "length"
        assert await asyncio.to_thread(process.wait, TIMEOUT_S) == 0


async def test_after_a_kill_a_new_process_takes_over_under_another_epoch(run_dir: Path) -> None:
    gate = run_dir / "gate"
    os.mkfifo(gate)
    settings = settings_of(run_dir)
    submit = make_submit("a", range(20), max_tokens=100)
    client = EngineClient(settings.socket_path)
    text: list[int] = []
    with engine_process(settings, gate=gate) as process:
        permits = await asyncio.to_thread(gate.open, "wb", buffering=0)
        await client.connect(TIMEOUT_S)
        events = client.events()
        first = await anext(events)
        client.submit(submit)
        permits.write(b"." * 10)
        async with asyncio.timeout(TIMEOUT_S):
            while len(text) < 5:
                event = await anext(events)
                if isinstance(event, StepOutput):
                    text += [token_id for delta in event.deltas for token_id in delta.token_ids]
        process.kill()
        async with asyncio.timeout(TIMEOUT_S):
            while not isinstance(event, EngineDown):
                event = await anext(events)
                if isinstance(event, StepOutput):
                    text += [token_id for delta in event.deltas for token_id in delta.token_ids]
        permits.close()
    assert 5 <= len(text) <= 10
    with pytest.raises(EngineUnavailableError):
        client.submit(submit)
    with engine_process(settings):
        async with asyncio.timeout(TIMEOUT_S):
            second = await anext(events)
        assert isinstance(first, Hello)
        assert isinstance(second, Hello)
        assert first.info.epoch != second.info.epoch
        # What was generated before the death goes along as output, and the text goes on where it was.
        client.submit(make_submit("a", [*range(20), *text], num_prompt_tokens=20, max_tokens=100))
        rest = (await read_until_finished(client, ["a"])).text("a")
        assert text + rest == FakeRunner().oracle(range(20), GREEDY, num_output_tokens=100)
        await client.close()


async def test_a_killed_clients_requests_are_cancelled(run_dir: Path) -> None:
    settings = settings_of(run_dir, kv_cache_memory="4096blocks")
    script = (
        "import socket, sys, time\n"
        "from pathlib import Path\n"
        "from chatserve.engine.framing import encode\n"
        "from tests.fakes.engines import make_submit\n"
        "s = socket.socket(socket.AF_UNIX)\n"
        "s.connect(sys.argv[1])\n"
        "s.recv(4096)\n"
        "s.sendall(encode(make_submit('a', range(20), max_tokens=50_000)))\n"
        "while True: s.recv(4096), print('.', flush=True)\n"
    )
    with engine_process(settings):
        async with connected(settings) as client:
            victim = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", script, str(settings.socket_path)),
                stdout=subprocess.PIPE,
                env=dict(os.environ, PYTHONPATH=f"{ROOT}:{ROOT / 'kernels'}"),
            )
            assert victim.stdout is not None
            await victim.stdout.readline()
            assert (await client.inspect()).running == 1
            victim.kill()
            await victim.communicate()
            async with asyncio.timeout(2.0):
                while (report := await client.inspect()).running:
                    pass
            assert report.device.pinned == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"socket_path": Path("/tmp") / ("x" * 120) / "engine.sock"}, "107 bytes"),
        ({"kv_cache_memory": "1blocks"}, "--kv-cache-memory"),
        ({"kv_snapshot_limit": "banana"}, "--kv-snapshot-limit must be"),
    ],
    ids=["socket path too long", "pool too small", "a size that is none"],
)
def test_what_keeps_it_from_starting_is_one_line(run_dir: Path, settings: dict[str, object], said: str) -> None:
    with engine_process(settings_of(run_dir, **settings)) as process:
        _, log = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert len(log.splitlines()) == 1
    assert said in log


async def test_an_engine_that_ends_while_it_loads_is_not_reported_by_who_waited_for_it(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path = run_dir / "engine.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        client = EngineClient(path)
        waiting = asyncio.create_task(client.connect(TIMEOUT_S))
        await asyncio.to_thread(select.select, [listener], [], [], TIMEOUT_S)
    # Closed without an accept, as by a process that ends: the connection is reset.
    path.unlink()
    with engine_process(settings_of(run_dir)):
        await waiting
        assert not [record for record in caplog.records if record.name == "chatserve.engine.client"]
        await client.close()


def test_settings_that_are_none_are_refused_with_a_usage_line() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "chatserve.engine.process", "--settings", "{}"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env=dict(os.environ, PYTHONPATH=f"{ROOT}:{ROOT / 'kernels'}"),
        check=False,
    )
    assert process.returncode == 2
    assert "model_dir" in process.stderr


def test_neither_the_client_nor_the_loop_imports_torch() -> None:
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "import chatserve.engine.client, chatserve.engine.process, chatserve.sched.scheduler\n"
    )
    subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        timeout=TIMEOUT_S,
        env=dict(os.environ, PYTHONPATH=f"{ROOT}:{ROOT / 'kernels'}"),
    )


async def test_kv_outlives_an_orderly_end_and_no_other(run_dir: Path) -> None:
    settings = settings_of(run_dir, kv_snapshot=run_dir / "kv")
    prompt, computed = list(range(40)), []
    for end in (signal.SIGKILL, signal.SIGTERM, signal.SIGTERM):
        with engine_process(settings) as process:
            async with connected(settings) as client:
                client.submit(make_submit("r", prompt))
                transcript = await read_until_finished(client, ["r"])
            computed.append(transcript.started["r"].computed_tokens)
            process.send_signal(end)
            # As the supervisor does it: the pipe closes right behind the signal.
            process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == (0 if end == signal.SIGTERM else -signal.SIGKILL)
        assert (run_dir / "kv").exists() == (end == signal.SIGTERM)
    assert computed == [40, 40, 1]


async def test_an_engine_whose_parent_died_leaves_no_snapshot(run_dir: Path) -> None:
    """The next server may be starting already."""
    settings = settings_of(run_dir, kv_snapshot=run_dir / "kv")
    with engine_process(settings) as process:
        async with connected(settings) as client:
            client.submit(make_submit("r", list(range(40))))
            await read_until_finished(client, ["r"])
        process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0
    assert not (run_dir / "kv").exists()
