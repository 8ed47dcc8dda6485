"""Attention on a Hopper GPU: what `attend_kernel` computes for runs that sessions share, for what is beside them, and
for new tokens.

Here is the kernel as a whole, its launching half and what it takes. A tile of 64 query rows is a warpgroup's work
(`hopper_multiply`), one of 128 two warpgroups'; a warp of its own fetches keys and values, for both (`hopper_fetch`).
That is FlashAttention-3's design, on paged KV:

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
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from chatserve_kernels.hopper_fetch import BOX_COLUMNS, fetch
from chatserve_kernels.hopper_multiply import multiply

if TYPE_CHECKING:
    from chatserve_kernels.tiles import TileConfig

WARPGROUP_ROWS = 64
TILE_LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


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
            (multiply, (
                0, out, partial_out, partial_sum, query, q_tiles, k_tiles, v_tiles, k_full, k_free, v_full, v_free,
                starts, items, entries, last_positions, slot, head, score_scale, score_cap, window,
                out_row_stride, out_head_stride, query_row_stride, query_head_stride,
                NUM_KV_HEADS, GROUP, HEAD_DIM, N, STAGES, HAS_WINDOW, HAS_CAP,
                IS_CAUSAL, DEPENDS,
            )),
            (multiply, (
                1, out, partial_out, partial_sum, query, q_tiles, k_tiles, v_tiles, k_full, k_free, v_full, v_free,
                starts, items, entries, last_positions, slot, head, score_scale, score_cap, window,
                out_row_stride, out_head_stride, query_row_stride, query_head_stride,
                NUM_KV_HEADS, GROUP, HEAD_DIM, N, STAGES, HAS_WINDOW, HAS_CAP,
                IS_CAUSAL, DEPENDS,
            )),
            (fetch, (
                key_rows, value_rows, k_tiles, v_tiles, k_full, k_free, v_full, v_free, tables, starts, items,
                slot, head, table_stride, key_block_rows, key_head_rows, value_block_rows, value_head_rows,
                BLOCK, N, STAGES, DEPENDS,
            )),
        ], [4, 1], [REGISTERS, 40])  # fmt: skip
    else:
        gl.warp_specialize([
            (multiply, (
                0, out, partial_out, partial_sum, query, q_tiles, k_tiles, v_tiles, k_full, k_free, v_full, v_free,
                starts, items, entries, last_positions, slot, head, score_scale, score_cap, window,
                out_row_stride, out_head_stride, query_row_stride, query_head_stride,
                NUM_KV_HEADS, GROUP, HEAD_DIM, N, STAGES, HAS_WINDOW, HAS_CAP,
                IS_CAUSAL, DEPENDS,
            )),
            (fetch, (
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
