"""One row's partial results as one: what a program of `attend` does that completes a row, and a kernel for all rows.

    out = sum_i 2^s_i out_i / sum_i 2^s_i          (s: the partials' log2-sums)

Rows and their partials are the plan's (`work` module); must not know how they were computed.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit
def merge_row(
    out,
    partial_out,
    partial_sum,
    row,
    kv_head,
    first,
    count,
    out_row_stride,
    out_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MERGE_PAD: tl.constexpr,  # GROUP * HEAD_DIM up to a power of two
    SPLITS: tl.constexpr,  # partials read at a time
):
    """One row's partials `first` to `first + count`, for the query heads of one KV head.

    Each output element keeps its own maximum and sum, though a head's are all equal: what that costs in arithmetic is
    nothing to the barriers that a reduction between threads would bring.
    """
    element = tl.arange(0, MERGE_PAD)
    is_element = element < GROUP * HEAD_DIM
    head = kv_head * GROUP + element // HEAD_DIM
    column = element % HEAD_DIM
    m = tl.full([MERGE_PAD], float("-inf"), tl.float32)
    total = tl.zeros([MERGE_PAD], tl.float32)
    acc = tl.zeros([MERGE_PAD], tl.float32)
    for begin in range(0, count, SPLITS):
        for ahead in tl.static_range(SPLITS):
            split = begin + ahead
            is_there = tl.where(is_element, split, count) < count
            index = (first + split).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head
            # Past the L1 cache, which other multiprocessors' writes do not reach.
            sums = tl.load(partial_sum + index, mask=is_there, other=float("-inf"), cache_modifier=".cg")
            part = tl.load(partial_out + index * HEAD_DIM + column, mask=is_there, other=0.0, cache_modifier=".cg")
            new_m = tl.maximum(m, sums)
            base = tl.where(new_m == float("-inf"), 0.0, new_m)
            rescale = tl.exp2(m - base)
            weight = tl.exp2(sums - base)
            acc = acc * rescale + part * weight
            total = total * rescale + weight
            m = new_m
    acc = acc / tl.where(total == 0.0, 1.0, total)
    tl.store(
        out + row.to(tl.int64) * out_row_stride + head * out_head_stride + column,
        acc.to(out.dtype.element_ty),
        mask=is_element,
    )


@triton.jit
def _read_merge(merges, index, is_there):
    fields = merges + index * 3
    return (
        tl.load(fields, mask=is_there, other=0),
        tl.load(fields + 1, mask=is_there, other=0),
        tl.load(fields + 2, mask=is_there, other=0),
    )


@triton.jit
def merge_kernel(
    out,  # [num_rows, num_heads, HEAD_DIM]
    partial_out,  # float32 [num_partials, num_heads, HEAD_DIM]
    partial_sum,  # float32 [num_partials, num_heads]
    num_merges,  # int32 [1]
    merges,  # int32 [num_merges, 3], see work.MERGE_FIELDS
    out_row_stride,
    out_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MERGE_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    DEPENDS: tl.constexpr,
):
    """Merge the rows that have several partials, on a fixed grid."""
    first_unit = tl.program_id(0)
    num_units = tl.load(num_merges) * NUM_KV_HEADS
    # Which partials, before the wait for them.
    row, first, count = _read_merge(merges, first_unit // NUM_KV_HEADS, first_unit < num_units)
    if DEPENDS != 0:
        gdc_wait()
    for unit in range(first_unit, num_units, tl.num_programs(0)):
        merge_row(
            out,
            partial_out,
            partial_sum,
            row,
            unit % NUM_KV_HEADS,
            first,
            count,
            out_row_stride,
            out_head_stride,
            NUM_KV_HEADS,
            GROUP,
            HEAD_DIM,
            MERGE_PAD,
            SPLITS,
        )
        next_unit = unit + tl.num_programs(0)
        row, first, count = _read_merge(merges, next_unit // NUM_KV_HEADS, next_unit < num_units)
