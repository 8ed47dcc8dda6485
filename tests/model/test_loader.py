"""Damaged or foreign model directories are refused with one line that names what is wrong."""

from __future__ import annotations

import json
import math
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chatserve.errors import StartupError
from chatserve.model.loader import load_model
from tests.model.tiny import OUR_FAMILIES, make_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole")
    make_model(path, OUR_FAMILIES["llama"])
    return path


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "model")


def change_weights(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")

    return apply


def change_config(**fields: Any) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **fields}))

    return apply


def cut(name: str, kept: int) -> Callable[[Path], None]:
    def apply(path: Path) -> None:
        (path / name).write_bytes((path / name).read_bytes()[:kept])

    return apply


NORM = "model.layers.1.input_layernorm.weight"
SCALE = "model.layers.2.self_attn.k_scale"
KV_ALONE = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True},
}


def scales(of_keys: list[Any]) -> Callable[[Path], None]:
    """Scales of the values of all layers, and such scales of the first layers' keys."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for layer in range(3):
            tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor(0.5 * (layer + 1))
        for layer, scale in enumerate(of_keys):
            tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor(scale).bfloat16()

    return change_weights(change)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: (path / "config.json").unlink(), "config.json is missing"),
        (cut("config.json", 40), "config.json is not valid JSON"),
        (lambda path: (path / "config.json").write_text("[]"), "must hold a JSON object"),
        (lambda path: (path / "config.json").write_text("{}"), "names no model_type"),
        (change_config(model_type="martian"), "config.json is not usable"),
        (change_config(quantization_config={"bits": 4}), "is quantised"),
        (lambda path: (path / "model.safetensors").unlink(), "has no .*safetensors"),
        (cut("model.safetensors", 20_000), "is truncated: 20000 bytes"),
        (cut("model.safetensors", 5), "not a whole safetensors file"),
        (
            lambda path: (path / "model.safetensors").write_bytes(b"\x08" + b"\0" * 7 + b"rubbish!"),
            "unreadable safetensors",
        ),
        (lambda path: (path / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (change_weights(lambda tensors: tensors.pop(NORM)), f"lacks the weight {NORM}"),
        (change_weights(lambda tensors: tensors.update(extra=torch.zeros(2))), "does not have: extra"),
        (change_weights(lambda tensors: tensors.update({NORM: torch.ones(3)})), rf"{NORM} has shape \(3,\)"),
        (change_weights(lambda tensors: tensors.update({NORM: torch.ones(48, dtype=torch.int8)})), "torch.int8"),
        (scales([1.0, 2.0, 0.0]), f"KV scale {SCALE} is 0; it must be finite and above 0"),
        (scales([1.0, 2.0, -1.0]), f"KV scale {SCALE} is -1;"),
        (scales([1.0, 2.0, math.inf]), f"KV scale {SCALE} is inf;"),
        (scales([1.0, 2.0]), f"lacks the KV scale {SCALE}, though it has others"),
        (scales([1.0, 2.0, [1.0, 2.0]]), rf"{SCALE} has shape \(2,\), one number is expected"),
        (change_config(quantization_config={**KV_ALONE, "config_groups": {"group_0": {}}}), "is quantised"),
        (change_config(quantization_config={**KV_ALONE, "kv_cache_scheme": None}), "is quantised"),
    ],
)
def test_a_damaged_directory_is_one_clear_line(copy: Path, damage: Callable[[Path], Any], words: str) -> None:
    damage(copy)
    with pytest.raises(StartupError, match=words) as caught:
        load_model(copy, CPU, "auto")
    assert "\n" not in str(caught.value)


def test_transformers_models_are_loaded_as_strictly(copy: Path) -> None:
    change_weights(lambda tensors: tensors.update(extra=torch.zeros(2)))(copy)
    with pytest.raises(StartupError, match=r"unexpected keys among the weights: extra"):
        load_model(copy, CPU, "hf")


def test_scales_of_8_bit_kv_are_read_where_they_are(copy: Path) -> None:
    assert load_model(copy, CPU, "llama")[0].info.kv_scales == ()
    scales([1.0, 0.25, 4.0])(copy)
    change_config(quantization_config=KV_ALONE)(copy)
    expected = ((1.0, 0.5), (0.25, 1.0), (4.0, 1.5))
    for dtype in ("float32", "bfloat16"):
        assert load_model(copy, CPU, "auto", dtype)[0].info.kv_scales == expected


def test_shards_are_read_through_their_index(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for shard, part in (("one.safetensors", names[::2]), ("two.safetensors", names[1::2])):
        save_file({name: tensors[name] for name in part}, copy / shard)
        weight_map.update(dict.fromkeys(part, shard))
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert load_model(copy, CPU, "llama")[0].info.num_layers == 3
    (copy / "two.safetensors").unlink()
    with pytest.raises(StartupError, match=r"two.safetensors is missing"):
        load_model(copy, CPU, "llama")


def test_weights_take_the_precision_that_was_asked_for(whole: Path) -> None:
    assert load_model(whole, CPU, "auto")[1] is torch.float32
    assert load_model(whole, CPU, "hf", "bfloat16")[1] is torch.bfloat16
