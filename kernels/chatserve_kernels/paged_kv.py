"""Paged KV in and out: new keys and values into their slots, whole histories out of them, and tables kept up to date.

    store_kv        keys and values of a packed batch into the pool
    gather_kv       a row's keys and values, from the pool into contiguous memory
    update_tables   some entries of the block tables on the device

A slot is block * block_size + token in it; -1 is a captured graph's padding and stores nothing. Offsets into a pool are
64-bit. Nothing is computed: what arrives is what was sent, to the bit, or rounded once to the pool's type.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

GATHER_TOKENS = 64
"""Tokens of one head that a gathering program copies: 16 KiB of 16-bit heads of 128, in memory one block apiece."""


@triton.jit
def store_kv_kernel(
    key,  # [num_tokens, NUM_KV_HEADS, HEAD_DIM]
    value,  # the same
    key_cache,  # [num_blocks, NUM_KV_HEADS, BLOCK, HEAD_DIM]
    value_cache,  # the same
    slots,  # int64 [num_tokens]
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
        tl.store(key_at + heads * key_cache_head_stride + columns, k.to(key_cache.dtype.element_ty), mask=mask)
        tl.store(value_at + heads * value_cache_head_stride + columns, v.to(value_cache.dtype.element_ty), mask=mask)


def store_kv(
    key: torch.Tensor, value: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store `key` and `value` [num_tokens, num_kv_heads, head_dim] in `slots`, int64 [num_tokens], of the caches
    [num_blocks, num_kv_heads, block_size, head_dim]; any strides but 1 along head_dim."""
    num_tokens, num_kv_heads, head_dim = key.shape
    _expect_rows(key, value, key_cache, value_cache, slots)
    if key_cache.shape != value_cache.shape or key_cache.shape[1::2] != (num_kv_heads, head_dim):
        raise ValueError(f"expected caches of {num_kv_heads} heads of {head_dim}, got {list(key_cache.shape)}")
    if slots.shape != (num_tokens,) or slots.dtype != torch.int64:
        raise ValueError(f"expected int64 slots [{num_tokens}], got {slots.dtype} {list(slots.shape)}")
    if num_tokens:
        store_kv_kernel[(num_tokens,)](
            key,
            value,
            key_cache,
            value_cache,
            slots,
            *key.stride()[:2],
            *value.stride()[:2],
            *key_cache.stride()[:3],
            *value_cache.stride()[:3],
            NUM_KV_HEADS=num_kv_heads,
            KV_HEADS_PAD=triton.next_power_of_2(num_kv_heads),
            HEAD_DIM=head_dim,
            HEAD_PAD=triton.next_power_of_2(head_dim),
            BLOCK=key_cache.shape[2],
            num_warps=4,
        )


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
