"""The command line as a user meets it: a process, its output and its exit code."""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import click
import msgspec
import pytest
from click.testing import CliRunner

from chatserve import cli, doctor
from chatserve.bench import __path__ as bench_path
from chatserve.config import Limits, ServeSettings
from chatserve.server import auth
from chatserve.supervisor import paths

ROOT = Path(__file__).resolve().parent.parent.parent


def chatserve(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CHATSERVE_")}
    return subprocess.run(
        [sys.executable, "-m", "chatserve", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**clean, **variables},
        stdin=subprocess.DEVNULL,
        timeout=60,
    )


def test_help_is_quick_and_loads_no_torch() -> None:
    program = (
        "import sys; from chatserve.cli import cli; assert not {'torch', 'transformers', 'redis'} & set(sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, cwd=ROOT, timeout=60).returncode == 0
    started = time.monotonic()
    done = chatserve("--help")
    assert done.returncode == 0
    assert time.monotonic() - started < 5
    for command in ("serve", "chat", "model", "doctor", "token", "bench"):
        assert f"\n  {command} " in done.stdout


def test_every_option_of_serve_has_its_variable_and_a_setting() -> None:
    options = [each for each in cli.serve.params if isinstance(each, click.Option)]
    for option in options:
        assert option.envvar == "CHATSERVE_" + option.opts[0].removeprefix("--").replace("-", "_").upper()
    fields = {field.name for field in msgspec.structs.fields(ServeSettings)}
    limits = {field.name for field in msgspec.structs.fields(Limits)}
    assert {option.name for option in options} <= fields | limits
    assert fields - {option.name for option in options} == {"limits"}


@pytest.mark.parametrize(
    ("given", "count"), [("500000", 500_000), ("512M", 512 << 20), ("4g", 4 << 30), ("1T", 1 << 40)]
)
def test_bytes_are_given_with_a_unit(given: str, count: int) -> None:
    [option] = [each for each in cli.serve.params if each.name == "max_bytes_per_user"]
    assert option.type.convert(given, option, None) == count


@pytest.mark.parametrize("given", ["", "-1", "1.5G", "many", "4GB"])
def test_what_is_no_number_of_bytes_is_refused_in_a_line(given: str) -> None:
    done = chatserve("serve", f"--max-bytes-per-user={given}")
    assert done.returncode == 2
    assert repr(given) in done.stderr


def test_defaults_of_the_command_line_are_those_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("CHATSERVE_")]:
        monkeypatch.delenv(name)
    given = cli.serve.make_context("serve", []).params
    limits = Limits(**{name: given.pop(name) for name in Limits.__struct_fields__ if name in given})
    assert limits == Limits()
    assert ServeSettings(**given) == ServeSettings(data_dir=given["data_dir"], cache_dir=given["cache_dir"])


def test_a_variable_counts_as_its_option(tmp_path: Path) -> None:
    done = chatserve("serve", "--data-dir", tmp_path, CHATSERVE_HOST="0.0.0.0", CHATSERVE_PORT="0")
    assert done.returncode == 1
    assert "refusing to listen on 0.0.0.0" in done.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "no-such-model"], "no-such-model"),
        (["--model", "/no/such/directory"], "/no/such/directory"),
        (["--model", "missing.gguf"], "missing.gguf"),
        (["--host", "0.0.0.0"], "chatserve token"),
        (["--host", "no.such.host.invalid", "--tokens-file", "TOKENS"], "no.such.host.invalid"),
        (["--data-dir", "/dev/null"], "/dev/null is not a directory"),
        (["--redis-url", "redis://127.0.0.1:1/0"], "cannot reach Redis at redis://127.0.0.1:1/0"),
        (["--redis-url", "nonsense"], "--redis-url nonsense"),
        (["--redis-url", "redis://127.0.0.1:1?foo=bar"], "--redis-url redis://127.0.0.1:1?foo=bar: its query"),
        (["--redis-url", "redis+cluster://127.0.0.1:1"], "cannot reach Redis at redis+cluster://127.0.0.1:1"),
        (["--redis-url", "redis+sentinel://127.0.0.1:1/one"], "(no sentinel that answers names a primary"),
    ],
)
def test_a_wrong_option_is_one_clear_line(tmp_path: Path, options: list[str], said: str) -> None:
    auth.add_token(tmp_path / "tokens", "alice")
    options = [str(tmp_path / "tokens") if each == "TOKENS" else each for each in options]
    done = chatserve(
        "serve", "--port", "0", "--data-dir", tmp_path / "data", "--cache-dir", tmp_path / "cache", *options
    )
    assert done.returncode == 1, done
    assert said in done.stderr
    assert done.stderr.startswith("chatserve: ")
    assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize(
    "option", ["session-expiry", "drain-s", "engine-silence-s", "orphan-grace-s", "gpu-memory-utilization"]
)
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_no_option_takes_a_number_that_is_not_finite(option: str, value: str) -> None:
    refused = CliRunner().invoke(cli.cli, ["serve", f"--{option}={value}"])
    assert refused.exit_code == 2
    assert value in refused.output
    assert option in refused.output


