"""Attention on a Hopper GPU: what `attend_kernel` computes for runs that sessions share, for what is beside them, and
for new tokens.

A tile of 64 query rows is a warpgroup's work, one of 128 two warpgroups'; a warp of its own fetches keys and values,
for both. That is FlashAttention-3's design, on paged KV:

- The copy engine fetches a head's share of a block, [block_size, head_dim], in boxes of 64 columns, whose rows lie in
  shared memory as the tensor cores read them. No address is computed by a thread that does arithmetic: 370
  instructions a tile of 64 x 64 where pointers took 635.
- Two rings of `STAGES` tiles, keys and values, each with a *full* barrier a stage, which the copies complete, and a
  *free* one, where both warpgroups arrive. A count of the tiles fetched so far says where in its ring everyone is, so
  the fetching warp runs ahead across items.
- While one warpgroup computes weights, the other one multiplies; and each multiplies a tile's values while it computes
  the next one's weights.

128 rows a tile halve what 64 rows read from the L2 cache, which is what bounds those: 16,384 tiles of 64 keys and 64
values of 256 bytes in 100 us are 5.4 TB/s.

Written in Gluon, Triton's language with explicit layouts, copies and barriers. It has no interpreter: the tests run
`attend_kernel` there, and this one on a GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

if TYPE_CHECKING:
    from chatserve_kernels.tiles import TileConfig

WARPGROUP_ROWS = 64
BOX_COLUMNS = 64
"""128 bytes of 16-bit elements: the widest row that the tensor cores read without bank conflicts."""
_fetch_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # the name before Triton 3.7
TILE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@_core.builtin
def _boxes(tile, num_boxes, rows, _semantic=None):
    """A tile [tokens, head_dim] of shared memory as the boxes that it is laid out in: [num_boxes, rows, 64]."""
    view = getattr(tile, "reinterpret", None) or tile._reinterpret  # noqa: SLF001 - its name before Triton 3.7
    return view(tile.dtype, [num_boxes, rows, BOX_COLUMNS], tile.layout, _semantic=_semantic)


@gluon.jit
def _next(stage, phase, STAGES: gl.constexpr):
    """The place in a ring after this one: a barrier's phase is the parity of the round."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def _read_item(items, item, last_item):
    """An item's fields, or zeros past the last one: each is read while the one before it is worked on."""
    is_there = item < last_item
    fields = items + item * 5
    return (
        gl.load(fields, mask=is_there, other=0),
        gl.load(fields + 1, mask=is_there, other=0),
        gl.load(fields + 2, mask=is_there, other=0),
        gl.load(fields + 3, mask=is_there, other=0),
        gl.load(fields + 4, mask=is_there, other=0),
    )


@gluon.jit
def _fetch(
    key_rows, value_rows, k_tiles, v_tiles, k_full, k_free, v_full, v_free, tables, starts, items, slot, head,
    table_stride, key_block_rows, key_head_rows, value_block_rows, value_head_rows,
    BLOCK: gl.constexpr, N: gl.constexpr, STAGES: gl.constexpr, DEPENDS: gl.constexpr,
):  # fmt: skip
    """The fetching warp: every tile of every item, as soon as a stage of its ring is free."""
    COLUMN_BOXES: gl.constexpr = k_tiles.shape[2] // 64
    BLOCKS: gl.constexpr = N // BLOCK
    BYTES: gl.constexpr = N * k_tiles.shape[2] * 2
    stage = 0
    phase = 1  # the first round of a ring waits for nobody
    first_item = gl.load(starts + slot)
    last_item = gl.load(starts + slot + 1)
    table_row, first_token, length, _, _ = _read_item(items, first_item, last_item)
    if DEPENDS == 1:
        gdc_wait()
    for item in range(first_item, last_item):
        table = tables + table_row.to(gl.int64) * table_stride + first_token // BLOCK
        last = (length - 1) // BLOCK  # stands in for blocks past the item's end, whose keys are masked
        num_tiles = (length + N - 1) // N
        table_row, first_token, length, _, _ = _read_item(items, item + 1, last_item)
        for tile in range(num_tiles):
            mbarrier.wait(k_free.index(stage), phase)
            mbarrier.expect(k_full.index(stage), BYTES)
            boxes = _boxes(k_tiles.index(stage), COLUMN_BOXES * BLOCKS, BLOCK)
            for index in gl.static_range(BLOCKS):
                block = gl.load(table + gl.minimum(tile * BLOCKS + index, last))
                row = block * key_block_rows + head * key_head_rows
                for box in gl.static_range(COLUMN_BOXES):
                    _fetch_box(key_rows, [row, box * 64], k_full.index(stage), boxes.index(box * BLOCKS + index))
            mbarrier.wait(v_free.index(stage), phase)
            mbarrier.expect(v_full.index(stage), BYTES)
            boxes = _boxes(v_tiles.index(stage), COLUMN_BOXES * BLOCKS, BLOCK)
            for index in gl.static_range(BLOCKS):
                block = gl.load(table + gl.minimum(tile * BLOCKS + index, last))
                row = block * value_block_rows + head * value_head_rows
                for box in gl.static_range(COLUMN_BOXES):
                    _fetch_box(value_rows, [row, box * 64], v_full.index(stage), boxes.index(box * BLOCKS + index))
            stage, phase = _next(stage, phase, STAGES)


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
        next_stage, next_phase = _next(stage, phase, STAGES)
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
    stage, phase = _next(stage, phase, STAGES)
    return stage, phase, m, l, acc


