"""Rotation, norms and the KV write equal their float64 references and touch nothing else."""

from __future__ import annotations

import pytest
import torch
from chatserve_kernels import reference
from chatserve_kernels.rope import rope_store_kv

from tests.kernels.decode_cases import DEVICE
from tests.kernels.test_fused import DTYPES, assert_close, randn

HEADS = pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "rotated"),
    [(9, 3, 64, 64), (4, 4, 80, 32), (2, 1, 96, 96), (7, 1, 128, 64)],
)
POSITIONS = torch.tensor([0, 17, 33, 69, 5], device=DEVICE)
SLOTS = torch.tensor([0, 17, 47, -1, 31], device=DEVICE)
BLOCK_SIZE = 16
SCALES = (0.02, 0.5)
"""So small a scale of keys that most of them are clamped."""


def angles(rotated: int) -> torch.Tensor:
    turns = torch.arange(70, device=DEVICE)[:, None] * torch.logspace(0, -4, rotated // 2, device=DEVICE)
    return torch.cat([turns.cos(), turns.sin()], -1)


@HEADS
@pytest.mark.parametrize("has_norm", [False, True])
@DTYPES
def test_rope_and_kv_write(num_heads, num_kv_heads, head_dim, rotated, has_norm, dtype):
    """Into an interleaved pool, with a padding row, and leaving every other slot as it was."""
    query = randn(5, num_heads + 1, head_dim, dtype=dtype)[:, 1:]
    key, value = (randn(5, 2, num_kv_heads, head_dim, dtype=dtype)[:, index] for index in range(2))
    norms = (randn(head_dim, dtype=dtype), randn(head_dim, dtype=dtype) + 1) if has_norm else None
    cos_sin = angles(rotated)
    pool = torch.full((3, 2, 2, num_kv_heads, BLOCK_SIZE, head_dim), torch.nan, dtype=dtype, device=DEVICE)
    before, normed_query, normed_key = query.clone(), query.double(), key.double()
    if norms is not None:
        normed_query = reference.head_norm(query, norms[0], 1e-5)
        normed_key = reference.head_norm(key, norms[1], 1e-5)
    rope_store_kv(
        query, key, value, pool[:, 1, 0], pool[:, 1, 1], POSITIONS, SLOTS, cos_sin, norms=norms, eps=1e-5
    )  # fmt: skip
    kept = SLOTS >= 0
    assert_close(query[kept], reference.rope(normed_query, POSITIONS, cos_sin)[kept])
    assert torch.equal(query[~kept], before[~kept])
    blocks, tokens = SLOTS[kept] // BLOCK_SIZE, SLOTS[kept] % BLOCK_SIZE
    assert_close(pool[blocks, 1, 0, :, tokens], reference.rope(normed_key, POSITIONS, cos_sin)[kept])
    assert torch.equal(pool[blocks, 1, 1, :, tokens], value[kept])
    pool[blocks, 1, :, :, tokens] = torch.nan
    assert pool.isnan().all()


@HEADS
@pytest.mark.parametrize("has_norm", [False, True])
def test_a_cache_of_fp8_holds_what_is_scaled_clamped_and_rounded(num_heads, num_kv_heads, head_dim, rotated, has_norm):
    query = randn(5, num_heads, head_dim, dtype=torch.bfloat16)
    key, value = (randn(5, num_kv_heads, head_dim + index, dtype=torch.bfloat16)[..., index:] for index in range(2))
    weight = randn(head_dim, dtype=torch.bfloat16)
    cos_sin = angles(rotated)
    untouched = 3.5
    pool = torch.full((3, 2, num_kv_heads, BLOCK_SIZE, head_dim), untouched, device=DEVICE).to(torch.float8_e4m3fn)
    normed_key = reference.head_norm(key, weight, 1e-5) if has_norm else key
    norms = (weight, weight) if has_norm else None
    scales = torch.tensor(SCALES, device=DEVICE)
    rope_store_kv(
        query, key, value, pool[:, 0], pool[:, 1], POSITIONS, SLOTS, cos_sin, norms=norms, eps=1e-5, kv_scales=scales
    )
    kept = SLOTS >= 0
    blocks, tokens = SLOTS[kept] // BLOCK_SIZE, SLOTS[kept] % BLOCK_SIZE
    rotated_key = reference.rope(normed_key, POSITIONS, cos_sin)[kept]
    for index, (expected, scale) in enumerate(zip((rotated_key, value[kept]), SCALES, strict=True)):
        stored = pool[blocks, index, :, tokens].float()
        wanted = reference.to_e4m3(expected, scale).float()
        step = (wanted.abs() / 8).clamp(min=2.0**-9)
        is_close = (stored - wanted).abs() <= step
        assert is_close.all()
        # What lies on the border of two values may round to either.
        assert (stored != wanted).sum() <= 0.01 * stored.numel()
    # fp8 tensors cannot be indexed for writing
    rest = pool.float()
    rest[blocks, :, :, tokens] = untouched
    assert (rest == untouched).all()


def test_what_the_kernel_cannot_use_is_refused():
    heads, caches = [randn(1, 1, 4)] * 3, [randn(1, 1, 16, 4)] * 2
    indices = [torch.zeros(1, dtype=torch.int64)] * 2
    with pytest.raises(ValueError, match="angles of at most 4"):
        rope_store_kv(*heads, *caches, *indices, randn(3, 8))
    with pytest.raises(ValueError, match="stride of 1"):
        rope_store_kv(*heads[:2], randn(1, 4, 2).transpose(1, 2)[:, :1], *caches, *indices, randn(3, 4))
    for wrong in (torch.zeros(1, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)):
        with pytest.raises(ValueError, match=r"expected int64 positions and slots \[1\], got"):
            rope_store_kv(*heads, *caches, indices[0], wrong, randn(3, 4))
    with pytest.raises(ValueError, match=r"kv_scales with a cache of float8_e4m3fn and no other, got torch.float32"):
        rope_store_kv(*heads, *caches, *indices, randn(3, 4), kv_scales=torch.ones(2))
    caches = [cache.to(torch.float8_e4m3fn) for cache in caches]
    with pytest.raises(ValueError, match=r"expected float32 kv_scales \[2\], got torch.float32 \[1\]"):
        rope_store_kv(*heads, *caches, *indices, randn(3, 4), kv_scales=torch.ones(1))
    with pytest.raises(ValueError, match="expected kv_scales"):
        rope_store_kv(*heads, *caches, *indices, randn(3, 4))
