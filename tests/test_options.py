"""The engine's options, before anything is started."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from chatserve.config import EngineOptions
from chatserve.errors import StartupError
from chatserve.options import check_options, parse_size

WRONG_SIZES = ["", "banana", "G", "-1", "-5", "4X", "1.5blocks", "4 G B", "nan", "inf", "1e9", "9" * 5000, "٣blocks"]
MEMORY_OPTIONS = ["kv-cache-memory", "host-cache-memory", "kv-snapshot-limit"]


@pytest.mark.parametrize(
    ("given", "blocks"),
    [
        ("64blocks", 64),
        ("1block", 1),
        ("512M", 512),
        ("4G", 4096),
        ("1.5g", 1536),
        ("2097152", 2),
        ("1MiB", 1),
        ("1T", 1 << 20),
    ],
)
def test_sizes_are_read_in_bytes_or_blocks(given: str, blocks: int) -> None:
    assert parse_size("--kv-cache-memory", given, 1 << 20) == blocks


@pytest.mark.parametrize("snapshot", [None, Path("/somewhere")])
@pytest.mark.parametrize("given", WRONG_SIZES)
@pytest.mark.parametrize("option", MEMORY_OPTIONS)
def test_a_size_that_is_none_is_refused_in_a_line(option: str, given: str, snapshot: Path | None) -> None:
    fields = {option.replace("-", "_"): given, "kv_snapshot": snapshot}
    with pytest.raises(StartupError, match=f"--{option} must be .*bytes with an optional suffix") as caught:
        check_options(EngineOptions(**fields))  # type: ignore[arg-type]
    assert repr(given[:60])[:-1] in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"kv_cache_memory": "1block"}, "--kv-cache-memory must have room for at least 2 blocks, not '1block'"),
        ({"kv_cache_memory": "0"}, "--kv-cache-memory must have room for at least 2 blocks, not '0'"),
        ({"kv_snapshot_limit": "0"}, "--kv-snapshot-limit must have room for at least 1 block, not '0'"),
        ({"kv_snapshot_limit": "auto"}, "--kv-snapshot-limit must be bytes .*, not 'auto'"),
        ({"attention": "flash"}, "--attention must be auto, torch or triton, not 'flash'"),
        ({"dtype": "fp4"}, "--dtype must be auto, float32, bfloat16 or float16, not 'fp4'"),
        (
            {"kv_cache_dtype": "fp4"},
            "--kv-cache-dtype must be auto, float32, bfloat16, float16 or fp8, not 'fp4'",
        ),
        ({"model_impl": "vllm"}, "--model-impl must be auto, llama or hf, not 'vllm'"),
        ({"device": "tpu"}, "--device must be auto, cpu, cuda or cuda:N, not 'tpu'"),
        ({"block_size": 0}, "--block-size must be at least 1 token and at most 256, not 0"),
        ({"block_size": 257}, "--block-size must be at least 1 token and at most 256, not 257"),
        ({"threads": -1}, "--threads must be 0 .* or more, not -1"),
    ],
    ids=str,
)
def test_a_value_that_its_option_may_not_have_is_named_with_the_limit(fields: dict[str, object], said: str) -> None:
    with pytest.raises(StartupError, match=said):
        check_options(msgspec.structs.replace(EngineOptions(), **fields))


def test_what_needs_a_gpu_is_refused_on_a_cpu_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(StartupError, match="--attention triton needs a CUDA device, not --device cpu"):
        check_options(EngineOptions(attention="triton", device="cpu"))
    check_options(EngineOptions(attention="triton", device="cuda:1"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    check_options(EngineOptions(attention="triton", device="cpu"))


def test_no_host_cache_and_the_defaults_are_allowed() -> None:
    check_options(EngineOptions())
    check_options(EngineOptions(host_cache_memory="0", kv_cache_memory="2blocks", kv_snapshot_limit="1block"))
