"""The warp of `attend_hopper_kernel` that fetches keys and values by the copy engine, for the warpgroups that multiply.

Knows the pool's layout, block tables and the rings in shared memory; must not know queries, masks or what is computed.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_wait

from chatserve_kernels.hopper_ring import advance, read_item

BOX_COLUMNS = 64
"""128 bytes of 16-bit elements: the widest row that the tensor cores read without bank conflicts."""
_fetch_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # the name before Triton 3.7


@_core.builtin
def _boxes(tile, num_boxes, rows, _semantic=None):
    """A tile [tokens, head_dim] of shared memory as the boxes that it is laid out in: [num_boxes, rows, 64]."""
    view = getattr(tile, "reinterpret", None) or tile._reinterpret  # noqa: SLF001 - its name before Triton 3.7
    return view(tile.dtype, [num_boxes, rows, BOX_COLUMNS], tile.layout, _semantic=_semantic)


@gluon.jit
def fetch(
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
    table_row, first_token, length, _, _ = read_item(items, first_item, last_item)
    if DEPENDS == 1:
        gdc_wait()
    for item in range(first_item, last_item):
        table = tables + table_row.to(gl.int64) * table_stride + first_token // BLOCK
        last = (length - 1) // BLOCK  # stands in for blocks past the item's end, whose keys are masked
        num_tiles = (length + N - 1) // N
        table_row, first_token, length, _, _ = read_item(items, item + 1, last_item)
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
            stage, phase = advance(stage, phase, STAGES)
