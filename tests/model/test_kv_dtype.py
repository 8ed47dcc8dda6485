"""8-bit KV saturates, comes back as the nearest numbers there are, and takes half the bytes of 16 bits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from chatserve.config import EngineSettings
from chatserve.errors import StartupError
from chatserve.model.kv_dtype import FP8, choose_kv_dtype, is_scale, to_stored, widen
from chatserve.model.kv_storage import KVStorage
from chatserve.model.runner import ModelRunner, build_runner
from chatserve.model.shapes import KVShape
from tests.model.tiny import OUR_FAMILIES, make_model

if TYPE_CHECKING:
    from pathlib import Path

CPU = torch.device("cpu")
COMPUTED = [torch.float32, torch.bfloat16, torch.float16]
EVERY_FP8 = torch.arange(256, dtype=torch.uint8).view(FP8)
FINITE = EVERY_FP8.double()[~EVERY_FP8.float().isnan()]


@pytest.mark.parametrize("dtype", COMPUTED)
def test_every_number_of_8_bits_is_widened_exactly(dtype: torch.dtype) -> None:
    strided = EVERY_FP8.view(16, 16).T
    into = torch.empty(16, 16, dtype=dtype)
    assert widen(strided, into) is into
    assert torch.equal(into.nan_to_num(9.0), EVERY_FP8.to(dtype).view(16, 16).T.nan_to_num(9.0))
    assert int(into.isnan().sum()) == 2


@given(st.floats(width=32, allow_nan=False), st.floats(2**-30, 2**30, width=32))
def test_what_is_stored_is_the_nearest_number_that_there_is(number: float, scale: float) -> None:
    stored = float(to_stored(torch.tensor([number]), FP8, scale).double())
    wanted = min(max(number / scale, -448.0), 448.0)
    nearest = float((FINITE - wanted).abs().min())
    # The quotient is rounded to float32 before.
    assert abs(stored - wanted) <= nearest + abs(wanted) * 2**-22 + 2**-126


@pytest.mark.parametrize("computed", COMPUTED)
@pytest.mark.parametrize("held", [*COMPUTED, FP8])
def test_no_type_turns_a_large_number_into_none(computed: torch.dtype, held: torch.dtype) -> None:
    largest = torch.finfo(computed).max
    x = torch.tensor([largest, -largest, 1.0], dtype=computed)
    stored = to_stored(x, held, 1.0)
    assert stored.dtype == held
    back = widen(stored, torch.empty(3, dtype=torch.float32))
    assert back.isfinite().all()
    assert back[0] == -back[1] >= min(float(x[0]), torch.finfo(held).max) * (1 - 2**-8)
    assert back[2] == 1.0


@pytest.mark.parametrize(
    ("number", "is_one"),
    [
        *[(1.0, True), (2**-40, True), (3e38, True)],
        *[(0.0, False), (-1.0, False), (math.nan, False), (math.inf, False), (1e-60, False), (1e60, False)],
    ],
)
def test_a_scale_is_finite_and_above_0_in_float32(number: float, is_one: bool) -> None:
    assert is_scale(number) == is_one


@pytest.mark.parametrize(
    ("scales", "said"),
    [
        ([(1.0, 1.0)], "scales of 2 layers, got 1"),
        ([(1.0, 1.0), (0.0, 1.0)], r"above 0, got \(0.0, 1.0\) for layer 1"),
        ([(1.0, math.nan), (1.0, 1.0)], r"got \(1.0, nan\) for layer 0"),
    ],
)
def test_a_pool_takes_no_scales_that_are_none(scales: list[tuple[float, float]], said: str) -> None:
    shape = KVShape(num_layers=2, num_kv_heads=1, head_dim=8, block_size=4)
    with pytest.raises(ValueError, match=said):
        KVStorage(shape, num_blocks=2, num_host_blocks=0, dtype=FP8, device=CPU, scales=scales)


def test_scales_are_1_where_none_are_given_and_are_not_used_by_other_pools() -> None:
    shape = KVShape(num_layers=2, num_kv_heads=1, head_dim=8, block_size=4)
    own = ((0.5, 2.0), (0.25, 4.0))

    def made(dtype: torch.dtype, scales: tuple[tuple[float, float], ...] = ()) -> KVStorage:
        return KVStorage(shape, num_blocks=2, num_host_blocks=0, dtype=dtype, device=CPU, scales=scales)

    assert made(FP8).scales == ((1.0, 1.0), (1.0, 1.0))
    scaled = made(FP8, own)
    assert scaled.scales == own
    assert scaled.device_scales is not None
    assert scaled.device_scales.tolist() == [list(pair) for pair in own]
    assert made(torch.bfloat16, own).scales == ((1.0, 1.0), (1.0, 1.0))
    assert made(torch.bfloat16, own).device_scales is None


@pytest.mark.parametrize("setting", ["float32", "bfloat16", "float16", "fp8"])
def test_a_device_that_cannot_convert_is_refused_in_a_line(setting: str) -> None:
    assert choose_kv_dtype("auto", torch.bfloat16, CPU) == torch.bfloat16
    assert choose_kv_dtype(setting, torch.float32, CPU) in {*COMPUTED, FP8}
    # The one device everywhere that holds no numbers.
    with pytest.raises(
        StartupError, match=rf"--kv-cache-dtype {setting} cannot be used on meta: .*; choose auto"
    ) as caught:
        choose_kv_dtype(setting, torch.float32, torch.device("meta"))
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    make_model(path, OUR_FAMILIES["qwen3"])
    return path


def runner_of(model: Path, kv_cache_dtype: str, **fields: str) -> ModelRunner:
    return build_runner(
        EngineSettings(
            model_dir=model, model_name="tiny", device="cpu", threads=1, kv_cache_dtype=kv_cache_dtype, **fields
        )
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_as_much_memory_has_room_for_twice_the_blocks_of_16_bits(model: Path, dtype: str) -> None:
    runners = {
        held: runner_of(model, held, dtype=dtype, kv_cache_memory="1200K", host_cache_memory="600K")
        for held in ("float32", "bfloat16", "float16", "fp8", "auto")
    }
    blocks = {held: (runner.num_blocks, runner.num_host_blocks) for held, runner in runners.items()}
    most = 1200 << 10
    assert blocks["fp8"] == (2 * blocks["bfloat16"][0], 2 * blocks["bfloat16"][1])
    assert blocks["bfloat16"] == blocks["float16"] == (2 * blocks["float32"][0], 2 * blocks["float32"][1])
    assert blocks["auto"] == blocks[dtype]
    for runner in runners.values():
        assert runner.storage.device_pool.nbytes == runner.num_blocks * runner.storage.block_bytes <= most
        assert runner.storage.host_pool.nbytes == runner.num_host_blocks * runner.storage.block_bytes <= most // 2
        assert runner.storage.compute_dtype == getattr(torch, dtype)


def test_kernels_serve_fp8_and_no_other_type_than_the_models(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("chatserve.model.triton_attention", reason="Triton is made for Linux only")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    small = {"kv_cache_memory": "4blocks", "host_cache_memory": "0", "attention": "triton"}
    runner_of(model, "fp8", **small)
    with pytest.raises(StartupError, match="KV cache of the model's own type, float32, or fp8, not bfloat16"):
        runner_of(model, "bfloat16", **small)
