"""Rotary embedding and the KV write, with Qwen3's norms of queries and keys, in one pass over a step's heads.

    normalise   h * w / sqrt(mean(h^2) + eps) of each query and key head, if weights are given  (Henry et al. 2020)
    rotate      (a, b) -> (a cos - b sin, b cos + a sin), halves paired as in GPT-NeoX          (Su et al. 2021)
    store       keys and values into their slots of the paged pool, as they are or as fp8: value / scale, clamped to
                what e4m3 holds, so that what is read is stored * scale

Arithmetic is float32, rounded once. Every load of a head is issued before the first use of a position or a slot, so the
chain slot -> position -> angles costs its latency once, beside the heads' own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from chatserve_kernels.early_launch import can_launch_early, early_launch
from chatserve_kernels.paged_kv import check_scales, to_cache

TOKENS = 1
"""A program's."""
NUM_WARPS = 4


@triton.jit
def _load_heads(source, tokens, row_stride, head_stride, mask, HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, columns):
    """float32 [TOKENS, HEADS_PAD, columns]"""
    heads = tl.arange(0, HEADS_PAD)[None, :, None]
    at = source + tokens * row_stride + heads * head_stride + columns
    return tl.load(at, mask=mask & (heads < HEADS), other=0.0).to(tl.float32)


@triton.jit
def _inverse_norm(a, b, rest, eps, HEAD_DIM: tl.constexpr, HAS_REST: tl.constexpr):
    """1 / sqrt(mean(h^2) + eps) of each head, [TOKENS, HEADS_PAD, 1]"""
    squares = tl.sum(a * a, 2) + tl.sum(b * b, 2)
    if HAS_REST:
        squares += tl.sum(rest * rest, 2)
    return tl.rsqrt(squares / HEAD_DIM + eps)[:, :, None]


@triton.jit
def rope_store_kv_kernel(
    query,  # [num_tokens, NUM_HEADS, HEAD_DIM], replaced
    key,  # [num_tokens, NUM_KV_HEADS, HEAD_DIM]
    value,  # the same
    key_cache,  # [num_blocks, NUM_KV_HEADS, BLOCK, HEAD_DIM]
    value_cache,  # the same
    positions,  # int64 [num_tokens]
    slots,  # int64 [num_tokens]: block * BLOCK + token in it; -1: padding
    cos_sin,  # float32 [max_positions, 2 * HALF]
    query_norm,  # [HEAD_DIM]
    key_norm,  # [HEAD_DIM]
    kv_scales,  # float32 [2]: of keys, of values
    eps,
    num_tokens,
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
    REST_PAD: tl.constexpr,  # 0: all of a head is rotated
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_FP8: tl.constexpr,
    DEPENDS: tl.constexpr,  # waits for the kernel before, and lets the one after begin what needs nothing of it
):
    if DEPENDS:
        gdc_launch_dependents()
        gdc_wait()
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None, None]
    half = tl.arange(0, HALF_PAD)[None, None, :]
    rest = 2 * HALF + tl.arange(0, REST_PAD if REST_PAD > 0 else 1)[None, None, :]
    columns = tl.arange(0, HEAD_PAD)[None, None, :]
    exists = tokens < num_tokens
    in_half = exists & (half < HALF)
    in_rest = exists & (rest < HEAD_DIM)
    in_head = exists & (columns < HEAD_DIM)

    query_a = _load_heads(query, tokens, query_row_stride, query_head_stride, in_half, NUM_HEADS, HEADS_PAD, half)
    query_b = _load_heads(
        query, tokens, query_row_stride, query_head_stride, in_half, NUM_HEADS, HEADS_PAD, half + HALF
    )
    key_a = _load_heads(key, tokens, key_row_stride, key_head_stride, in_half, NUM_KV_HEADS, KV_HEADS_PAD, half)
    key_b = _load_heads(key, tokens, key_row_stride, key_head_stride, in_half, NUM_KV_HEADS, KV_HEADS_PAD, half + HALF)
    v = _load_heads(value, tokens, value_row_stride, value_head_stride, in_head, NUM_KV_HEADS, KV_HEADS_PAD, columns)
    query_rest = query_a
    key_rest = key_a
    if REST_PAD > 0:
        key_rest = _load_heads(key, tokens, key_row_stride, key_head_stride, in_rest, NUM_KV_HEADS, KV_HEADS_PAD, rest)
        if HAS_NORM:
            query_rest = _load_heads(
                query, tokens, query_row_stride, query_head_stride, in_rest, NUM_HEADS, HEADS_PAD, rest
            )
    slot = tl.load(slots + tokens, mask=exists, other=-1)
    position = tl.load(positions + tokens, mask=slot >= 0, other=0)
    angles = cos_sin + position * (2 * HALF) + half
    cos = tl.load(angles, mask=half < HALF, other=0.0)
    sin = tl.load(angles + HALF, mask=half < HALF, other=0.0)

    if HAS_NORM:
        inverse = _inverse_norm(query_a, query_b, query_rest, eps, HEAD_DIM, REST_PAD > 0)
        query_a *= inverse * tl.load(query_norm + half, mask=half < HALF, other=0.0).to(tl.float32)
        query_b *= inverse * tl.load(query_norm + half + HALF, mask=half < HALF, other=0.0).to(tl.float32)
        if REST_PAD > 0:
            query_rest *= inverse * tl.load(query_norm + rest, mask=rest < HEAD_DIM, other=0.0).to(tl.float32)
        inverse = _inverse_norm(key_a, key_b, key_rest, eps, HEAD_DIM, REST_PAD > 0)
        key_a *= inverse * tl.load(key_norm + half, mask=half < HALF, other=0.0).to(tl.float32)
        key_b *= inverse * tl.load(key_norm + half + HALF, mask=half < HALF, other=0.0).to(tl.float32)
        if REST_PAD > 0:
            key_rest *= inverse * tl.load(key_norm + rest, mask=rest < HEAD_DIM, other=0.0).to(tl.float32)

    key_scale = 1.0
    value_scale = 1.0
    if IS_FP8:
        key_scale = tl.load(kv_scales)
        value_scale = tl.load(kv_scales + 1)
    is_kept = slot >= 0
    heads = tl.arange(0, HEADS_PAD)[None, :, None]
    kv_heads = tl.arange(0, KV_HEADS_PAD)[None, :, None]
    at = query + tokens * query_row_stride + heads * query_head_stride
    mask = is_kept & (half < HALF) & (heads < NUM_HEADS)
    tl.store(at + half, (query_a * cos - query_b * sin).to(query.dtype.element_ty), mask=mask)
    tl.store(at + half + HALF, (query_b * cos + query_a * sin).to(query.dtype.element_ty), mask=mask)
    if REST_PAD > 0 and HAS_NORM:
        mask = is_kept & (rest < HEAD_DIM) & (heads < NUM_HEADS)
        tl.store(at + rest, query_rest.to(query.dtype.element_ty), mask=mask)

    block = slot // BLOCK
    in_block = slot % BLOCK
    at = key_cache + block * key_block_stride + in_block * key_token_stride + kv_heads * key_cache_head_stride
    mask = is_kept & (half < HALF) & (kv_heads < NUM_KV_HEADS)
    tl.store(at + half, to_cache(key_a * cos - key_b * sin, key_scale, key_cache, IS_FP8), mask=mask)
    tl.store(at + half + HALF, to_cache(key_b * cos + key_a * sin, key_scale, key_cache, IS_FP8), mask=mask)
    if REST_PAD > 0:
        mask = is_kept & (rest < HEAD_DIM) & (kv_heads < NUM_KV_HEADS)
        tl.store(at + rest, to_cache(key_rest, key_scale, key_cache, IS_FP8), mask=mask)
    at = value_cache + block * value_block_stride + in_block * value_token_stride + kv_heads * value_cache_head_stride
    mask = is_kept & (columns < HEAD_DIM) & (kv_heads < NUM_KV_HEADS)
    tl.store(at + columns, to_cache(v, value_scale, value_cache, IS_FP8), mask=mask)


