"""The web worker as a process: how it starts, why it does not, how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import websockets
from websockets.asyncio.client import connect

from chatserve.config import ServeSettings, WebSettings, encode_settings
from chatserve.errors import StartupError
from chatserve.server.app import read_operator_prompts
from chatserve.server.worker import bind
from chatserve.supervisor.embedded_store import EmbeddedStore
from tests.server.harness import tiny_model_dir

ROOT = Path(__file__).parents[2]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[EmbeddedStore]:
    running = EmbeddedStore(tmp_path / "store", tmp_path / "s.sock")
    running.start()
    yield running
    running.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def settings_for(tmp_path: Path, redis_url: str, *, listen_fd: int | None = None, **serve: Any) -> WebSettings:
    serve = {"data_dir": tmp_path, "cache_dir": tmp_path, "port": free_port(), **serve}
    return WebSettings(
        serve=ServeSettings(**serve),
        model_dir=tiny_model_dir(),
        engine_socket=tmp_path / "engine.sock",
        redis_url=redis_url,
        listen_fd=listen_fd,
    )


def inherited(settings: WebSettings) -> tuple[int, ...]:
    return () if settings.listen_fd is None else (settings.listen_fd,)


@contextlib.asynccontextmanager
async def worker(settings: WebSettings | str) -> AsyncIterator[asyncio.subprocess.Process]:
    text, fds = (settings, ()) if isinstance(settings, str) else (encode_settings(settings), inherited(settings))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "chatserve.server.worker",
        "--settings",
        text,
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=fds,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def refusal(settings: WebSettings | str) -> tuple[int, str]:
    async with worker(settings) as process:
        assert process.stderr is not None
        async with asyncio.timeout(20):
            said = (await process.stderr.read()).decode()
            return await process.wait(), said


@pytest.mark.parametrize("how", ["stdin", "sigterm", "sigint"])
async def test_it_serves_without_an_engine_and_goes_away_in_order(
    store: EmbeddedStore, tmp_path: Path, how: str
) -> None:
    listener = bind("127.0.0.1", 0)  # whoever comes before the worker serves waits there
    port = listener.getsockname()[1]
    settings = settings_for(tmp_path, store.url, port=port, listen_fd=listener.fileno())
    async with worker(settings) as process:
        listener.close()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False) as http:
            assert (await http.get("/healthz")).status_code == 200
            ready = await http.get("/readyz")
            assert (ready.status_code, set(ready.json()["problems"])) == (503, {"engine"})
            assert (await http.post("/api/sessions/import", content=b"{")).status_code == 400
        async with connect(f"ws://127.0.0.1:{port}/ws", ping_interval=None) as socket:
            await socket.send('{"type":"hello","protocol":"chat.v1"}')
            assert json.loads(await socket.recv())["model"] == settings.serve.model
            await socket.send('{"type":"session.create","id":"1"}')
            while json.loads(await socket.recv())["type"] != "ack":
                pass
            match how:
                case "stdin":
                    assert process.stdin is not None
                    process.stdin.close()
                case "sigterm":
                    process.send_signal(signal.SIGTERM)
                case _:
                    process.send_signal(signal.SIGINT)
            with contextlib.suppress(websockets.ConnectionClosed):
                while True:
                    await asyncio.wait_for(socket.recv(), 10)
            assert socket.close_code == 1001
        assert process.stderr is not None
        said = (await asyncio.wait_for(process.stderr.read(), 15)).decode()
        assert await process.wait() == 0
        assert "Traceback" not in said, said


async def test_it_refuses_in_one_line_what_it_cannot_do(tmp_path: Path) -> None:
    bad_tokens = tmp_path / "tokens"
    bad_tokens.write_text("ada\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nowhere = f"unix://{tmp_path}/none.sock"
        for settings, wanted in (
            (settings_for(tmp_path, nowhere, host="0.0.0.0"), "--tokens-file"),
            (settings_for(tmp_path, nowhere, port=taken.getsockname()[1]), "cannot listen on"),
            (settings_for(tmp_path, nowhere, tokens_file=bad_tokens), "line 1"),
            (settings_for(tmp_path, nowhere), "none.sock"),
            (settings_for(tmp_path, nowhere, context_tokens=1), "--context-tokens must be at least "),
            ("{}", "settings cannot be read"),
        ):
            code, said = await refusal(settings)
            lines = [line for line in said.splitlines() if line.startswith("chatserve: ")]
            assert len(lines) == 1, said
            assert wanted in lines[0]
            assert "Traceback" not in said, said
            assert code != 0


def test_it_imports_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import chatserve.server.worker; print('transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


def test_a_taken_or_foreign_address_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=f"127.0.0.1:{port}"):
            bind("127.0.0.1", port)
    with pytest.raises(StartupError, match="--host"):
        bind("192.0.2.1", 0)


def test_operator_prompts_are_the_text_files_of_a_folder(tmp_path: Path) -> None:
    assert read_operator_prompts(None) == []
    (tmp_path / "b.md").write_text("second\n")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c.bin").write_bytes(b"\xff")
    assert read_operator_prompts(tmp_path) == ["first", "second\n"]
    (tmp_path / "d.txt").write_bytes(b"\xff")
    with pytest.raises(StartupError, match="cannot be read"):
        read_operator_prompts(tmp_path)
    with pytest.raises(StartupError, match="cannot be read"):
        read_operator_prompts(tmp_path / "none")


def test_settings_survive_their_trip(tmp_path: Path) -> None:
    settings = settings_for(tmp_path, "unix:///x", allowed_hosts=("a", "b"))
    text = encode_settings(settings)
    assert msgspec.json.decode(text)["serve"]["allowed_hosts"] == ["a", "b"]


@pytest.mark.parametrize("how", ["stdin", "sigterm"])
async def test_asked_to_end_while_it_waits_for_the_store_it_lets_go_at_once(tmp_path: Path, how: str) -> None:
    """Whoever starts it again wants its address, and must not find a worker there that is still on its way up."""
    asked = asyncio.Event()

    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        with contextlib.suppress(ConnectionError):
            await reader.read()
        writer.close()

    silent = await asyncio.start_unix_server(never_answer, tmp_path / "store.sock")
    settings = settings_for(tmp_path, f"unix://{tmp_path / 'store.sock'}")
    async with silent, worker(settings) as process:
        async with asyncio.timeout(20):
            await asked.wait()
        waiting, _ = await asyncio.open_connection("127.0.0.1", settings.serve.port)
        if how == "stdin":
            assert process.stdin is not None
            process.stdin.close()
        else:
            process.send_signal(signal.SIGTERM)
        # The address is free again, long before the store is given up: who was in its queue is sent away.
        with pytest.raises(ConnectionResetError):
            await asyncio.wait_for(waiting.read(), 20)
        with socket.create_server(("127.0.0.1", settings.serve.port)):
            pass
        assert process.stderr is not None
        said = (await asyncio.wait_for(process.stderr.read(), 20)).decode()
        assert await process.wait() == 0
        assert "asked to end before it had started" in said
        assert "Traceback" not in said, said
