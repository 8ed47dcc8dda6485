"""Dense prefill equals the definition, however the new tokens are cut, and its shapes are few."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chatserve_kernels import dense_prefill as module
from chatserve_kernels.dense_prefill import DensePiece, DenseWorkspace, dense_prefill, serves, split, warm_up
from chatserve_kernels.reference import prefill_attention
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.decode_cases import DEVICE, Case, Heads, assert_close, flat

DTYPES = [torch.bfloat16, torch.float16] if DEVICE.type == "cuda" else [torch.float32, torch.bfloat16]


def check(pieces: list[DensePiece], heads: Heads, key_scale: float = 1.0, value_scale: float = 1.0) -> None:
    """One workspace for all of them, as for the layers and rows of a step."""
    workspace = DenseWorkspace(heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.dtype, DEVICE)
    for piece in pieces:
        case = Case(flat([piece.end], heads.block_size), heads)
        merged = torch.randn(piece.num_tokens, heads.num_heads + 3, heads.head_dim, device=DEVICE).to(heads.dtype)
        query = merged[:, : heads.num_heads]  # as a model hands it over: part of one merged product
        scales = {"key_scale": key_scale, "value_scale": value_scale}
        out = dense_prefill(query, case.key, case.value, case.tables[0], piece, workspace, scale=0.2, **scales)
        starts, lengths = torch.tensor([piece.start]), torch.tensor([piece.num_tokens])
        tensors = {name: torch.tensor([scale], device=DEVICE) for name, scale in scales.items()}
        expected = prefill_attention(query, case.key, case.value, case.tables, starts, lengths, scale=0.2, **tensors)
        assert_close(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_squares_and_prefixes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SQUARE_UNIT", 8)
    pieces = [
        DensePiece(0, 40, 0),
        DensePiece(0, 37, 0),
        DensePiece(21, 24, 0),
        DensePiece(64, 32, 64),
        DensePiece(75, 29, 64),
        DensePiece(130, 3, 128),
    ]
    check(pieces, Heads(6, 2, 64, dtype=dtype))


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (4, 1, 80), (2, 2, 96), (3, 1, 256)])
def test_head_sizes_and_groups(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    check([DensePiece(50, 30, 48)], Heads(num_heads, num_kv_heads, head_dim, dtype=DTYPES[-1]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cache_of_fp8_is_widened_and_scaled(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SQUARE_UNIT", 8)
    pieces = [DensePiece(0, 40, 0), DensePiece(75, 29, 64)]
    check(pieces, Heads(6, 2, 64, dtype=dtype, kv_dtype=torch.float8_e4m3fn), key_scale=0.7, value_scale=3.0)


@pytest.mark.gpu
def test_what_split_gives_at_real_sizes() -> None:
    pieces = [split(start, length) for start, length in [(0, 2048), (0, 1300), (4096, 512), (5000, 700), (700, 600)]]
    check([piece for piece in pieces if piece is not None], Heads(32, 8, 128, dtype=torch.bfloat16))


@given(st.integers(0, 200_000), st.integers(1, 20_000))
def test_a_piece_begins_the_new_tokens_and_leaves_less_than_half(start: int, num_tokens: int) -> None:
    piece = split(start, num_tokens)
    if piece is None:
        least = module.MIN_TOKENS if start < module.LONG_PREFIX else module.MIN_TOKENS_ON_LONG_PREFIX
        assert num_tokens < least or start + num_tokens > module.MAX_CONTEXT
        return
    assert piece.start == start
    assert num_tokens * 2 / 3 < piece.num_tokens <= num_tokens
    assert 0 <= piece.num_dummies < max(module.MIN_PREFIX, start / 8)
    assert piece.num_dummies + piece.num_tokens <= piece.square < piece.end - piece.prefix + module.SQUARE_UNIT


@pytest.mark.parametrize(
    ("start", "num_tokens", "is_dense"),
    [
        (0, 512, True),
        (0, 1024, True),
        (1024, 512, True),
        (8192, 512, False),
        (9000, 512, False),
        (8192, 1024, False),
        (8192, 4096, True),
    ],
)
def test_goes_the_way_that_was_measured_to_be_faster(start: int, num_tokens: int, is_dense: bool) -> None:
    assert (split(start, num_tokens) is not None) == is_dense


def test_shapes_are_few() -> None:
    pieces = [split(start, length) for start in range(0, 131072, 77) for length in range(1, 8193, 971)]
    found = [piece for piece in pieces if piece is not None]
    assert len({piece.num_tokens for piece in found}) <= 9
    assert len({piece.prefix for piece in found}) <= 49
    assert max(piece.prefix + piece.square for piece in found) <= module.MAX_CONTEXT + module.SQUARE_UNIT


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
def test_warming_up_meets_every_size_and_changes_nothing(
    kv_dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("MIN_TOKENS", 8), ("MIN_PREFIX", 16), ("SQUARE_UNIT", 8)):
        monkeypatch.setattr(module, name, value)
    case = Case(flat([50], 16), Heads(2, 1, 64, dtype=DTYPES[-1], kv_dtype=kv_dtype))
    before = case.pool.float()
    attend, seen = module.dense_prefill, set()

    def watched(query: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
        seen.add(len(query))
        return attend(query, *rest, **options)

    monkeypatch.setattr(module, "dense_prefill", watched)
    workspace = DenseWorkspace(2, 1, 64, DTYPES[-1], DEVICE)
    warm_up(workspace, case.key, case.value, 2, max_tokens=40)
    pieces = [split(0, num_tokens) for num_tokens in range(41)]
    assert seen == {piece.num_tokens for piece in pieces if piece is not None} == {8, 12, 16, 24, 32}
    assert torch.equal(case.pool.float().nan_to_num(7.0), before.nan_to_num(7.0))
    warm_up(workspace, case.key, case.value, 2, max_tokens=7)


def test_where_there_is_a_dense_kernel() -> None:
    assert serves(128, torch.bfloat16, torch.device("cuda"))
    assert not serves(128, torch.float32, torch.device("cuda"))
    assert not serves(16, torch.bfloat16, torch.device("cuda"))


def test_queries_of_another_piece_are_refused() -> None:
    workspace = DenseWorkspace(2, 1, 64, torch.float32, DEVICE)
    query, cache = torch.zeros(3, 2, 64, device=DEVICE), torch.zeros(2, 1, 16, 64, device=DEVICE)
    with pytest.raises(ValueError, match="4 queries, got 3"):
        dense_prefill(query, cache, cache, torch.zeros(2), DensePiece(0, 4, 0), workspace, scale=1.0)
