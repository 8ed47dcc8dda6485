"""Blocks as bytes: what is saved and read back is bit for bit what was there, and whose it is is told apart."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from chatserve.config import EngineSettings
from chatserve.engine.build import build_engine
from chatserve.engine.engine import Engine
from chatserve.engine.messages import Hint, Inspect
from chatserve.errors import StartupError
from chatserve.model.block_bytes import StorageBytes
from chatserve.model.kv_storage import KVStorage
from chatserve.model.runner import build_runner
from chatserve.model.shapes import KVShape
from tests.fakes.engines import USER, Transcript, make_submit, run_until_idle
from tests.model.tiny import OUR_FAMILIES, make_model

SHAPE = KVShape(num_layers=2, num_kv_heads=2, head_dim=3, block_size=4)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("num_host_blocks", [0, 5])
def test_bytes_are_those_of_the_block(device: str, dtype: torch.dtype, num_host_blocks: int) -> None:
    storage = KVStorage(SHAPE, num_blocks=40, num_host_blocks=num_host_blocks, dtype=dtype, device=torch.device(device))
    for pool in (storage.device_pool, storage.host_pool):
        raw = pool.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))
    source = StorageBytes(storage)
    assert source.block_bytes == SHAPE.block_elements * dtype.itemsize
    wanted = [7, 39, *range(30)]
    for block_id, view in zip(wanted, source.device_blocks(wanted), strict=True):
        assert bytes(view) == storage.device_pool[block_id].cpu().contiguous().view(torch.uint8).numpy().tobytes()
    if num_host_blocks:
        content = os.urandom(source.block_bytes)
        before = storage.host_pool.clone()
        source.host_block(3)[:] = content
        assert storage.host_pool[3].view(torch.uint8).numpy().tobytes() == content
        assert torch.equal(storage.host_pool[2].view(torch.uint8), before[2].view(torch.uint8))
        assert torch.equal(storage.host_pool[4].view(torch.uint8), before[4].view(torch.uint8))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    make_model(directory, OUR_FAMILIES["qwen3"])
    return directory


def engine_of(model: Path, snapshot: Path, **changes: object) -> Engine:
    settings = EngineSettings(
        model_dir=model,
        model_name="tiny",
        device="cpu",
        kv_cache_memory="64blocks",
        host_cache_memory="64blocks",
        kv_snapshot=snapshot,
    )
    settings = msgspec.structs.replace(settings, **changes)
    runner = build_runner(settings)
    # What nobody has written must never be read.
    runner.storage.device_pool.fill_(torch.nan)
    runner.storage.host_pool.fill_(torch.nan)
    return build_engine(settings, runner)


def ask(engine: Engine, prompt: list[int], max_tokens: int = 10) -> tuple[int, list[int]]:
    """Tokens computed for the prompt, and the text."""
    engine.handle(make_submit("r", prompt, max_tokens=max_tokens))
    transcript = run_until_idle(engine)
    return transcript.started["r"].computed_tokens, transcript.text("r")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "dtypes", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"dtype": "float32", "kv_cache_dtype": "fp8"}], ids=str
)
def test_a_model_goes_on_from_a_snapshot_as_if_it_had_never_ended(
    model: Path, tmp_path: Path, dtypes: dict[str, str], device: str
) -> None:
    prompt = [3 + (i * 7) % 90 for i in range(75)]
    options = {**dtypes, "device": device}
    undisturbed = engine_of(model, tmp_path / "none", **options)
    first = ask(undisturbed, prompt)[1]
    second = ask(undisturbed, [*prompt, *first, 5, 6])
    saving = engine_of(model, tmp_path / "kv", **options)
    ask(saving, prompt)
    saving.save_snapshot()
    assert ask(engine_of(model, tmp_path / "kv", **options), [*prompt, *first, 5, 6]) == second
    assert second[0] <= 3


def other_weights(model: Path) -> None:
    """One row of one tensor, the same length, and the same time of change as far as `os.utime` goes."""
    (file,) = model.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if "down_proj" in name)
    tensors[name] = tensors[name] + 1
    times = file.stat()
    save_file(tensors, file, metadata={"format": "pt"})
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def touched_weights(model: Path) -> None:
    (file,) = model.glob("*.safetensors")
    os.utime(file, (1, 1))


def other_config(model: Path) -> None:
    file = model / "config.json"
    file.write_text(file.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))


def other_tokenizer(model: Path) -> None:
    (model / "tokenizer.json").write_text((model / "tokenizer.json").read_text() + " ")


@pytest.mark.parametrize(
    ("change", "changes", "what"),
    [
        (other_weights, {}, "model"),
        (touched_weights, {}, "model"),
        (other_config, {}, "model"),
        (other_tokenizer, {}, "tokenizer"),
        (None, {"dtype": "bfloat16"}, "dtype"),
        (None, {"kv_cache_dtype": "fp8"}, "kv_cache_dtype"),
        (None, {"block_size": 8}, "layout"),
        (None, {"model_impl": "hf"}, "model"),
    ],
)
def test_what_another_model_computed_is_not_used(
    model: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[Path], None] | None,
    changes: dict[str, object],
    what: str,
) -> None:
    prompt = [3 + (i * 7) % 90 for i in range(75)]
    saving = engine_of(model, tmp_path / "kv")
    ask(saving, prompt)
    saving.save_snapshot()
    if change is not None:
        change(model)
    assert ask(engine_of(model, tmp_path / "kv", **changes), prompt)[0] == len(prompt)
    assert f"another {what}" in caplog.text


def test_a_limit_that_is_none_is_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"kv-snapshot-limit must be bytes .*, not 'auto'"):
        engine_of(model, tmp_path / "kv", kv_snapshot_limit="auto")


@pytest.mark.parametrize("device", DEVICES)
def test_a_draft_computed_beside_answers_changes_no_text(model: Path, tmp_path: Path, device: str) -> None:
    prompt, draft = [3 + (i * 7) % 90 for i in range(75)], [5 + i % 80 for i in range(40)]
    alone = engine_of(model, tmp_path / "none", device=device, dtype="float32")
    first = ask(alone, prompt)[1]
    expected = ask(alone, [*prompt, *first, *draft, 7])[1]
    other = ask(alone, [9] * 30, max_tokens=80)[1]
    engine = engine_of(model, tmp_path / "none", device=device, dtype="float32")
    ask(engine, prompt)
    engine.handle(make_submit("other", [9] * 30, max_tokens=80))
    transcript = Transcript()
    for _ in range(3):
        transcript.add(engine.step())
    ids = (*prompt, *first, *draft)
    engine.handle(Hint(user=USER, key="chat", base=None, token_ids=ids, num_draft_tokens=len(draft)))
    run_until_idle(engine, transcript)
    assert transcript.text("other") == other
    assert engine.report(Inspect(0)).counters["hinted_tokens"] >= len(draft)
    assert ask(engine, [*ids, 7]) == (1, expected)
