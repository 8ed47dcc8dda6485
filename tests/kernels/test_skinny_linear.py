"""Products of a few rows equal float64's, whatever lies beside them."""

from __future__ import annotations

import pytest
import torch
from chatserve_kernels.skinny_linear import SkinnyConfig, fits, skinny_linear

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SMALL = SkinnyConfig(outputs=16, inputs=64, warps=4, stages=2, prefetch=0)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


@pytest.mark.parametrize("num_rows", [1, 3, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gated", [False, True])
def test_equals_float64(num_rows: int, dtype: torch.dtype, gated: bool) -> None:
    width = 64
    # Rows of a wider tensor, with NaN beside and below, and weights of a larger one.
    wide = torch.full((20, 200), torch.nan, dtype=dtype, device=DEVICE)
    x = wide[:num_rows, 5 * 8 : 5 * 8 + 128]
    x.copy_(random(num_rows, 128, dtype=dtype))
    weight = torch.full((width * (2 if gated else 1), 160), torch.nan, dtype=dtype, device=DEVICE)[:, :128]
    weight.copy_(random(*weight.shape, dtype=dtype, seed=1) / 8)
    bias = None if gated else random(width, dtype=dtype, seed=2)
    out = torch.full((20, 96), torch.nan, dtype=dtype, device=DEVICE)
    got = skinny_linear(x, weight, bias, gated=gated, config=SMALL, out=out[:num_rows, :width])
    expected = x.double() @ weight.double().T
    if gated:
        gate, up = expected.chunk(2, dim=1)
        expected = gate * torch.sigmoid(gate) * up
    else:
        assert bias is not None
        expected = expected + bias.double()
    error = (got.double() - expected).norm() / expected.norm()
    assert float(error) < (1.6e-2 if dtype == torch.bfloat16 else 2e-3)
    assert bool(out[num_rows:].isnan().all())
    assert bool(out[:, width:].isnan().all())


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    x, weight = random(16, 128), random(32, 128, seed=1)
    together = skinny_linear(x, weight, config=SMALL)
    for row in range(0, 16, 5):
        assert torch.equal(skinny_linear(x[row : row + 1], weight, config=SMALL)[0], together[row])


def test_what_does_not_fit_is_said() -> None:
    x = random(2, 128)
    assert not fits(random(40, 128), SMALL)
    assert not fits(random(32, 100), SMALL)
    assert not fits(random(32, 128, dtype=torch.float32), SMALL)
    with pytest.raises(ValueError, match="whole tiles"):
        skinny_linear(x, random(40, 128), config=SMALL)
    with pytest.raises(ValueError, match="1 to 16"):
        skinny_linear(random(17, 128), random(32, 128), config=SMALL)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize(("width", "inputs", "gated"), [(6144, 4096, False), (4096, 14336, False), (28672, 4096, True)])
@pytest.mark.parametrize("num_rows", [1, 5, 16])
def test_the_shapes_of_an_8b(width: int, inputs: int, gated: bool, num_rows: int) -> None:
    x, weight = random(num_rows, inputs), random(width, inputs, seed=1) / inputs**0.5
    got = skinny_linear(x, weight, gated=gated)
    expected = x.double() @ weight.double().T
    if gated:
        gate, up = expected.chunk(2, dim=1)
        expected = gate * torch.sigmoid(gate) * up
    assert float((got.double() - expected).norm() / expected.norm()) < 1e-2
