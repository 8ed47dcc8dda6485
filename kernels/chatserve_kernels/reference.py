"""What the kernels compute, in float64 and plain torch: the formula, a row at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray


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
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `forest_decode`, with `lengths` [num_rows] in place of a plan; a row of length 0 is zero. Returns float64."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = key.shape[1:3]
    out = torch.zeros(query.shape, dtype=torch.float64, device=query.device)

    def scaled(pool: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
        return pool if scale is None else pool * scale.double().view(-1, 1, 1)

    for row, length in enumerate(lengths.tolist()):
        first = 0 if window is None else max(0, length - window)
        if first == length:
            continue
        blocks = tables[row, : -(-length // block_size)].long()

        def tokens(pool: torch.Tensor, blocks=blocks, first=first, length=length) -> torch.Tensor:
            gathered = pool[blocks].double().transpose(1, 2).reshape(-1, num_kv_heads, head_dim)[first:length]
            return gathered.transpose(0, 1)  # [num_kv_heads, tokens, head_dim]

        grouped = query[row].double().view(num_kv_heads, -1, head_dim)
        scores = grouped @ scaled(tokens(key), key_scale).transpose(1, 2) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        out[row] = (torch.softmax(scores, -1) @ scaled(tokens(value), value_scale)).view(num_heads, head_dim)
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
    key_scale: torch.Tensor | None = None,
    value_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """As `paged_prefill`: each token is a decode row of its own. Returns float64."""
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    ends = [
        start + index + 1
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        for index in range(length)
    ]
    return decode_attention(
        query,
        key,
        value,
        tables[rows],
        torch.tensor(ends),
        scale=scale,
        window=window,
        softcap=softcap,
        key_scale=key_scale,
        value_scale=value_scale,
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


def head_norm(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`heads` [num_tokens, num_heads, head_dim], each normalised, times `weight` [head_dim], in float64."""
    wide = heads.double()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.double()


def to_e4m3(x: torch.Tensor, scale: float) -> torch.Tensor:
    """What an fp8 cache holds of x: the nearest float8_e4m3fn to x / scale within what the type holds."""
    return (x / scale).clamp(-448.0, 448.0).float().to(torch.float8_e4m3fn)


def kept_tokens(
    logits: torch.Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> torch.Tensor:
    """Which of one row's tokens top-k, top-p and min-p leave, bool [vocab_size]: by a full sort, in float64."""
    scores = logits.double() / temperature
    kept = torch.ones_like(scores, dtype=torch.bool)
    ordered, order = torch.sort(scores, descending=True, stable=True)
    if top_k:
        kept &= scores >= ordered[min(top_k, len(ordered)) - 1]
    share = torch.softmax(scores.masked_fill(~kept, -torch.inf), -1)
    if top_p < 1.0:
        before = torch.empty_like(share)
        before[order] = share[order].cumsum(-1) - share[order]
        kept &= scores >= scores[before < top_p].min()
    return kept & (share >= min_p * share.max())


def gumbel_noise(seed: int, position: int, vocab_size: int) -> torch.Tensor:
    """Of one draw, float64 [vocab_size]: -log(-log(u)), u of the upper 52 bits of SplitMix64 (Steele, Lea and Flood
    2014), which counts from the mixed (seed, position) by token id."""
    golden = 0x9E3779B97F4A7C15

    def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        x = (x ^ (x >> 30)) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> 27)) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> 31)

    seeds = np.array([seed], dtype=np.uint64)  # an array, since its products wrap without a warning
    key = mix(mix(seeds) + np.uint64(golden * (position + 1) % 2**64))
    bits = mix(key + np.uint64(golden) * np.arange(1, vocab_size + 1, dtype=np.uint64))
    return torch.from_numpy(-np.log(-np.log(((bits >> np.uint64(12)) + 0.5) * 2.0**-52)))
