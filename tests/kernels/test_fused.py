"""The fused memory-bound kernels equal their float64 references and touch nothing else."""

from __future__ import annotations

import pytest
import torch
from chatserve_kernels import reference
from chatserve_kernels.fused import add_rms_norm, copy_blocks, silu_mul

from tests.kernels.decode_cases import DEVICE, TOLERANCE

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(len(shape)), device=DEVICE).to(dtype)


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    assert out.isfinite().all()
    assert (out.double() - expected).norm() <= TOLERANCE[out.dtype] * expected.norm()


@DTYPES
@pytest.mark.parametrize(("num_tokens", "width"), [(0, 8), (1, 1), (3, 576), (2, 4096)])
def test_add_rms_norm(num_tokens, width, dtype):
    wide = randn(num_tokens, width + 3, dtype=dtype)  # rows of a wider tensor
    hidden, residual = wide[:, :width], randn(num_tokens, width, dtype=dtype) * 3
    weight = randn(width, dtype=dtype)
    expected, total = reference.add_rms_norm(hidden, residual, weight, 1e-5)
    assert_close(add_rms_norm(hidden, residual, weight, 1e-5), expected)
    # To the last bit but one: the interpreter truncates where the GPU rounds.
    assert ((residual.double() - total.double()).abs() <= torch.finfo(dtype).eps * total.double().abs()).all()


def test_the_norm_of_zeros_is_zero():
    zeros = torch.zeros(2, 64, device=DEVICE)
    assert not add_rms_norm(zeros, zeros.clone(), torch.ones(64, device=DEVICE), 1e-5).any()


@DTYPES
@pytest.mark.parametrize(("num_tokens", "width"), [(0, 8), (1, 1), (3, 1536), (2, 2049)])
def test_silu_mul(num_tokens, width, dtype):
    gate_up = randn(num_tokens, 2 * width + 5, dtype=dtype)[:, : 2 * width]
    assert_close(silu_mul(gate_up), reference.silu_mul(gate_up))


def test_silu_of_large_gates_is_the_gate_or_zero():
    gate_up = torch.tensor([[80.0, -80.0, 1.0, 1.0]], device=DEVICE)
    assert_close(silu_mul(gate_up), torch.tensor([[80.0, 0.0]], device=DEVICE).double())


@pytest.mark.parametrize("block_size", [1, 16, 24])
def test_block_copies(block_size):
    pool = randn(9, 2, 2, 3, block_size, 20, dtype=torch.bfloat16)
    expected = pool.clone()
    kept = min(block_size, 5)
    expected[7] = pool[2]
    expected[0, ..., :kept, :] = pool[8, ..., :kept, :]
    numbers = [[2, 1, 8], [7, -1, 0], [block_size, block_size, kept]]
    copy_blocks(pool, *torch.tensor(numbers, device=DEVICE))
    assert torch.equal(pool, expected)


def test_wrong_layouts_are_refused():
    with pytest.raises(ValueError, match="stride of 1"):
        silu_mul(randn(4, 8).T)
    with pytest.raises(ValueError, match="contiguous pool"):
        copy_blocks(randn(4, 8, 2).mT, torch.tensor([0]), torch.tensor([1]), torch.tensor([1]))
    for targets in (torch.tensor([1, 2]), torch.tensor([1], dtype=torch.int32)):
        with pytest.raises(ValueError, match="as many int64 targets and counts as sources"):
            copy_blocks(randn(4, 8, 2), torch.tensor([0]), targets, torch.tensor([1]))
