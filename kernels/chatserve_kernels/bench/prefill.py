"""Prefill as an engine dispatches it, one layer, beside PyTorch's attention on contiguous keys and values.

Long prompts go to a dense kernel over a gathered copy, whose time contains the gathering; their time by pages is given
beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from chatserve_kernels.bench.tables import DTYPE, Bench, Row, free, table
from chatserve_kernels.bench.workloads import BLOCK, HEAD_DIM, HEADS, KV_HEADS, TOKEN_BYTES
from chatserve_kernels.configs import prefill_configs
from chatserve_kernels.dense_prefill import DenseWorkspace, dense_prefill, split
from chatserve_kernels.device_plan import DevicePlan, make_prefill_planner
from chatserve_kernels.forest_decode import DecodeWorkspace, paged_prefill

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from chatserve_kernels.dense_prefill import DensePiece

CHUNKS = [
    (0, 8192),
    (0, 4096),
    (0, 1024),
    (8192, 4096),
    (8192, 1024),
    (8192, 512),
    (9000, 512),
    (8192, 256),
    (8192, 64),
    (2048, 64),
    (8192, 16),
]
"""(cached, new) tokens; new ones in numbers that `dense_prefill.split` gives whole to one kernel."""


@table("prefill")
def measure(bench: Bench) -> Iterator[Row]:
    """Rivals attend without a mask where there is a prefix: a little more work, and what they are fastest at."""
    pool = torch.randn(1200, 4, 2, KV_HEADS, BLOCK, HEAD_DIM, device="cuda").to(DTYPE)
    for cached, new in CHUNKS:
        pairs = new * cached + new * (new + 1) // 2
        by_pages = bench.us(paged(pool, cached, new))
        piece = split(cached, new)
        row = Row(
            "prefill",
            f"{new} on {cached}",
            by_pages if piece is None else bench.us(dense(pool, piece)),
            bytes=(cached + new) * TOKEN_BYTES + 2 * new * HEADS * HEAD_DIM * 2,
            flops=4 * HEAD_DIM * HEADS * pairs,
        )
        if piece is not None:
            row.more["by pages us"] = by_pages
        if bench.with_rivals:
            for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
                row.rivals[backend.name] = bench.us(_rival(backend, cached, new))
        yield row
    free()


def dense(pool: torch.Tensor, piece: DensePiece) -> Callable[[], object]:
    """As `paged`, by a dense kernel."""
    table = torch.randperm(len(pool), device=pool.device)[: -(-piece.end // BLOCK)].int()
    workspace = DenseWorkspace(HEADS, KV_HEADS, HEAD_DIM, DTYPE, pool.device)
    query = torch.randn(piece.num_tokens, HEADS, HEAD_DIM, device=pool.device).to(DTYPE)
    key, value = pool[:, 1, 0], pool[:, 1, 1]
    return lambda: dense_prefill(query, key, value, table, piece, workspace, scale=HEAD_DIM**-0.5)


def paged(pool: torch.Tensor, cached: int, new: int) -> Callable[[], object]:
    """A call that attends from `new` tokens after `cached` ones, in scattered blocks of `pool`."""
    configs = prefill_configs(HEAD_DIM, is_half=True)
    device = torch.device("cuda")
    planner = make_prefill_planner(
        configs,
        num_processors=torch.cuda.get_device_properties(0).multi_processor_count,
        max_tokens=new,
        max_rows=1,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        block_size=BLOCK,
    )
    plan = DevicePlan(planner.layout, configs, device)
    plan.send(planner.plan(np.array([cached]), np.array([new])))
    workspace = DecodeWorkspace(planner.layout, HEADS, KV_HEADS, HEAD_DIM, device)
    tables = torch.randperm(len(pool), device=device)[None, : -(-(cached + new) // BLOCK)].int()
    query = torch.randn(new, HEADS, HEAD_DIM, device=device).to(DTYPE)
    out = torch.empty_like(query)
    key, value = pool[:, 1, 0], pool[:, 1, 1]
    return lambda: paged_prefill(query, key, value, tables, plan, workspace, scale=HEAD_DIM**-0.5, out=out)


def _rival(backend: SDPBackend, cached: int, new: int) -> Callable[[], object]:
    query = torch.randn(1, HEADS, new, HEAD_DIM, device="cuda").to(DTYPE)
    key, value = torch.randn(2, 1, KV_HEADS, cached + new, HEAD_DIM, device="cuda").to(DTYPE)

    def attend() -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, key, value, is_causal=cached == 0, enable_gqa=True)

    return attend
