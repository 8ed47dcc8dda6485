"""The warpgroups of `attend_hopper_kernel` that multiply: 64 query rows each, from the rings to results and partials.

Knows queries, masks, soft caps and where results go; must not know block tables or how keys and values are laid out in
the pool.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from chatserve_kernels.hopper_ring import advance, read_item


@gluon.jit
def _weights(
    s, m, l, begin, first_visible, limit, min_limit, score_scale, score_cap,  # noqa: E741
    HAS_WINDOW: gl.constexpr, HAS_CAP: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """A tile's unnormalised weights from its scores, what to rescale earlier sums by, and the new maximum and sum.

    Only tiles that reach past `min_limit`, the first key that any row must not see, compare positions.
    """
    N: gl.constexpr = s.shape[1]
    if HAS_CAP:
        decay = gl.exp2(-gl.abs(s * score_scale))
        bent = score_cap * (1.0 - decay) / (1.0 + decay)
        s = gl.where(s < 0.0, -bent, bent)
        score_scale = 1.0
    position = begin + gl.arange(0, N, layout=gl.SliceLayout(0, LAYOUT))
    if HAS_WINDOW:
        s = gl.where(position[None, :] >= first_visible[:, None], s, float("-inf"))
    if begin + N > min_limit:
        s = gl.where(position[None, :] < limit[:, None], s, float("-inf"))
    new_m = gl.maximum(m, gl.max(s, 1) * score_scale)
    base = gl.where(new_m == float("-inf"), 0.0, new_m)
    rescale = gl.exp2(m - base)
    p = gl.exp2(s * score_scale - base[:, None])
    return p, rescale, new_m, l * rescale + gl.sum(p, 1)


@gluon.jit
def _clear_past(v_tile, num_tokens, N: gl.constexpr):
    """Zero the rows of a tile of values past its tokens: what lies there may be NaN, and 0 * NaN is NaN.

    Both warpgroups do so before they read, and write the same.
    """
    WIDTH: gl.constexpr = v_tile.shape[1]
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    token = gl.arange(0, N, layout=gl.SliceLayout(1, LAYOUT))
    values = v_tile.load(LAYOUT)
    v_tile.store(gl.where((token < num_tokens)[:, None], values, gl.zeros_like(values)))
    fence_async_shared()


@gluon.jit
def _attend_tiles(
    q_tile, k_tiles, v_tiles, k_full, k_free, v_full, v_free, stage, phase, m, l, acc, length,  # noqa: E741
    first_visible, limit, min_limit, score_scale, score_cap,
    HAS_WINDOW: gl.constexpr, HAS_CAP: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
):  # fmt: skip
    """An item's tiles, at least one: where in the rings they end, and m, l and acc with them in."""
    STAGES: gl.constexpr = k_tiles.shape[0]
    N: gl.constexpr = k_tiles.shape[1]
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    no_scores = gl.zeros([64, N], gl.float32, layout=S_LAYOUT)
    num_tiles = (length + N - 1) // N
    mbarrier.wait(k_full.index(stage), phase)
    k_tile = k_tiles.index(stage).permute((1, 0))
    s = warpgroup_mma(q_tile, k_tile, no_scores, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(k_free.index(stage), count=1)
    p, rescale, m, l = _weights(  # noqa: E741
        s, m, l, 0, first_visible, limit, min_limit, score_scale, score_cap,
        HAS_WINDOW, HAS_CAP, S_LAYOUT,
    )  # fmt: skip
    p = gl.convert_layout(p.to(q_tile.dtype), P_LAYOUT)
    for tile in range(1, num_tiles):
        next_stage, next_phase = advance(stage, phase, STAGES)
        mbarrier.wait(k_full.index(next_stage), next_phase)
        k_tile = k_tiles.index(next_stage).permute((1, 0))
        s = warpgroup_mma(q_tile, k_tile, no_scores, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(stage), phase)
        acc = warpgroup_mma(p, v_tiles.index(stage), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        mbarrier.arrive(k_free.index(next_stage), count=1)
        p, rescale, m, l = _weights(  # noqa: E741
            s, m, l, tile * N, first_visible, limit, min_limit, score_scale, score_cap,
            HAS_WINDOW, HAS_CAP, S_LAYOUT,
        )  # fmt: skip
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(v_free.index(stage), count=1)
        acc = acc * gl.convert_layout(rescale, O_ROWS)[:, None]
        p = gl.convert_layout(p.to(q_tile.dtype), P_LAYOUT)
        stage = next_stage
        phase = next_phase
    mbarrier.wait(v_full.index(stage), phase)
    if num_tiles * N > length:
        _clear_past(v_tiles.index(stage), length - (num_tiles - 1) * N, N)
    acc = warpgroup_mma(p, v_tiles.index(stage), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_free.index(stage), count=1)
    stage, phase = advance(stage, phase, STAGES)
    return stage, phase, m, l, acc


@gluon.jit
def multiply(
    warpgroup: gl.constexpr,
    out, partial_out, partial_sum, query, q_tiles, k_tiles, v_tiles, k_full, k_free, v_full, v_free,
    starts, items, entries, last_positions, slot, head, score_scale, score_cap, window,
    out_row_stride, out_head_stride, query_row_stride, query_head_stride,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    N: gl.constexpr, STAGES: gl.constexpr, HAS_WINDOW: gl.constexpr, HAS_CAP: gl.constexpr,
    IS_CAUSAL: gl.constexpr, DEPENDS: gl.constexpr,
):  # fmt: skip
    """A warpgroup: its 64 rows of every item."""
    HEAD_PAD: gl.constexpr = q_tiles.shape[2]
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, N, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HEAD_PAD, 16]
    )
    Q_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 * 8 // HEAD_PAD, HEAD_PAD // 8], [4, 1], [1, 0])
    S_ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    q_tile = q_tiles.index(warpgroup)
    q_row = warpgroup * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, Q_LAYOUT))
    q_head = head * GROUP + q_row % GROUP
    q_column = gl.arange(0, HEAD_PAD, layout=gl.SliceLayout(0, Q_LAYOUT))
    s_row = warpgroup * 64 + gl.arange(0, 64, layout=S_ROWS)
    o_row = warpgroup * 64 + gl.arange(0, 64, layout=O_ROWS)
    o_column = gl.arange(0, HEAD_PAD, layout=gl.SliceLayout(0, O_LAYOUT))
    stage = 0
    phase = 0
    first_item = gl.load(starts + slot)
    last_item = gl.load(starts + slot + 1)
    _, next_token, next_length, next_entry, next_count = read_item(items, first_item, last_item)
    q_row_index = gl.load(entries + (next_entry + q_row // GROUP) * 4, mask=q_row // GROUP < next_count, other=0)
    if DEPENDS == 1:
        gdc_wait()
        if warpgroup == 0:
            gdc_launch_dependents()
    for item in range(first_item, last_item):
        first_token = next_token
        length = next_length
        first_entry = next_entry
        num_entries = next_count
        num_tiles = (length + N - 1) // N
        _, next_token, next_length, next_entry, next_count = read_item(items, item + 1, last_item)
        if warpgroup * 64 >= num_entries * GROUP:
            for _ in range(num_tiles):  # no rows of ours: only free what is fetched
                mbarrier.wait(k_full.index(stage), phase)
                mbarrier.arrive(k_free.index(stage), count=1)
                mbarrier.wait(v_full.index(stage), phase)
                mbarrier.arrive(v_free.index(stage), count=1)
                stage, phase = advance(stage, phase, STAGES)
            q_row_index = gl.load(
                entries + (next_entry + q_row // GROUP) * 4, mask=q_row // GROUP < next_count, other=0
            )
        else:
            q = gl.load(
                query
                + q_row_index.to(gl.int64)[:, None] * query_row_stride
                + (q_head * query_head_stride)[:, None]
                + q_column[None, :],
                mask=(q_row // GROUP < num_entries)[:, None] & (q_column < HEAD_DIM)[None, :],
                other=0.0,
            )
            q_tile.store(q)
            fence_async_shared()
            # Asked for here, and not needed before the item's end.
            has_o = o_row // GROUP < num_entries
            entry = entries + (first_entry + o_row // GROUP) * 4
            row = gl.load(entry, mask=has_o, other=0)
            partial = gl.load(entry + 1, mask=has_o, other=-1)
            # How many of the item's keys each row sees, and the row that sees fewest: the first one.
            limit = gl.full([64], 0, gl.int32, layout=S_ROWS) + length
            first_visible = limit
            min_limit = length
            if IS_CAUSAL or HAS_WINDOW:
                has_s = s_row // GROUP < num_entries
                s_entry = gl.load(entries + (first_entry + s_row // GROUP) * 4, mask=has_s, other=0)
                seen = gl.load(last_positions + s_entry, mask=has_s, other=0) + 1 - first_token
                first_visible = seen - window
                if IS_CAUSAL:
                    limit = gl.minimum(seen, length)
                    first_row = gl.load(entries + first_entry * 4)
                    min_limit = gl.minimum(gl.load(last_positions + first_row) + 1 - first_token, length)
            m = gl.full([64], float("-inf"), gl.float32, layout=S_ROWS)
            l = gl.zeros([64], gl.float32, layout=S_ROWS)  # noqa: E741 - the literature's name
            acc = gl.zeros([64, HEAD_PAD], gl.float32, layout=O_LAYOUT)
            if num_tiles > 0:
                stage, phase, m, l, acc = _attend_tiles(  # noqa: E741
                    q_tile, k_tiles, v_tiles, k_full, k_free, v_full, v_free, stage, phase, m, l, acc, length,
                    first_visible, limit, min_limit, score_scale, score_cap,
                    HAS_WINDOW, HAS_CAP, S_LAYOUT, O_LAYOUT,
                )  # fmt: skip
            q_row_index = gl.load(
                entries + (next_entry + q_row // GROUP) * 4, mask=q_row // GROUP < next_count, other=0
            )
            total = gl.where(l == 0.0, 1.0, l)
            acc = acc / gl.convert_layout(total, O_ROWS)[:, None]
            log_sum = gl.convert_layout(m + gl.log2(total), O_ROWS)
            o_head = head * GROUP + o_row % GROUP
            has_column = (o_column < HEAD_DIM)[None, :]
            is_partial = has_o & (partial >= 0)
            place = partial.to(gl.int64) * (NUM_KV_HEADS * GROUP) + o_head
            gl.store(partial_sum + place, log_sum, mask=is_partial)
            gl.store(
                partial_out + place[:, None] * HEAD_DIM + o_column[None, :],
                acc,
                mask=is_partial[:, None] & has_column,
            )
            is_final = has_o & (partial < 0)
            gl.store(
                out
                + row.to(gl.int64)[:, None] * out_row_stride
                + (o_head * out_head_stride)[:, None]
                + o_column[None, :],
                acc.to(out.dtype.element_ty),
                mask=is_final[:, None] & has_column,
            )
