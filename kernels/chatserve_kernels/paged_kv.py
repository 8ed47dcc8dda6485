"""Paged KV in and out: new keys and values into their slots, whole histories out of them, and tables kept up to date.

    store_kv        keys and values of a packed batch into the pool
    gather_kv       a row's keys and values, from the pool into contiguous memory
    update_tables   some entries of the block tables on the device

A slot is block * block_size + token in it; -1 is a captured graph's padding and stores nothing. Offsets into a pool are
64-bit. Nothing is computed: what arrives is what was sent, to the bit, or rounded once to the pool's type. A pool of
float8_e4m3fn holds value / scale, clamped to what e4m3 holds, so that what is read is stored * scale.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

GATHER_TOKENS = 64
"""Tokens of one head that a gathering program copies: 16 KiB of 16-bit heads of 128, in memory one block apiece."""
E4M3_MAX = tl.constexpr(448.0)
"""The largest finite float8_e4m3fn, which has no infinity: what is larger and not clamped may become NaN."""
IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _round_to_e4m3(x):
    """The nearest number that e4m3 holds, ties to even, as float32. The interpreter's own conversion truncates small
    numbers and halves those that it rounds up to a power of two; of what comes from here it has nothing to round.

    Numbers from 2^e to 2^(e + 1) lie 2^(e - 3) apart, those below 2^-6 as above it. Float32 numbers lie as far apart
    about 1.5 * 2^(e + 20), so that they are rounded where that is added.
    """
    power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    far = tl.maximum(power, 0.015625) * 1572864.0
    return (x + far) - far


@triton.jit
def to_cache(x, scale, cache, IS_FP8: tl.constexpr):
    """What the pool behind the pointer `cache` holds of x."""
    if IS_FP8:
        x = tl.minimum(tl.maximum(x.to(tl.float32) / scale, -E4M3_MAX), E4M3_MAX)
        if IS_INTERPRETED:
            x = _round_to_e4m3(x)
    return x.to(cache.dtype.element_ty)


@triton.jit
def store_kv_kernel(
    key,  # [num_tokens, NUM_KV_HEADS, HEAD_DIM]
    value,  # the same
    key_cache,  # [num_blocks, NUM_KV_HEADS, BLOCK, HEAD_DIM]
    value_cache,  # the same
    slots,  # int64 [num_tokens]
    kv_scales,  # float32 [2]: of keys, of values
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
    NUM_KV_HEADS: tl.constexpr,
    KV_HEADS_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_FP8: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        block = slot // BLOCK
        in_block = slot % BLOCK
        heads = tl.arange(0, KV_HEADS_PAD)[:, None]
        columns = tl.arange(0, HEAD_PAD)[None, :]
        mask = (heads < NUM_KV_HEADS) & (columns < HEAD_DIM)
        k = tl.load(key + token * key_row_stride + heads * key_head_stride + columns, mask=mask)
        v = tl.load(value + token * value_row_stride + heads * value_head_stride + columns, mask=mask)
        key_at = key_cache + block * key_block_stride + in_block * key_token_stride
        value_at = value_cache + block * value_block_stride + in_block * value_token_stride
        key_scale = 1.0
        value_scale = 1.0
        if IS_FP8:
            key_scale = tl.load(kv_scales)
            value_scale = tl.load(kv_scales + 1)
        k = to_cache(k, key_scale, key_cache, IS_FP8)
        v = to_cache(v, value_scale, value_cache, IS_FP8)
        tl.store(key_at + heads * key_cache_head_stride + columns, k, mask=mask)
        tl.store(value_at + heads * value_cache_head_stride + columns, v, mask=mask)


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    kv_scales: torch.Tensor | None = None,
) -> None:
    """Store `key` and `value` [num_tokens, num_kv_heads, head_dim] in `slots`, int64 [num_tokens], of the caches
    [num_blocks, num_kv_heads, block_size, head_dim]; any strides but 1 along head_dim. `kv_scales` as `check_scales`
    wants them.

    Raises:
        ValueError: a layout or type that the kernel cannot use.
    """
    num_tokens, num_kv_heads, head_dim = key.shape
    _expect_rows(key, value, key_cache, value_cache, slots)
    if key_cache.shape != value_cache.shape or key_cache.shape[1::2] != (num_kv_heads, head_dim):
        raise ValueError(f"expected caches of {num_kv_heads} heads of {head_dim}, got {list(key_cache.shape)}")
    if slots.shape != (num_tokens,) or slots.dtype != torch.int64:
        raise ValueError(f"expected int64 slots [{num_tokens}], got {slots.dtype} {list(slots.shape)}")
    check_scales(key_cache, kv_scales)
    if num_tokens:
        store_kv_kernel[(num_tokens,)](
            key,
            value,
            key_cache,
            value_cache,
            slots,
            slots if kv_scales is None else kv_scales,
            *key.stride()[:2],
            *value.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            NUM_KV_HEADS=num_kv_heads,
            KV_HEADS_PAD=triton.next_power_of_2(num_kv_heads),
            HEAD_DIM=head_dim,
            HEAD_PAD=triton.next_power_of_2(head_dim),
            BLOCK=key_cache.shape[2],
            IS_FP8=kv_scales is not None,
            num_warps=4,
        )


def check_scales(cache: torch.Tensor, kv_scales: torch.Tensor | None) -> None:
    """See that caches of float8_e4m3fn, and no other, come with scales: float32 [2], of keys and of values, on the
    device, above 0 (which is not looked at: it would wait for the device).

    Raises:
        ValueError: they do not.
    """
    if (cache.dtype == torch.float8_e4m3fn) != (kv_scales is not None):
        raise ValueError(f"expected kv_scales with a cache of float8_e4m3fn and no other, got {cache.dtype}")
    if kv_scales is not None and (kv_scales.shape != (2,) or kv_scales.dtype != torch.float32):
        raise ValueError(f"expected float32 kv_scales [2], got {kv_scales.dtype} {list(kv_scales.shape)}")


# Every length would be one of four kinds to compile for otherwise.
@triton.jit(do_not_specialize=["num_tokens", "room"])
def gather_kv_kernel(
    key_out,  # [NUM_KV_HEADS, room, HEAD_DIM]
    value_out,  # the same
    key_cache,  # [num_blocks, NUM_KV_HEADS, BLOCK, HEAD_DIM]
    value_cache,  # the same
    table,  # int32 [max_blocks]
    num_tokens,
    room,
    out_head_stride,
    out_token_stride,
    key_block_stride,
    key_head_stride,
    key_token_stride,
    value_block_stride,
    value_head_stride,
    value_token_stride,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0) * N + tl.arange(0, N)
    columns = tl.arange(0, HEAD_PAD)[None, :]
    block = tl.load(table + tokens // BLOCK, mask=tokens < num_tokens, other=0).to(tl.int64)
    in_block = (tokens % BLOCK).to(tl.int64)
    mask = (tokens < num_tokens)[:, None] & (columns < HEAD_DIM)
    key_at = key_cache + head * key_head_stride + (block * key_block_stride + in_block * key_token_stride)[:, None]
    value_at = (
        value_cache + head * value_head_stride + (block * value_block_stride + in_block * value_token_stride)[:, None]
    )
    k = tl.load(key_at + columns, mask=mask, other=0.0)
    v = tl.load(value_at + columns, mask=mask, other=0.0)
    mask = (tokens < room)[:, None] & (columns < HEAD_DIM)
    at = head * out_head_stride + tokens.to(tl.int64)[:, None] * out_token_stride + columns
    tl.store(key_out + at, k.to(key_out.dtype.element_ty), mask=mask)
    tl.store(value_out + at, v.to(value_out.dtype.element_ty), mask=mask)


def gather_kv(
    key_out: torch.Tensor,
    value_out: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    table: torch.Tensor,
    num_tokens: int,
) -> None:
    """Copy the first `num_tokens` keys and values of the row whose blocks `table`, int32 [max_blocks], names.

    Numbers are widened as they are stored: whoever reads a float8_e4m3fn cache has to multiply them by its scales.

    Into the beginning of `key_out` and `value_out` [num_kv_heads, at least num_tokens, head_dim], of equal strides. The
    rest of them becomes zero: a masked key's weight is 0, but 0 times whatever lies there may be NaN.
    """
    num_kv_heads, room, head_dim = key_out.shape
    _expect_rows(key_out, value_out, key_cache, value_cache, table)
    if key_out.shape != value_out.shape or key_out.stride() != value_out.stride():
        raise ValueError("expected room of one shape and strides for keys and values")
    if key_cache.shape[1::2] != (num_kv_heads, head_dim) or num_tokens > room:
        raise ValueError(
            f"expected room for {num_tokens} tokens of {list(key_cache.shape[1::2])}, got {list(key_out.shape)}"
        )
    if room:
        gather_kv_kernel[(triton.cdiv(room, GATHER_TOKENS), num_kv_heads)](
            key_out,
            value_out,
            key_cache,
            value_cache,
            table,
            num_tokens,
            room,
            *key_out.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            HEAD_DIM=head_dim,
            HEAD_PAD=triton.next_power_of_2(head_dim),
            BLOCK=key_cache.shape[2],
            N=GATHER_TOKENS,
            num_warps=4,
        )


@triton.jit
def update_tables_kernel(tables, entries, block_ids, num_updates, N: tl.constexpr):
    index = tl.program_id(0) * N + tl.arange(0, N)
    entry = tl.load(entries + index, mask=index < num_updates, other=-1)
    block = tl.load(block_ids + index, mask=index < num_updates, other=0)
    tl.store(tables + entry, block.to(tl.int32), mask=entry >= 0)


def update_tables(tables: torch.Tensor, entries: torch.Tensor, block_ids: torch.Tensor) -> None:
    """Overwrite entries of the contiguous int32 `tables`; `entries`, counted from its first number, and `block_ids` are
    int64 [num_updates], -1 is no entry, and none comes twice."""
    if tables.dtype != torch.int32 or not tables.is_contiguous():
        raise ValueError("expected contiguous int32 tables")
    _expect_rows(entries, block_ids)
    if len(entries):
        size = 256
        update_tables_kernel[(triton.cdiv(len(entries), size),)](
            tables, entries, block_ids, len(entries), N=size, num_warps=4
        )


def _expect_rows(*tensors: torch.Tensor) -> None:
    if any(tensor.stride(-1) != 1 for tensor in tensors):
        raise ValueError("expected a stride of 1 along the last dimension")
