"""The memory-bound steps between matrix products, each in one pass over its data.

    add_rms_norm     r' = r + x;  y = w * r' / sqrt(mean(r'^2) + eps)      (Zhang & Sennrich 2019)
    silu_mul         y = g * sigmoid(g) * u                                (Shazeer 2020, SwiGLU)
    rope_store_kv    rotates queries and keys and stores keys and values (see `rope`)
    copy_blocks      the first tokens of blocks of a pool, for copy-on-write

The first three wait for the kernel before them by themselves and let the one after them begin (`early_launch`), so
that launches in a row overlap their prologues.

Arithmetic is float32; what a later step reads again is rounded once, to the tensors' own type. Last dimensions must be
contiguous, all others may have any stride; offsets into a pool are 64-bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from chatserve_kernels.early_launch import can_launch_early, early_launch
from chatserve_kernels.rope import rope_store_kv

__all__ = ["add_rms_norm", "copy_blocks", "rope_store_kv", "silu_mul"]


@triton.jit
def add_rms_norm_kernel(
    out,  # [num_tokens, WIDTH]
    hidden,  # [num_tokens, WIDTH]
    residual,  # [num_tokens, WIDTH], replaced by the sum
    weight,  # [WIDTH]
    eps,
    out_stride,
    hidden_stride,
    residual_stride,
    WIDTH: tl.constexpr,
    WIDTH_PAD: tl.constexpr,
    DEPENDS: tl.constexpr,
):
    if DEPENDS:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, WIDTH_PAD)
    mask = columns < WIDTH
    x = tl.load(hidden + row * hidden_stride + columns, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(residual + row * residual_stride + columns, mask=mask, other=0.0).to(tl.float32)
    # The norm is of the sum as the next layer will read it back.
    x = x.to(residual.dtype.element_ty)
    tl.store(residual + row * residual_stride + columns, x, mask=mask)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    w = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, (x * scale * w).to(out.dtype.element_ty), mask=mask)


def add_rms_norm(
    hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`hidden`, `residual` [num_tokens, width]; adds into `residual` and returns its norm times `weight` [width]."""
    num_tokens, width = hidden.shape
    _expect_contiguous_rows(hidden, residual, weight)
    if out is None:
        out = torch.empty_like(hidden)
    if num_tokens:
        add_rms_norm_kernel[(num_tokens,)](
            out,
            hidden,
            residual,
            weight,
            eps,
            out.stride(0),
            hidden.stride(0),
            residual.stride(0),
            WIDTH=width,
            WIDTH_PAD=triton.next_power_of_2(width),
            DEPENDS=can_launch_early(hidden.device),
            num_warps=8 if width > 2048 else 4,
            **early_launch(hidden.device),
        )
    return out


@triton.jit
def silu_mul_kernel(
    out,  # [num_tokens, WIDTH]
    gate_up,  # [num_tokens, 2 * WIDTH]
    out_stride,
    gate_up_stride,
    WIDTH: tl.constexpr,
    N: tl.constexpr,
    DEPENDS: tl.constexpr,
):
    if DEPENDS:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * N + tl.arange(0, N)
    mask = columns < WIDTH
    gate = tl.load(gate_up + row * gate_up_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * gate_up_stride + WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(out + row * out_stride + columns, result.to(out.dtype.element_ty), mask=mask)


def silu_mul(gate_up: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """`gate_up` [num_tokens, 2 * width], gates first; returns [num_tokens, width]."""
    num_tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
    _expect_contiguous_rows(gate_up)
    if out is None:
        out = torch.empty((num_tokens, width), dtype=gate_up.dtype, device=gate_up.device)
    if num_tokens:
        columns = min(2048, triton.next_power_of_2(width))
        silu_mul_kernel[(num_tokens, triton.cdiv(width, columns))](
            out,
            gate_up,
            out.stride(0),
            gate_up.stride(0),
            WIDTH=width,
            N=columns,
            DEPENDS=can_launch_early(gate_up.device),
            num_warps=4,
            **early_launch(gate_up.device),
        )
    return out


@triton.jit
def copy_blocks_kernel(
    pool,  # int64 words [num_blocks, WORDS]
    sources,  # int64 [num_copies]
    targets,  # int64 [num_copies]; -1: padding
    num_tokens,  # int64 [num_copies]
    block_stride,
    WORDS: tl.constexpr,
    TOKEN_WORDS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    N: tl.constexpr,
):
    target = tl.load(targets + tl.program_id(0))
    if target >= 0:
        source = tl.load(sources + tl.program_id(0))
        kept = tl.load(num_tokens + tl.program_id(0))
        words = tl.program_id(1) * N + tl.arange(0, N)
        mask = (words < WORDS) & ((words // TOKEN_WORDS) % BLOCK_SIZE < kept)
        data = tl.load(pool + source * block_stride + words, mask=mask)
        tl.store(pool + target * block_stride + words, data, mask=mask)


def copy_blocks(pool: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor, num_tokens: torch.Tensor) -> None:
    """Copy the first `num_tokens[i]` tokens of block `sources[i]` of `pool` over block `targets[i]`, if that is not -1.

    `pool` [num_blocks, ..., block_size, head_dim]; the others int64 [num_copies], on its device; no target may be a
    source or another's target. Blocks are contiguous, and a token's share of a head is a multiple of 8 bytes.
    """
    if pool.ndim < 3 or not pool.is_contiguous() or pool.shape[-1] * pool.itemsize % 8:
        raise ValueError("expected a contiguous pool of blocks whose rows are a multiple of 8 bytes")
    if len({ids.shape for ids in (sources, targets, num_tokens)}) > 1 or any(
        ids.dtype != torch.int64 for ids in (sources, targets, num_tokens)
    ):
        got = ", ".join(f"{ids.dtype} {list(ids.shape)}" for ids in (sources, targets, num_tokens))
        raise ValueError(f"expected as many int64 targets and counts as sources, got {got}")
    block_size, head_dim = pool.shape[-2:]
    words = pool.view(len(pool), -1).view(torch.int64)
    if len(sources):
        size = min(4096, triton.next_power_of_2(words.shape[1]))
        copy_blocks_kernel[(len(sources), triton.cdiv(words.shape[1], size))](
            words,
            sources,
            targets,
            num_tokens,
            words.stride(0),
            WORDS=words.shape[1],
            TOKEN_WORDS=head_dim * pool.itemsize // 8,
            BLOCK_SIZE=block_size,
            N=size,
            num_warps=8,
        )


def _expect_contiguous_rows(*tensors: torch.Tensor) -> None:
    if any(tensor.stride(-1) != 1 for tensor in tensors):
        raise ValueError("expected a stride of 1 along the last dimension")
