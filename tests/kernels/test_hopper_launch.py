"""Launches of the kernel that has no interpreter: which pools it takes, and that it gets the arguments it names."""

from __future__ import annotations

import inspect

import pytest
import torch
from chatserve_kernels import attend_hopper, launch
from chatserve_kernels.configs import default_configs, prefill_configs
from chatserve_kernels.tiles import TileConfig

from tests.kernels.decode_cases import DEVICE, Case, Heads, forest
from tests.kernels.test_prefill import check

HEADS = Heads(8, 2, 128, dtype=torch.bfloat16)


class Recorder:
    """Stands where a kernel does, and binds what it is launched with to the kernel's parameters."""

    def __init__(self, kernel) -> None:
        self.signature = inspect.signature(kernel.fn)
        self.calls: list[dict[str, object]] = []

    def __getitem__(self, grid: tuple[int]):
        def launch(*args, num_warps: int, maxnreg: int | None = None, launch_pdl: bool = False, **kwargs) -> None:
            assert launch_pdl == bool(kwargs["DEPENDS"]), "what waits is launched early, and nothing else"
            bound = self.signature.bind(*args, **kwargs)
            self.calls.append(bound.arguments | {"grid": grid, "num_warps": num_warps, "maxnreg": maxnreg})

        return launch


@pytest.fixture
def recorded(monkeypatch) -> Recorder:
    recorder = Recorder(attend_hopper.attend_hopper_kernel)
    monkeypatch.setattr(attend_hopper, "attend_hopper_kernel", recorder)
    monkeypatch.setattr(attend_hopper, "takes", lambda *_: True)
    monkeypatch.setattr(launch.Call, "merge", lambda _: None)
    return recorder


def test_decode_launches_a_wide_and_a_narrow_grid_with_the_arguments_that_the_kernel_names(recorded):
    paths = [[("system", 512), (str(row), 60 * row)] for row in range(40)]
    case = Case(forest(paths, 16), HEADS, window=300, softcap=5.0)
    case.run(configs=default_configs(128, is_half=True, max_rows=256), num_processors=12)
    wide, narrow = recorded.calls
    assert (wide["WARPGROUPS"], narrow["WARPGROUPS"]) == (2, 1)
    waits = (1, 2) if DEVICE.type == "cuda" else (0, 0)  # off CUDA there is nothing to wait for
    assert (wide["DEPENDS"], narrow["DEPENDS"]) == waits
    assert wide["grid"] == (12,)
    assert narrow["grid"] == (24,)
    assert (wide["HAS_WINDOW"], wide["HAS_CAP"], wide["IS_CAUSAL"]) == (True, True, False)
    assert wide["window"] == 300
    assert wide["key_block_rows"] == 3 * 2 * 2 * 16
    assert wide["key_head_rows"] == 16


def test_prefill_launches_a_wide_grid(recorded):
    with pytest.raises(AssertionError, match="relative error"):  # nothing was computed
        check([300], [70], HEADS, configs=prefill_configs(128, is_half=True))
    (wide,) = recorded.calls
    assert wide["IS_CAUSAL"]
    assert wide["WARPGROUPS"] == 2


def test_a_descriptor_spans_the_layer_and_fetches_a_block_of_64_columns():
    case = Case(forest([[("only", 100)]], 16), HEADS)
    rows = attend_hopper.row_descriptor(case.key)
    num_blocks = len(case.key)
    assert rows.shape == [(num_blocks - 1) * 3 * 2 * 2 * 16 + 16 + 16, 128]
    assert rows.strides == [128, 1]
    assert rows.block_shape == [16, 64]


def test_pools_that_are_no_rows_are_left_to_the_other_kernel(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))

    class OnCuda:
        is_cuda, device, dtype = True, None, torch.bfloat16

    def pool(*, dtype=torch.bfloat16, head_dim=128, block_size=16, pad=0) -> torch.Tensor:
        return torch.zeros((4, 2, block_size, head_dim + pad), dtype=dtype)[..., :head_dim]

    def takes(keys: torch.Tensor) -> bool:
        return attend_hopper.takes(OnCuda, keys, keys, 64)

    assert takes(pool())
    assert takes(pool(head_dim=80))
    assert takes(pool(pad=8))
    assert not takes(pool(pad=3)), "rows that are not aligned"
    assert not takes(pool(head_dim=256))
    assert not takes(pool(block_size=128))
    assert not takes(pool(dtype=torch.float16)), "another type than the query's"
    assert not takes(pool().as_strided((3, 2, 16, 128), (4100, 2048, 128, 1))), "blocks that begin between rows"


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_default_tiles_of_16_bits_are_for_this_kernel(head_dim):
    configs = default_configs(head_dim, is_half=True, max_rows=64)
    for config in (configs.wide, configs.beside, prefill_configs(head_dim, is_half=True).wide):
        assert isinstance(config, TileConfig)
        assert config.hopper is not None
        assert config.query_rows % attend_hopper.WARPGROUP_ROWS == 0
