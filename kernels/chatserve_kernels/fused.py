"""The memory-bound steps between matrix products, each in one pass over its data.

    add_rms_norm     r' = r + x;  y = w * r' / sqrt(mean(r'^2) + eps)      (Zhang & Sennrich 2019)
    silu_mul         y = g * sigmoid(g) * u                                (Shazeer 2020, SwiGLU)
    rope_store_kv    rotates queries and keys by their positions (Su et al. 2021, halves paired as in GPT-NeoX) and puts
                     keys and values into their slots of the paged pool
    copy_blocks      whole blocks of a pool, for copy-on-write

Arithmetic is float32; what a later step reads again is rounded once, to the tensors' own type. Last dimensions must be
contiguous, all others may have any stride; offsets into a pool are 64-bit. Rows with slot -1, a captured graph's
padding, are not stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


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
):
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
            num_warps=8 if width > 2048 else 4,
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
):
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
            out, gate_up, out.stride(0), gate_up.stride(0), WIDTH=width, N=columns, num_warps=4
        )
    return out


@triton.jit
def _rotate(
    source,
    target,
    cos,
    sin,
    head_stride,
    target_head_stride,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
):
    """One token's heads: (a, b) becomes (a cos - b sin, b cos + a sin); what lies past both halves is copied."""
    heads = tl.arange(0, HEADS_PAD)[:, None]
    columns = tl.arange(0, HALF_PAD)[None, :]
    mask = (heads < HEADS) & (columns < HALF)
    a = tl.load(source + heads * head_stride + columns, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(source + heads * head_stride + HALF + columns, mask=mask, other=0.0).to(tl.float32)
    at = target + heads * target_head_stride + columns
    tl.store(at, (a * cos - b * sin).to(target.dtype.element_ty), mask=mask)
    tl.store(at + HALF, (b * cos + a * sin).to(target.dtype.element_ty), mask=mask)
    if REST_PAD > 0:
        rest = 2 * HALF + tl.arange(0, REST_PAD)[None, :]
        mask = (heads < HEADS) & (rest < HEAD_DIM)
        kept = tl.load(source + heads * head_stride + rest, mask=mask, other=0.0)
        tl.store(target + heads * target_head_stride + rest, kept, mask=mask)


@triton.jit
def rope_store_kv_kernel(
    query,  # [num_tokens, NUM_HEADS, HEAD_DIM], rotated in place
    key,  # [num_tokens, NUM_KV_HEADS, HEAD_DIM]
    value,  # the same
    key_cache,  # [num_blocks, NUM_KV_HEADS, BLOCK, HEAD_DIM]
    value_cache,  # the same
    positions,  # int64 [num_tokens]
    slots,  # int64 [num_tokens]: block * BLOCK + token in it; -1: padding
    cos_sin,  # float32 [max_positions, 2 * HALF]
    query_row_stride,
    query_head_stride,
    key_row_stride,
    key_head_stride,
    value_row_stride,
    value_head_stride,
    key_block_stride,
    key_cache_head_stride,
    key_token_stride,
    value_block_stride,
    value_cache_head_stride,
    value_token_stride,
    NUM_HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    KV_HEADS_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        half = tl.arange(0, HALF_PAD)
        angles = cos_sin + tl.load(positions + token) * (2 * HALF) + half
        cos = tl.load(angles, mask=half < HALF, other=0.0)[None, :]
        sin = tl.load(angles + HALF, mask=half < HALF, other=0.0)[None, :]
        block = slot // BLOCK
        in_block = slot % BLOCK
        row = query + token * query_row_stride
        _rotate(
            row, row, cos, sin, query_head_stride, query_head_stride,
            NUM_HEADS, HEADS_PAD, HEAD_DIM, HALF, HALF_PAD, 0,
        )  # fmt: skip
        _rotate(
            key + token * key_row_stride,
            key_cache + block * key_block_stride + in_block * key_token_stride,
            cos, sin, key_head_stride, key_cache_head_stride,
            NUM_KV_HEADS, KV_HEADS_PAD, HEAD_DIM, HALF, HALF_PAD, REST_PAD,
        )  # fmt: skip
        heads = tl.arange(0, KV_HEADS_PAD)[:, None]
        columns = tl.arange(0, HEAD_PAD)[None, :]
        mask = (heads < NUM_KV_HEADS) & (columns < HEAD_DIM)
        v = tl.load(value + token * value_row_stride + heads * value_head_stride + columns, mask=mask)
        at = value_cache + block * value_block_stride + in_block * value_token_stride
        tl.store(at + heads * value_cache_head_stride + columns, v.to(value_cache.dtype.element_ty), mask=mask)


def rope_store_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos_sin: torch.Tensor,
) -> None:
    """Rotate `query` in place, and store rotated keys, and values.

    `query` [num_tokens, num_heads, head_dim]; `key`, `value` [num_tokens, num_kv_heads, head_dim]; caches [num_blocks,
    num_kv_heads, block_size, head_dim]; `positions`, `slots` int64 [num_tokens], a slot being block * block_size +
    token, or -1; `cos_sin` float32 [max_positions, rotated]: the cosines of a position's angles, then their sines.
    `rotated` may be less than head_dim.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, block_size = key_cache.shape[1:3]
    half = cos_sin.shape[1] // 2
    _expect_contiguous_rows(query, key, value, key_cache, value_cache, positions, slots)
    if not cos_sin.is_contiguous() or cos_sin.dtype != torch.float32 or 2 * half > head_dim:
        raise ValueError(f"expected contiguous float32 angles of at most {head_dim}, got {list(cos_sin.shape)}")
    if not num_tokens:
        return
    rest = head_dim - 2 * half
    rope_store_kv_kernel[(num_tokens,)](
        query,
        key,
        value,
        key_cache,
        value_cache,
        positions,
        slots,
        cos_sin,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        NUM_HEADS=num_heads,
        HEADS_PAD=triton.next_power_of_2(num_heads),
        NUM_KV_HEADS=num_kv_heads,
        KV_HEADS_PAD=triton.next_power_of_2(num_kv_heads),
        HEAD_DIM=head_dim,
        HEAD_PAD=triton.next_power_of_2(head_dim),
        HALF=half,
        HALF_PAD=triton.next_power_of_2(half),
        REST_PAD=triton.next_power_of_2(rest) if rest else 0,
        BLOCK=block_size,
        num_warps=4,
    )


@triton.jit
def copy_blocks_kernel(
    pool,  # int64 words [num_blocks, WORDS]
    sources,  # int64 [num_copies]
    targets,  # int64 [num_copies]; -1: padding
    block_stride,
    WORDS: tl.constexpr,
    N: tl.constexpr,
):
    target = tl.load(targets + tl.program_id(0))
    if target >= 0:
        source = tl.load(sources + tl.program_id(0))
        words = tl.program_id(1) * N + tl.arange(0, N)
        mask = words < WORDS
        data = tl.load(pool + source * block_stride + words, mask=mask)
        tl.store(pool + target * block_stride + words, data, mask=mask)


def copy_blocks(pool: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy block `sources[i]` of `pool` [num_blocks, ...] over block `targets[i]`, if that is not -1.

    Both int64 [num_copies], on the pool's device; no target may be a source or another's target. Blocks are contiguous
    and of a multiple of 8 bytes.
    """
    if not pool.is_contiguous() or pool[0].nbytes % 8:
        raise ValueError("expected a contiguous pool of blocks of a multiple of 8 bytes")
    words = pool.view(len(pool), -1).view(torch.int64)
    if len(sources):
        size = min(4096, triton.next_power_of_2(words.shape[1]))
        copy_blocks_kernel[(len(sources), triton.cdiv(words.shape[1], size))](
            words, sources, targets, words.stride(0), WORDS=words.shape[1], N=size, num_warps=8
        )


def _expect_contiguous_rows(*tensors: torch.Tensor) -> None:
    if any(tensor.stride(-1) != 1 for tensor in tensors):
        raise ValueError("expected a stride of 1 along the last dimension")