@gluon.jit
def _attend(
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
    _, next_token, next_length, next_entry, next_count = _read_item(items, first_item, last_item)
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
        _, next_token, next_length, next_entry, next_count = _read_item(items, item + 1, last_item)
        if warpgroup * 64 >= num_entries * GROUP:
            for _ in range(num_tiles):  # no rows of ours: only free what is fetched
                mbarrier.wait(k_full.index(stage), phase)
                mbarrier.arrive(k_free.index(stage), count=1)
                mbarrier.wait(v_full.index(stage), phase)
                mbarrier.arrive(v_free.index(stage), count=1)
                stage, phase = _next(stage, phase, STAGES)
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


@gluon.jit
def attend_hopper_kernel(
    out,  # [num_rows, num_heads, HEAD_DIM]
    partial_out,  # float32 [num_partials, num_heads, HEAD_DIM]
    partial_sum,  # float32 [num_partials, num_heads]
    query,  # [num_rows, num_heads, HEAD_DIM], 16-bit
    key_rows,  # descriptor of the pool's keys as rows of HEAD_DIM, see `row_descriptor`
    value_rows,
    tables,
    starts,
    items,
    entries,
    last_positions,
    score_scale,
    score_cap,
    window,
    out_row_stride,
    out_head_stride,
    query_row_stride,
    query_head_stride,
    key_block_rows,  # rows from a block to the next one, and from a head to the next one
    key_head_rows,
    value_block_rows,
    value_head_rows,
    table_stride,
    NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_PAD: gl.constexpr,  # HEAD_DIM up to a power of two, at least 64
    BLOCK: gl.constexpr,
    N: gl.constexpr,  # keys a tile
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,  # of each thread of a warpgroup
    WARPGROUPS: gl.constexpr,  # that multiply, 64 query rows each: 1 or 2
    HAS_WINDOW: gl.constexpr,
    HAS_CAP: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
    DEPENDS: gl.constexpr,  # waits for the kernel before: 0 no, 1 before it reads any keys, 2 at its end
):
    """Arguments as `attend_kernel`'s; tiles have 64 query rows a warpgroup. The launch's 4 warps are the first
    warpgroup, to which the second one, if any, and the warp that fetches are added."""
    if DEPENDS == 2:
        gdc_launch_dependents()
    program = gl.program_id(0)
    head = program % NUM_KV_HEADS
    slot = program // NUM_KV_HEADS
    LAYOUT: gl.constexpr = key_rows.layout
    q_tiles = gl.allocate_shared_memory(query.dtype.element_ty, [WARPGROUPS, 64, HEAD_PAD], LAYOUT)
    k_tiles = gl.allocate_shared_memory(query.dtype.element_ty, [STAGES, N, HEAD_PAD], LAYOUT)
    v_tiles = gl.allocate_shared_memory(query.dtype.element_ty, [STAGES, N, HEAD_PAD], LAYOUT)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=WARPGROUPS)
        mbarrier.init(v_free.index(stage), count=WARPGROUPS)
    fence_async_shared()
    # Tuples are written out here, since constants in an assigned one would become values.
    if WARPGROUPS == 2:
        gl.warp_specialize([
            (_attend, (
                0, out, partial_out, partial_sum, query, q_tiles, k_tiles, v_tiles, k_full, k_free, v_full, v_free,
                starts, items, entries, last_positions, slot, head, score_scale, score_cap, window,
                out_row_stride, out_head_stride, query_row_stride, query_head_stride,
                NUM_KV_HEADS, GROUP, HEAD_DIM, N, STAGES, HAS_WINDOW, HAS_CAP,
                IS_CAUSAL, DEPENDS,
            )),
            (_attend, (
                1, out, partial_out, partial_sum, query, q_tiles, k_tiles, v_tiles, k_full, k_free, v_full, v_free,
                starts, items, entries, last_positions, slot, head, score_scale, score_cap, window,
                out_row_stride, out_head_stride, query_row_stride, query_head_stride,
                NUM_KV_HEADS, GROUP, HEAD_DIM, N, STAGES, HAS_WINDOW, HAS_CAP,
                IS_CAUSAL, DEPENDS,
            )),
            (_fetch, (
                key_rows, value_rows, k_tiles, v_tiles, k_full, k_free, v_full, v_free, tables, starts, items,
                slot, head, table_stride, key_block_rows, key_head_rows, value_block_rows, value_head_rows,
                BLOCK, N, STAGES, DEPENDS,
            )),
        ], [4, 1], [REGISTERS, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (_attend, (
                0, out, partial_out, partial_sum, query, q_tiles, k_tiles, v_tiles, k_full, k_free, v_full, v_free,
                starts, items, entries, last_positions, slot, head, score_scale, score_cap, window,
                out_row_stride, out_head_stride, query_row_stride, query_head_stride,
                NUM_KV_HEADS, GROUP, HEAD_DIM, N, STAGES, HAS_WINDOW, HAS_CAP,
                IS_CAUSAL, DEPENDS,
            )),
            (_fetch, (
                key_rows, value_rows, k_tiles, v_tiles, k_full, k_free, v_full, v_free, tables, starts, items,
                slot, head, table_stride, key_block_rows, key_head_rows, value_block_rows, value_head_rows,
                BLOCK, N, STAGES, DEPENDS,
            )),
        ], [1], [40])  # fmt: skip
    if DEPENDS == 2:
        gdc_wait()