@pytest.mark.parametrize(
    "option",
    ["--kv-snapshot-limit=banana", "--kv-snapshot-limit=0", "--kv-cache-memory=1block", "--host-cache-memory=-1"],
)
def test_a_size_that_is_none_is_refused_before_anything_is_made(tmp_path: Path, option: str) -> None:
    places = [f"--data-dir={tmp_path / 'data'}", f"--cache-dir={tmp_path / 'cache'}", "--port=0"]
    refused = CliRunner().invoke(cli.cli, ["serve", *places, option])
    assert refused.exit_code == 1
    name, _, value = option.partition("=")
    assert refused.output.startswith(f"chatserve: {name} must ")
    assert repr(value) in refused.output
    assert len(refused.output.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_quota_of_no_bytes_is_refused() -> None:
    refused = CliRunner().invoke(cli.cli, ["serve", "--max-bytes-per-user=0K"])
    assert refused.exit_code == 2
    assert "'0K' leaves no byte" in refused.output


def test_a_truncated_model_config_is_one_clear_line(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"architectures": ["Llama')
    done = chatserve("serve", "--port", "0", "--data-dir", tmp_path / "data", "--model", model)
    assert done.returncode == 1
    assert str(model) in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


def test_a_token_is_shown_once_and_kept_as_a_hash(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    token = chatserve("token", "alice", "--tokens-file", tokens).stdout.strip()
    chatserve("token", "bob", CHATSERVE_TOKENS_FILE=str(tokens))
    assert len(token) >= 32
    assert token not in tokens.read_text()
    assert tokens.stat().st_mode & 0o077 == 0
    assert auth.Authenticator(tokens).user(token) == "alice"
    assert [line.split(":")[0] for line in tokens.read_text().split()] == ["alice", "bob"]


def test_a_strange_user_name_is_one_clear_line(tmp_path: Path) -> None:
    done = chatserve("token", "a b", "--tokens-file", tmp_path / "tokens")
    assert done.returncode == 1
    assert "no user name" in done.stderr
    assert not (tmp_path / "tokens").exists()


def test_chat_without_a_server_is_one_clear_line() -> None:
    done = chatserve("chat", "--url", "http://127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.startswith("chatserve: cannot reach ws://127.0.0.1:1/ws")
    assert done.stderr.endswith("; start a server with `chatserve serve`, or name yours with --url\n")
    assert len(done.stderr.splitlines()) == 1


def test_bench_lists_what_there_is_and_refuses_what_there_is_not() -> None:
    done = chatserve("bench")
    assert done.returncode == 0
    names = {path.stem for path in Path(next(iter(bench_path))).glob("[!_]*.py")}
    assert names <= set(done.stdout.split())
    assert chatserve("bench", "no-such-bench").returncode == 1


def test_model_list_names_the_default() -> None:
    assert "smollm2-135m" in chatserve("model", "list").stdout


def test_doctor_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CHATSERVE_TOKENS_FILE", raising=False)
    options = ["--port", "0", "--data-dir", str(tmp_path / "data"), "--cache-dir", str(tmp_path / "cache")]
    bad = CliRunner().invoke(cli.cli, ["doctor", *options, "--host", "0.0.0.0", "--device", "cuda"])
    assert bad.exit_code == 1
    assert "refusing to listen on 0.0.0.0" in bad.output
    assert "chatserve model pull" in bad.output
    assert not (tmp_path / "data").exists(), "a look must not leave anything"


def test_doctor_finds_nothing_wrong_with_a_server_that_runs(tmp_path: Path) -> None:
    class Healthy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/healthz" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        settings = ServeSettings(port=server.server_port, data_dir=tmp_path, cache_dir=tmp_path)

        def address() -> doctor.Finding:
            return next(each for each in doctor.examine(settings) if each.what == "address")

        assert address().level == "fail", "another program's"
        lock = paths.lock_data_dir(tmp_path)
        assert address().level == "ok"
        lock.release()
        assert address().level == "fail"
        server.shutdown()


def test_doctor_finds_this_machine_fit(tmp_path: Path) -> None:
    settings = ServeSettings(port=0, data_dir=tmp_path / "data", cache_dir=tmp_path / "cache")
    found = list(doctor.examine(settings))
    assert [each for each in found if each.level == "fail" and each.what != "packages"] == []
    assert {"python", "address", "data", "cache", "store", "model", "device"} <= {each.what for each in found}
