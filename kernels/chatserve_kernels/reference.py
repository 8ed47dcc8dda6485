"""What the kernels compute, in float64 and plain torch: the formula, a row at a time."""

from __future__ import annotations

import torch


def decode_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """As `forest_decode`, with `lengths` [num_rows] in place of a plan; a row of length 0 is zero. Returns float64."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = key.shape[1:3]
    out = torch.zeros(query.shape, dtype=torch.float64, device=query.device)
    for row, length in enumerate(lengths.tolist()):
        first = 0 if window is None else max(0, length - window)
        if first == length:
            continue
        blocks = tables[row, : -(-length // block_size)].long()

        def tokens(pool: torch.Tensor, blocks=blocks, first=first, length=length) -> torch.Tensor:
            gathered = pool[blocks].transpose(1, 2).reshape(-1, num_kv_heads, head_dim)[first:length]
            return gathered.double().transpose(0, 1)  # [num_kv_heads, tokens, head_dim]

        grouped = query[row].double().view(num_kv_heads, -1, head_dim)
        scores = grouped @ tokens(key).transpose(1, 2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        out[row] = (torch.softmax(scores, -1) @ tokens(value)).view(num_heads, head_dim)
    return out


def prefill_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tables: torch.Tensor,
    starts: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """As `paged_prefill`: each token is a decode row of its own. Returns float64."""
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    ends = [
        start + index + 1
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        for index in range(length)
    ]
    return decode_attention(
        query, key, value, tables[rows], torch.tensor(ends), scale=scale, window=window, softcap=softcap
    )


def add_rms_norm(
    hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm in float64, of the sum in `residual`'s type, and that sum."""
    total = (hidden.float() + residual.float()).to(residual.dtype)
    wide = total.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double(), total


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """In float64."""
    gate, up = gate_up.double().chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


def rope(heads: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """`heads` [num_tokens, num_heads, head_dim], rotated, in float64."""
    cos, sin = cos_sin[positions].double().unsqueeze(1).chunk(2, -1)
    half = cos.shape[-1]
    a, b, rest = heads.double().split([half, half, heads.shape[-1] - 2 * half], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)
