"""Attention over paged KV: decode over a forest, where a run of blocks that rows share is read once, and prefill.

For row r, query head h, KV head g = h // group, and the keys j of the row (with a window w, the last w of them):

    s_j = scale * q_h . k_gj                    (with a soft cap c: c * tanh(s_j / c))
    out = sum_j exp(s_j) v_gj / sum_j exp(s_j)

`attend_kernel` runs a fixed grid of num_slots x num_kv_heads programs; each walks the items that the plan gives its
slot (`work` module), as flash attention does: running maximum m, sum l and unnormalised output, all in float32 and in
base 2 throughout. The query heads of a group, and the rows that share an item, are the rows of one matrix product
(FlashDecoding's packing of grouped queries). A row read by one item alone is written to `out`; otherwise the item
leaves its normalised output and log2-sum, a *partial*, and the row's partials are weighted by their sums:

    out = sum_i 2^s_i out_i / sum_i 2^s_i

(FlashDecoding's split-K; Hydragen and ChunkAttention for shared prefixes; the equal shares are stream-K's.) The kernel
exists in two specialisations: `small` tiles of 16 query rows, bound by memory, and `wide` ones for runs that more
sessions share, bound by arithmetic. With small tiles alone, whichever program completes a row's partials merges them
(stream-K's fix-up), and one launch does it all. With wide ones too, `merge_kernel` follows.

Prefill is the same work with one more mask: a tile's rows are neighbouring new tokens of one prompt, which share all
its keys up to the last token's, and each hides what lies past its own.

What the kernels guard against:
- an empty share: m is -inf, and -inf - -inf is NaN; so a maximum of -inf is replaced by 0 before it is subtracted;
- memory nobody wrote: keys past an item's end are never loaded, since 0 * NaN is NaN;
- pools over 2^31 elements: block ids are widened before they meet a stride;
- rows that a captured graph has beyond the step's: the plan gives them items without tokens, which write zeros.

Launches depend on each other programmatically (Hopper's griddepcontrol): a kernel is launched while its predecessor
still runs, and waits before it reads anything but the plan, which was there before.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from chatserve_kernels.merge import merge_row


@triton.jit
def _dot(a, b, acc, PRECISION: tl.constexpr, WIDEN: tl.constexpr):
    """The product plus acc. `WIDEN` is for the interpreter, which cannot multiply bfloat16; in float32 it is exact."""
    if WIDEN:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _attend_tile(
    q,  # [M, HEAD_PAD]
    key,
    value,
    table,  # the item's first block
    block,  # [N] ids of this tile's blocks, by token
    begin,
    length,
    first_visible,  # [M]
    last_visible,  # [M]
    m,  # [M]
    l,  # [M]  # noqa: E741 - the literature's name
    acc,  # [M, HEAD_PAD]
    score_scale,
    score_cap,
    key_block_stride,
    key_token_stride,
    value_block_stride,
    value_token_stride,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_CAP: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Tokens `begin` to `begin + N` of an item: the next tile's block ids, and m, l and acc with these tokens in."""
    columns = tl.arange(0, HEAD_PAD)
    tokens = tl.arange(0, N)
    position = begin + tokens
    block64 = block.to(tl.int64)
    in_block = (tokens % BLOCK if N >= BLOCK else position % BLOCK).to(tl.int64)
    key_offset = block64 * key_block_stride + in_block * key_token_stride
    # Equal strides halve the address arithmetic, which is most of the integer work.
    value_offset = key_offset if SAME_STRIDES else block64 * value_block_stride + in_block * value_token_stride
    key_at = key + key_offset[:, None] + columns[None, :]
    value_at = value + value_offset[:, None] + columns[None, :]
    # Masks in every tile: peeling the last one off was slower, in small tiles and in wide ones.
    is_live = position < length
    is_loaded = is_live[:, None] & (columns < HEAD_DIM)[None, :]
    k = tl.load(key_at, mask=is_loaded, other=0.0)
    v = tl.load(value_at, mask=is_loaded, other=0.0)
    # The next tile's block ids, a tile ahead, so that its keys never wait for them.
    block = tl.load(table + (position + N) // BLOCK, mask=position + N < length, other=0)

    scores = _dot(q, tl.trans(k.to(q.dtype)), tl.zeros([q.shape[0], N], tl.float32), PRECISION, WIDEN)
    if HAS_CAP:
        # tanh |x| = (1 - e) / (1 + e) with e = exp(-2|x|), which cannot overflow.
        decay = tl.exp2(-tl.abs(scores * score_scale))
        bent = score_cap * (1.0 - decay) / (1.0 + decay)
        scores = tl.where(scores < 0.0, -bent, bent)
        score_scale = 1.0
    is_seen = is_live[None, :]
    if HAS_WINDOW:
        is_seen = is_seen & (position[None, :] >= first_visible[:, None])
    if IS_CAUSAL:
        is_seen = is_seen & (position[None, :] <= last_visible[:, None])
    scores = tl.where(is_seen, scores, float("-inf"))
    new_m = tl.maximum(m, tl.max(scores, 1) * score_scale)
    base = tl.where(new_m == float("-inf"), 0.0, new_m)
    rescale = tl.exp2(m - base)
    p = tl.exp2(scores * score_scale - base[:, None])  # scaling and subtraction are one instruction
    l = l * rescale + tl.sum(p, 1)  # noqa: E741
    acc = _dot(p.to(q.dtype), v.to(q.dtype), acc * rescale[:, None], PRECISION, WIDEN)
    return block, new_m, l, acc


@triton.jit
def attend_kernel(
    out,  # [num_rows, num_heads, HEAD_DIM]
    partial_out,  # float32 [num_partials, num_heads, HEAD_DIM]
    partial_sum,  # float32 [num_partials, num_heads]: log2 of the sum of exp2 of the scores
    query,  # [num_rows, num_heads, HEAD_DIM]
    key,  # [num_blocks, num_kv_heads, BLOCK, HEAD_DIM], widened to query's type before it is multiplied
    value,  # the same
    tables,  # int32 [num_rows, max_blocks]
    starts,  # int32 [num_slots + 1]: each slot's first item
    items,  # int32 [num_items, 5], see work.ITEM_FIELDS
    entries,  # int32 [num_entries, 4], see work.ENTRY_FIELDS
    last_positions,  # int32 [num_rows]
    arrivals,  # int32 [max_rows, num_kv_heads], zero before and after
    key_scale,  # float32 [1 or num_kv_heads], what stored keys are multiplied by, or None
    value_scale,
    score_scale,  # scale * log2(e); with a soft cap: 2 * scale * log2(e) / softcap
    score_cap,  # softcap * log2(e)
    window,
    out_row_stride,
    out_head_stride,
    query_row_stride,
    query_head_stride,
    key_block_stride,
    key_head_stride,
    key_token_stride,
    value_block_stride,
    value_head_stride,
    value_token_stride,
    table_stride,
    scale_stride,  # from one head's scale to the next one's: 0 or 1
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,  # HEAD_DIM up to a power of two
    BLOCK: tl.constexpr,
    M: tl.constexpr,  # query rows a tile: heads of a group x sessions
    N: tl.constexpr,  # keys a tile
    HAS_WINDOW: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_CAP: tl.constexpr,
    SAME_STRIDES: tl.constexpr,  # of keys and values
    PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
    MERGES: tl.constexpr,  # whoever completes a row's partials merges them
    MERGE_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    DEPENDS: tl.constexpr,  # waits for the kernel before: 0 no, 1 at its start, 2 at its end
):
    if DEPENDS == 1:
        gdc_wait()
    if DEPENDS != 0:
        gdc_launch_dependents()
    program = tl.program_id(0)
    head = program % NUM_KV_HEADS  # neighbours read neighbouring heads of the same blocks
    slot = program // NUM_KV_HEADS
    rows = tl.arange(0, M)
    row_in_item = rows // GROUP
    query_head = head * GROUP + rows % GROUP
    columns = tl.arange(0, HEAD_PAD)
    has_column = columns < HEAD_DIM
    tokens = tl.arange(0, N)
    key += head * key_head_stride.to(tl.int64)
    value += head * value_head_stride.to(tl.int64)
    if key_scale is not None:
        score_scale *= tl.load(key_scale + head * scale_stride)

    for item in range(tl.load(starts + slot), tl.load(starts + slot + 1)):
        table_row = tl.load(items + item * 5)
        first_token = tl.load(items + item * 5 + 1)
        length = tl.load(items + item * 5 + 2)
        first_entry = tl.load(items + item * 5 + 3)
        num_entries = tl.load(items + item * 5 + 4)
        table = tables + table_row.to(tl.int64) * table_stride + first_token // BLOCK

        has_row = row_in_item < num_entries
        entry = entries + (first_entry + row_in_item) * 4
        query_row = tl.load(entry, mask=has_row, other=0)
        partial = tl.load(entry + 1, mask=has_row, other=-1)
        has_element = has_row[:, None] & has_column[None, :]
        q = tl.load(
            query
            + query_row.to(tl.int64)[:, None] * query_row_stride
            + (query_head * query_head_stride)[:, None]
            + columns[None, :],
            mask=has_element,
            other=0.0,
        )
        # In this item's own count of tokens, so that one comparison a key is left.
        last_visible = tl.load(last_positions + query_row, mask=has_row, other=0) - first_token
        first_visible = last_visible - window + 1

        m = tl.full([M], float("-inf"), tl.float32)
        l = tl.zeros([M], tl.float32)  # noqa: E741 - the literature's name
        acc = tl.zeros([M, HEAD_PAD], tl.float32)
        block = tl.load(table + tokens // BLOCK, mask=tokens < length, other=0)
        for begin in range(0, length, N):
            block, m, l, acc = _attend_tile(  # noqa: E741
                q, key, value, table, block, begin, length, first_visible, last_visible, m, l, acc,
                score_scale, score_cap,
                key_block_stride, key_token_stride, value_block_stride, value_token_stride,
                HEAD_DIM, HEAD_PAD, BLOCK, N, HAS_WINDOW, IS_CAUSAL, HAS_CAP, SAME_STRIDES, PRECISION, WIDEN,
            )  # fmt: skip

        if value_scale is not None:
            acc *= tl.load(value_scale + head * scale_stride)
        acc = acc / tl.where(l == 0.0, 1.0, l)[:, None]
        is_partial = has_row & (partial >= 0)
        slot_of_head = partial.to(tl.int64) * (NUM_KV_HEADS * GROUP) + query_head
        tl.store(partial_sum + slot_of_head, m + tl.log2(tl.where(l == 0.0, 1.0, l)), mask=is_partial)
        tl.store(
            partial_out + slot_of_head[:, None] * HEAD_DIM + columns[None, :],
            acc,
            mask=is_partial[:, None] & has_column[None, :],
        )
        is_final = has_row & (partial < 0)
        tl.store(
            out
            + query_row.to(tl.int64)[:, None] * out_row_stride
            + (query_head * out_head_stride)[:, None]
            + columns[None, :],
            acc.to(out.dtype.element_ty),
            mask=is_final[:, None] & has_column[None, :],
        )
        if MERGES:
            for index in range(first_entry, first_entry + num_entries):
                count = tl.load(entries + index * 4 + 3)
                if count > 1:
                    row = tl.load(entries + index * 4)
                    arrival = arrivals + row.to(tl.int64) * NUM_KV_HEADS + head
                    # All threads have stored their share before one of them says so.
                    tl.debug_barrier()
                    if tl.atomic_add(arrival, 1, sem="acq_rel", scope="gpu") == count - 1:
                        tl.store(arrival, 0)
                        merge_row(
                            out,
                            partial_out,
                            partial_sum,
                            row,
                            head,
                            tl.load(entries + index * 4 + 2),
                            count,
                            out_row_stride,
                            out_head_stride,
                            NUM_KV_HEADS,
                            GROUP,
                            HEAD_DIM,
                            MERGE_PAD,
                            SPLITS,
                        )
    if DEPENDS == 2:
        gdc_wait()
