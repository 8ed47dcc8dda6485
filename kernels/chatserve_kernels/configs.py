"""Which tiles to use: measured on an H200 for 16-bit elements and heads of 128, and scaled from there."""

from __future__ import annotations

import torch

from chatserve_kernels.device_plan import MERGE_PROGRAMS, DecodeConfigs
from chatserve_kernels.tiles import HopperTile, Pace, TileConfig

HEAD_DIMS = (8, 16, 64, 80, 96, 128, 256)
"""Head sizes that the attention kernels have been held against plain torch for, on a GPU."""
MAX_GROUP = 16
"""The most query heads a KV head: small tiles have so many rows."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FEW_ROWS = 16
"""Up to here one large program a multiprocessor, which leaves fewer partials to merge, beats two smaller ones."""


def default_configs(head_dim: int, *, is_half: bool, max_rows: int) -> DecodeConfigs:
    """`is_half`: 16-bit elements; others take twice the shared memory, and multiply without tensor cores."""
    is_wide_head = head_dim > 128
    if not is_half:
        tokens = 16 if is_wide_head else 32
        small = TileConfig(query_rows=16, key_tokens=tokens, warps=8, stages=2, programs=2, max_registers=128)
        return DecodeConfigs(
            alone=small,
            beside=small,
            wide=TileConfig(
                query_rows=32,
                key_tokens=tokens,
                warps=8,
                stages=2,
                programs=1,
                max_registers=128 if head_dim <= 64 else None,
            ),
        )
    tokens = 32 if is_wide_head else 64
    if max_rows <= FEW_ROWS:
        alone = TileConfig(
            query_rows=16,
            key_tokens=2 * tokens,
            warps=8,
            stages=3,
            programs=1,
            max_registers=128 if head_dim <= 64 else None,
        )
    else:
        alone = TileConfig(query_rows=16, key_tokens=tokens, warps=4, stages=4, programs=2)
    if is_wide_head:
        beside = TileConfig(query_rows=16, key_tokens=tokens // 2, warps=4, stages=3, programs=2)
        wide = TileConfig(query_rows=64, key_tokens=tokens, warps=8, stages=3, programs=1)
        return DecodeConfigs(alone=alone, beside=beside, wide=wide)
    # A program merges a row and KV head, of which there are 8 in what was measured.
    merge_programs = min(MERGE_PROGRAMS, 8 * max_rows)
    return DecodeConfigs(alone=alone, beside=NARROW, wide=_wide(64, 4), pace=PACE, merge_programs=merge_programs)


def prefill_configs(head_dim: int, *, is_half: bool) -> DecodeConfigs:
    """Wide tiles of 128 query rows, which have a multiprocessor to themselves; there are no small ones to run."""
    decode = default_configs(head_dim, is_half=is_half, max_rows=1)
    if not is_half or head_dim > 128:
        return decode
    return DecodeConfigs(alone=decode.alone, beside=decode.beside, wide=_wide(128, 2))


def _wide(key_tokens: int, hopper_stages: int) -> TileConfig:
    """For 16-bit elements and heads of up to 128: on Hopper by the copy engine, elsewhere as plain tiles."""
    return TileConfig(
        query_rows=128,
        key_tokens=key_tokens,
        warps=8,
        stages=192 // key_tokens,
        programs=1,
        hopper=HopperTile(stages=hopper_stages, registers=232),
    )


NARROW = TileConfig(
    query_rows=64,
    key_tokens=64,
    warps=8,
    stages=3,
    programs=2,
    hopper=HopperTile(stages=3, registers=216, max_registers=128),
)
PACE = Pace(wide_tile=1.3, small_tile=2.0, saturating=0.75, start=8.0)
"""Both kinds at a time. A wide tile alone takes 1.0; what small tiles ask of memory slows it."""