def constants(num_heads: int, num_kv_heads: int, head_dim: int, half: int, block_size: int) -> dict[str, int]:
    """The sizes that are compiled in."""
    rest = head_dim - 2 * half
    return {
        "NUM_HEADS": num_heads,
        "HEADS_PAD": triton.next_power_of_2(num_heads),
        "NUM_KV_HEADS": num_kv_heads,
        "KV_HEADS_PAD": triton.next_power_of_2(num_kv_heads),
        "HEAD_DIM": head_dim,
        "HEAD_PAD": triton.next_power_of_2(head_dim),
        "HALF": half,
        "HALF_PAD": triton.next_power_of_2(half),
        "REST_PAD": triton.next_power_of_2(rest) if rest else 0,
        "BLOCK": block_size,
        "TOKENS": TOKENS,
    }


def rope_store_kv(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Normalise and rotate `query` in place, and store normalised and rotated keys, and values.

    `query` [num_tokens, num_heads, head_dim]; `key`, `value` [num_tokens, num_kv_heads, head_dim]; caches [num_blocks,
    num_kv_heads, block_size, head_dim]; `positions`, `slots` int64 [num_tokens], a slot being block * block_size +
    token, or -1: nothing is done for this token; `cos_sin` float32 [max_positions, rotated]: the cosines of a
    position's angles, then their sines. `rotated` may be less than head_dim. `norms` are the weights of queries and of
    keys, each [head_dim]; none: no norm. `kv_scales` as `check_scales` wants
    them.

    Raises:
        ValueError: a layout or type that the kernel cannot use.
    """
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, block_size = key_cache.shape[1:3]
    half = cos_sin.shape[1] // 2
    if any(tensor.stride(-1) != 1 for tensor in (query, key, value, key_cache, value_cache, positions, slots)):
        raise ValueError("expected a stride of 1 along the last dimension")
    if not cos_sin.is_contiguous() or cos_sin.dtype != torch.float32 or 2 * half > head_dim:
        raise ValueError(f"expected contiguous float32 angles of at most {head_dim}, got {list(cos_sin.shape)}")
    if any(each.shape != (num_tokens,) or each.dtype != torch.int64 for each in (positions, slots)):
        got = f"{positions.dtype} {list(positions.shape)} and {slots.dtype} {list(slots.shape)}"
        raise ValueError(f"expected int64 positions and slots [{num_tokens}], got {got}")
    check_scales(key_cache, kv_scales)
    if not num_tokens:
        return
    query_norm, key_norm = norms or (query, query)
    rope_store_kv_kernel[(triton.cdiv(num_tokens, TOKENS),)](
        query,
        key,
        value,
        key_cache,
        value_cache,
        positions,
        slots,
        cos_sin,
        query_norm,
        key_norm,
        cos_sin if kv_scales is None else kv_scales,
        eps,
        num_tokens,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        **constants(num_heads, num_kv_heads, head_dim, half, block_size),
        HAS_NORM=norms is not None,
        IS_FP8=kv_scales is not None,
        DEPENDS=can_launch_early(query.device),
        num_warps=NUM_WARPS,
        **early_launch(query.device),
    )
