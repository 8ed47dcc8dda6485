"""Long prompts by torch's own fused attention (cuDNN on CUDA), over a contiguous copy of a row's paged KV.

A dense kernel is faster than any over pages, so that copying a row's KV first pays from some hundred new tokens on. The
new tokens' attention is cut by key:

    [0, prefix)     all of these keys, by each new token
    [prefix, end)   causal: a square whose queries are the tokens at those positions, of which the last are the new ones

and the two results are weighted by their sums of exponentials, as partials are in `attend`. A square has no need of a
mask aligned to its end, which cuDNN lacks; the queries in front of the new tokens are dummies.

cuDNN builds a program for every shape it has not met, in some 35 ms (measured), so that shapes are few: `split` gives
the new tokens that are worth it, in steps of half a power of two, and leaves the rest to `paged_prefill`; prefixes come
in steps of an eighth of a power of two, squares in multiples of 128. Must not know planners.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from chatserve_kernels.paged_kv import gather_kv

MIN_TOKENS = 512
"""Fewer new tokens are left to `paged_prefill`."""
LONG_PREFIX = 8192
"""The shortest prefix on which `paged_prefill` was measured to be faster, for 512 to 1,024 new tokens (on an H200)."""
MIN_TOKENS_ON_LONG_PREFIX = 2048
"""Fewer new tokens on such a prefix are left to `paged_prefill`; 1,024 were slower densely, 4,096 faster."""
MIN_PREFIX = 1024
"""A shorter prefix becomes part of the square."""
MAX_CONTEXT = 65_536
"""Longer rows are left to `paged_prefill`, so that the copy's memory has a bound: 256 MiB for 8 heads of 128."""
SQUARE_UNIT = 128
HEAD_DIMS = (64, 80, 96, 128, 256)
"""What cuDNN was seen to take, in 16 bits, on an H200."""