def constants(
    config: TileConfig, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int
) -> dict[str, int | bool]:
    """Compile-time arguments that follow from shapes and tiles."""
    hopper = config.hopper
    assert hopper is not None
    return {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": num_heads // num_kv_heads,
        "HEAD_DIM": head_dim,
        "HEAD_PAD": max(BOX_COLUMNS, triton.next_power_of_2(head_dim)),
        "BLOCK": block_size,
        "N": config.key_tokens,
        "STAGES": hopper.stages,
        "REGISTERS": hopper.registers,
        "WARPGROUPS": config.query_rows // WARPGROUP_ROWS,
    }


def takes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_tokens: int) -> bool:
    """Whether the copy engine can fetch such a pool, and the tensor cores multiply it."""
    block_size, head_dim = key.shape[2:]
    return (
        query.is_cuda
        and torch.cuda.get_device_capability(query.device) == (9, 0)
        and query.dtype in {torch.float16, torch.bfloat16}
        and head_dim <= 128
        and 8 <= block_size <= key_tokens
        and key_tokens % block_size == 0
        and all(_is_made_of_rows(pool, query.dtype) for pool in (key, value))
    )


def _is_made_of_rows(pool: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether blocks and heads begin a whole number of aligned rows after each other."""
    block, head, token = pool.stride()[:3]
    return (
        pool.dtype == dtype
        and token % 8 == 0
        and pool.data_ptr() % 16 == 0
        and block % token == 0
        and head % token == 0
        and pool.shape[0] * (block // token) < 2**31
    )


def row_descriptor(pool: torch.Tensor) -> TensorDescriptor:
    """`pool` [num_blocks, num_kv_heads, block_size, head_dim] as rows of head_dim, fetched `block_size` at a time."""
    num_blocks, num_heads, block_size, head_dim = pool.shape
    block, head, token = pool.stride()[:3]
    num_rows = (num_blocks - 1) * (block // token) + (num_heads - 1) * (head // token) + block_size
    return TensorDescriptor(pool, [num_rows, head_dim], [token, 1], [block_size, BOX_COLUMNS], TILE_LAYOUT)
