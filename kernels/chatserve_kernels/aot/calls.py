"""A call of each launching half of this package, by its options.

On tensors of small shapes without memory (see `record`), laid out as an engine's are. Must not know which options there
are to try, nor how kernels are compiled.
"""

from __future__ import annotations

import numpy as np
import torch

from chatserve_kernels import dense_prefill as dense
from chatserve_kernels.aot.record import CUDA
from chatserve_kernels.configs import DTYPES, default_configs, prefill_configs
from chatserve_kernels.device_plan import DevicePlan, make_planner, make_prefill_planner
from chatserve_kernels.forest import CostModel
from chatserve_kernels.forest_decode import DecodeWorkspace, forest_decode, paged_prefill
from chatserve_kernels.fused import add_rms_norm, copy_blocks, silu_mul
from chatserve_kernels.paged_kv import store_kv, update_tables
from chatserve_kernels.rope import rope_store_kv
from chatserve_kernels.sampling import ROW, SamplingWorkspace, sample_tokens

ALL_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*DTYPES, torch.float8_e4m3fn)}
HALF = [str(dtype).removeprefix("torch.") for dtype in DTYPES if dtype.itemsize == 2]
FLOATS = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
FP8 = "float8_e4m3fn"
FEW_ROWS, MANY_ROWS = 1, 256
"""Decode steps for which `default_configs` may choose other tiles."""
_PROCESSORS = 132


def attention(
    *,
    step: str,
    head_dim: int,
    elements: tuple[str, str],
    group: int,
    window: int | None,
    softcap: float | None,
    block_size: int,
    strides: str,
    kv_heads: int,
) -> None:
    """A layer of a step that plans two rows. `elements`: of queries, and of keys and values."""
    dtype, kv = elements
    is_half = dtype in HALF
    shape = {
        "num_processors": _PROCESSORS,
        "max_rows": 2,
        "num_heads": group * kv_heads,
        "num_kv_heads": kv_heads,
        "block_size": block_size,
    }
    tables = np.arange(2 * 64, dtype=np.int32).reshape(2, 64)
    if step == "prefill":
        configs = prefill_configs(head_dim, is_half=is_half)
        prefill_planner = make_prefill_planner(configs, max_tokens=16, **shape)
        plan = prefill_planner.plan(np.array([8, 0]), np.array([2, 5]), window=window)
        layout, attend = prefill_planner.layout, paged_prefill
    else:
        max_rows = FEW_ROWS if step == "few rows" else MANY_ROWS
        configs = default_configs(head_dim, is_half=is_half, max_rows=max_rows)
        planner = make_planner(configs, max_context=64, cost=CostModel(), **shape)
        plan = planner.plan(tables, np.array([8, 5]), window=window, with_wide=step == "shared")
        layout, attend = planner.layout, forest_decode
    device_plan = DevicePlan(layout, configs, torch.device("cpu"))
    device_plan.send(plan)
    keys, values = _pool(kv_heads, block_size, head_dim, dtype if kv == "as queries" else FP8, strides)
    scales = None
    if kv != "as queries":
        scales = _empty(1 if kv == "fp8" else kv_heads, dtype="float32")
    attend(
        _empty(plan.num_rows, group * kv_heads, head_dim, dtype=dtype),
        keys,
        values,
        torch.empty(tables.shape, dtype=torch.int32, device=CUDA),
        device_plan,
        DecodeWorkspace(layout, group * kv_heads, kv_heads, head_dim, CUDA),
        scale=head_dim**-0.5,
        softcap=softcap,
        key_scale=scales,
        value_scale=scales,
    )