class DensePiece(NamedTuple):
    """`num_tokens` new tokens from position `start` on; keys up to `prefix` are none of the square's."""

    start: int
    num_tokens: int
    prefix: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def num_dummies(self) -> int:
        """Queries in front of the new ones."""
        return self.start - self.prefix

    @property
    def square(self) -> int:
        size = self.end - self.prefix
        return -(-size // SQUARE_UNIT) * SQUARE_UNIT


def split(start: int, num_tokens: int) -> DensePiece | None:
    """The first of `num_tokens` new tokens from position `start` on, as far as a dense kernel is worth it."""
    least = MIN_TOKENS_ON_LONG_PREFIX if start >= LONG_PREFIX else MIN_TOKENS
    if num_tokens < least or start + num_tokens > MAX_CONTEXT:
        return None
    return DensePiece(start, _floor(num_tokens, 2), _floor(start, 8) if start >= MIN_PREFIX else 0)


def warm_up(
    workspace: DenseWorkspace, key_cache: torch.Tensor, value_cache: torch.Tensor, num_heads: int, max_tokens: int
) -> None:
    """Compile and build what pieces of up to `max_tokens` on no prefix need, and the parts of all others but for the
    programs of their shapes. Reads the caches, whatever they hold, and writes nothing."""
    block_size, head_dim = key_cache.shape[2:]
    sizes = sorted({_floor(size, 2) for size in range(MIN_TOKENS, min(max_tokens, MAX_CONTEXT) + 1, MIN_TOKENS // 2)})
    pieces = [DensePiece(0, size, 0) for size in sizes]
    if sizes:
        pieces.append(DensePiece(MIN_PREFIX + 1, MIN_TOKENS, MIN_PREFIX))
    for piece in pieces:
        table = torch.zeros(-(-piece.end // block_size), dtype=torch.int32, device=key_cache.device)
        query = torch.zeros((piece.num_tokens, num_heads, head_dim), dtype=workspace.dtype, device=key_cache.device)
        dense_prefill(query, key_cache, value_cache, table, piece, workspace, scale=1.0)


def serves(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether there is a dense kernel for such heads: on CUDA, one that is faster than a paged one."""
    return head_dim in HEAD_DIMS and (device.type == "cpu" or dtype in (torch.bfloat16, torch.float16))


class DenseWorkspace:
    """Room for one row's keys and values, of one layer at a time, and for queries between dummies.

    The first is taken whole when it is first needed, so that whoever measures a step's memory sees it.
    """

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape = (2, num_kv_heads, MAX_CONTEXT + SQUARE_UNIT, head_dim)
        self._kv: torch.Tensor | None = None
        self._query = torch.empty((0, num_heads, head_dim), dtype=dtype, device=device)

    @property
    def dtype(self) -> torch.dtype:
        """Of queries, and of what keys and values are widened to."""
        return self._query.dtype

    def key_value(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Each [num_kv_heads, num_tokens, head_dim]."""
        if self._kv is None:
            self._kv = self._query.new_empty(self._shape)
        return self._kv[0, :, :num_tokens], self._kv[1, :, :num_tokens]

    def queries(self, num_tokens: int) -> torch.Tensor:
        """[num_tokens, num_heads, head_dim]; what nobody writes stays zero or an older query."""
        if len(self._query) < num_tokens:
            room = -(-num_tokens // MIN_PREFIX) * MIN_PREFIX
            self._query = self._query.new_zeros((room, *self._query.shape[1:]))
        return self._query[:num_tokens]


def dense_prefill(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    table: torch.Tensor,
    piece: DensePiece,
    workspace: DenseWorkspace,
    *,
    scale: float,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> torch.Tensor:
    """Attend from a piece's new tokens to their row's keys up to their own, which must be in the pool already.

    `query` [num_tokens, num_heads, head_dim]; caches [num_blocks, num_kv_heads, block_size, head_dim]; `table` int32
    [max_blocks], the row's; `key_scale` and `value_scale`, above 0, are what stored numbers must be multiplied by.
    Returns [num_tokens, num_heads, head_dim].
    """
    num_tokens, prefix, first = piece.num_tokens, piece.prefix, piece.num_dummies
    scale *= key_scale
    if len(query) != num_tokens:
        raise ValueError(f"expected the piece's {num_tokens} queries, got {len(query)}")
    keys, values = workspace.key_value(prefix + piece.square)
    gather_kv(keys, values, key_cache, value_cache, table, piece.end)
    if piece.square == num_tokens:
        square = query
    else:
        square = workspace.queries(piece.square)
        square[first : first + num_tokens] = query
    new = slice(first, first + num_tokens)
    causal, causal_sums = _attend(square, keys[:, prefix:], values[:, prefix:], scale, is_causal=True)
    out = causal[new]
    if prefix:
        full, full_sums = _attend(query, keys[:, :prefix], values[:, :prefix], scale, is_causal=False)
        out = _merge(full, full_sums, out, causal_sums[:, new])
    return out if value_scale == 1.0 else out.mul_(value_scale)


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, *, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """`query` [num_tokens, num_heads, head_dim], `keys` and `values` [num_kv_heads, num_keys, head_dim]; returns the
    result, like `query`, and the logarithms of its sums of exponentials, float32 [num_heads, num_tokens]."""
    arguments = (query.transpose(0, 1).unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0))
    if query.is_cuda:
        out, sums, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(  # noqa: SLF001 - the only one that returns sums
            *arguments, None, True, 0.0, is_causal, False, scale=scale
        )
    else:
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001
            *arguments, 0.0, is_causal, scale=scale
        )
    return out[0].transpose(0, 1), sums.view(query.shape[1], query.shape[0])


@triton.jit
def merge_states_kernel(
    out,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    first,  # the same
    second,  # the same
    first_sums,  # float32 [NUM_HEADS, num_tokens]
    second_sums,  # the same
    out_row_stride,
    first_row_stride,
    first_head_stride,
    second_row_stride,
    second_head_stride,
    first_sums_head_stride,
    first_sums_stride,
    second_sums_head_stride,
    second_sums_stride,
    NUM_HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS_PAD)
    columns = tl.arange(0, HEAD_PAD)
    has_head = heads < NUM_HEADS
    mask = has_head[:, None] & (columns < HEAD_DIM)[None, :]
    a = tl.load(first_sums + heads * first_sums_head_stride + row * first_sums_stride, mask=has_head, other=0.0)
    b = tl.load(second_sums + heads * second_sums_head_stride + row * second_sums_stride, mask=has_head, other=0.0)
    share = (1.0 / (1.0 + tl.exp(b - a)))[:, None]  # of the first
    x = tl.load(first + row * first_row_stride + heads[:, None] * first_head_stride + columns[None, :], mask=mask)
    y = tl.load(second + row * second_row_stride + heads[:, None] * second_head_stride + columns[None, :], mask=mask)
    merged = x.to(tl.float32) * share + y.to(tl.float32) * (1.0 - share)
    at = out + row * out_row_stride + heads[:, None] * HEAD_DIM + columns[None, :]
    tl.store(at, merged.to(out.dtype.element_ty), mask=mask)


def _merge(
    first: torch.Tensor, first_sums: torch.Tensor, second: torch.Tensor, second_sums: torch.Tensor
) -> torch.Tensor:
    """Both results [num_tokens, num_heads, head_dim] and sums [num_heads, num_tokens] as one, of all keys."""
    num_tokens, num_heads, head_dim = first.shape
    out = torch.empty(first.shape, dtype=first.dtype, device=first.device)
    merge_states_kernel[(num_tokens,)](
        out,
        first,
        second,
        first_sums,
        second_sums,
        out.stride(0),
        *first.stride()[:2],
        *second.stride()[:2],
        *first_sums.stride(),
        *second_sums.stride(),
        NUM_HEADS=num_heads,
        HEADS_PAD=triton.next_power_of_2(num_heads),
        HEAD_DIM=head_dim,
        HEAD_PAD=triton.next_power_of_2(head_dim),
        num_warps=4,
    )
    return out


def _floor(number: int, steps: int) -> int:
    """The largest of few numbers that is at most this one: so many lie between a power of two and the next."""
    step = max(1, (1 << (number.bit_length() - 1)) // steps)
    return number // step * step
