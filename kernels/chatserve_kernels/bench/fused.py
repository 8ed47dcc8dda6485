"""The fused memory-bound kernels at the widths of an 8B Llama: time, and bytes that must move over that time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from chatserve_kernels.bench.tables import DTYPE, Bench, Row, free, table
from chatserve_kernels.bench.workloads import BLOCK, HEAD_DIM, HEADS, KV_HEADS
from chatserve_kernels.fused import add_rms_norm, copy_blocks, rope_store_kv, silu_mul

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HIDDEN, MLP = 4096, 14336
ROPE_BYTES = 2 * (HEADS + 2 * KV_HEADS) * HEAD_DIM * 2 + HEAD_DIM * 4
CACHE_BYTES = 60e6
"""What the L2 cache holds: inputs rotate through three times as much, so that memory is what is measured."""


@table("fused")
def measure(bench: Bench) -> Iterator[Row]:
    """A row a kernel, at many tokens and at few."""
    for num_tokens in (4096, 64):
        for name, make, moved in (
            ("add + RMSNorm", _norm, 4 * HIDDEN * 2),
            ("SiLU x mul", _silu, 3 * MLP * 2),
            ("RoPE + KV write", _rope, ROPE_BYTES),
            ("norms + RoPE + KV write", _normed_rope, ROPE_BYTES),
            ("RoPE + fp8 KV write", _fp8_rope, ROPE_BYTES - 2 * KV_HEADS * HEAD_DIM),
        ):
            copies = max(1, round(3 * CACHE_BYTES / (num_tokens * moved))) if num_tokens > 256 else 1
            calls = [make(num_tokens) for _ in range(copies)]
            us = bench.us(lambda calls=calls: [call() for call in calls]) / copies
            yield Row("fused", f"{name}, {num_tokens} tokens", us, bytes=num_tokens * moved)
        free()
    yield _block_copy(bench)
    free()


def _block_copy(bench: Bench) -> Row:
    """Copy-on-write of 64 blocks of an 8B Llama, 2 MiB each."""
    pool = torch.randn(256, 32, 2, KV_HEADS, 16, 128, device="cuda").to(DTYPE)
    sources = torch.randperm(128, device="cuda")[:64]
    targets = 128 + torch.randperm(128, device="cuda")[:64]
    whole = torch.full_like(sources, 16)
    us = bench.us(lambda: copy_blocks(pool, sources, targets, whole))
    return Row("fused", "64 block copies", us, bytes=2 * 64 * 2**21)


def _randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=DTYPE)


def _norm(num_tokens: int) -> Callable[[], object]:
    hidden, residual, weight = _randn(num_tokens, HIDDEN), _randn(num_tokens, HIDDEN), _randn(HIDDEN)
    out = torch.empty_like(hidden)
    return lambda: add_rms_norm(hidden, residual, weight, 1e-5, out)


def _silu(num_tokens: int) -> Callable[[], object]:
    gate_up = _randn(num_tokens, 2 * MLP)
    out = torch.empty((num_tokens, MLP), device="cuda", dtype=DTYPE)
    return lambda: silu_mul(gate_up, out)


def _rope(
    num_tokens: int, norms: tuple[torch.Tensor, torch.Tensor] | None = None, cache: torch.dtype = DTYPE
) -> Callable[[], object]:
    qkv = _randn(num_tokens, HEADS + 2 * KV_HEADS, HEAD_DIM)
    query, key, value = qkv.split([HEADS, KV_HEADS, KV_HEADS], 1)
    pool = _randn(num_tokens // BLOCK + 1, 2, KV_HEADS, BLOCK, HEAD_DIM).to(cache)
    scales = None if cache == DTYPE else torch.rand(2, device="cuda") + 0.5
    cos_sin = torch.randn(num_tokens, HEAD_DIM, device="cuda")
    positions = torch.arange(num_tokens, device="cuda")
    slots = torch.randperm(num_tokens, device="cuda")
    return lambda: rope_store_kv(
        query, key, value, pool[:, 0], pool[:, 1], positions, slots, cos_sin, norms=norms, eps=1e-6, kv_scales=scales
    )


def _normed_rope(num_tokens: int) -> Callable[[], object]:
    return _rope(num_tokens, norms=(_randn(HEAD_DIM), _randn(HEAD_DIM)))


def _fp8_rope(num_tokens: int) -> Callable[[], object]:
    return _rope(num_tokens, cache=torch.float8_e4m3fn)