def rope_and_write(
    *,
    cache: str,
    norms: bool,
    rotated: str,
    dtype: str,
    head_dim: int,
    heads: tuple[int, int],
    block_size: int,
    num_tokens: int,
) -> None:
    num_heads, kv_heads = heads
    merged = _empty(num_tokens, num_heads + 2 * kv_heads, head_dim, dtype=dtype)  # as a model's product leaves them
    query, key, value = merged.split([num_heads, kv_heads, kv_heads], dim=1)
    weights = _empty(2, head_dim, dtype=dtype).unbind()
    rope_store_kv(
        query,
        key,
        value,
        *_pool(kv_heads, block_size, head_dim, dtype if cache == "as keys" else FP8),
        _int64(num_tokens),
        _int64(num_tokens),
        _empty(64, head_dim if rotated == "all" else head_dim // 2, dtype="float32"),
        norms=weights if norms else None,
        kv_scales=_empty(2, dtype="float32") if cache == FP8 else None,
    )


def write(*, cache: str, dtype: str, head_dim: int, kv_heads: int, block_size: int) -> None:
    key, value = _empty(2, 7, kv_heads, head_dim, dtype=dtype)
    pool = _pool(kv_heads, block_size, head_dim, dtype if cache == "as keys" else FP8)
    store_kv(key, value, *pool, _int64(7), _empty(2, dtype="float32") if cache == FP8 else None)


def long_prompt(
    *, cache: str, prefix: bool, dtype: str, head_dim: int, heads: tuple[int, int], block_size: int
) -> None:
    num_heads, kv_heads = heads
    piece = dense.DensePiece(1500, 500, 1024) if prefix else dense.DensePiece(0, 512, 0)
    dense.dense_prefill(
        _empty(piece.num_tokens, num_heads, head_dim, dtype=dtype),
        *_pool(kv_heads, block_size, head_dim, dtype if cache == "as queries" else FP8),
        torch.empty(2048, dtype=torch.int32, device=CUDA),
        piece,
        dense.DenseWorkspace(num_heads, kv_heads, head_dim, ALL_DTYPES[dtype], CUDA),
        scale=1.0,
    )


def change_tables(*, num_updates: int) -> None:
    update_tables(torch.empty(4, 16, dtype=torch.int32, device=CUDA), _int64(num_updates), _int64(num_updates))


def copies(*, rows: int, block_size: int, head_bytes: int) -> None:
    """`rows`: layers x 2 x heads."""
    pool = torch.empty(4, rows, block_size, head_bytes // 8, dtype=torch.int64, device=CUDA)
    copy_blocks(pool, _int64(3), _int64(3), _int64(3))


def norm(*, dtype: str, width: int) -> None:
    hidden, residual = _empty(2, 7, width, dtype=dtype)
    add_rms_norm(hidden, residual, _empty(width, dtype=dtype), 1e-5)


def gate(*, dtype: str, width: int) -> None:
    silu_mul(_empty(7, 2 * width, dtype=dtype))


def sample(*, penalties: bool, dtype: str, vocab_size: int, position_offset: int) -> None:
    sample_tokens(
        _empty(7, vocab_size, dtype=dtype),
        torch.empty(7, ROW.itemsize // 4, dtype=torch.int32, device=CUDA),
        _int64(7),
        SamplingWorkspace(8, vocab_size, CUDA),
        counts=torch.empty(8, vocab_size, dtype=torch.int32, device=CUDA) if penalties else None,
        position_offset=position_offset,
    )


def _pool(
    kv_heads: int, block_size: int, head_dim: int, dtype: str, strides: str = "a pool's"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [num_blocks, kv_heads, block_size, head_dim]: a layer of a block-major pool, or on their own, in
    rows that are not aligned."""
    if strides == "a pool's":
        return _empty(8, 4, 2, kv_heads, block_size, head_dim, dtype=dtype)[:, 1].unbind(1)
    return tuple(_empty(8, kv_heads, block_size, head_dim + pad, dtype=dtype)[..., :head_dim] for pad in (1, 3))


def _empty(*shape: int, dtype: str) -> torch.Tensor:
    return torch.empty(shape, dtype=ALL_DTYPES[dtype], device=CUDA)


def _int64(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.int64, device=CUDA)
