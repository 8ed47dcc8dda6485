"""Choosing the next token of many rows at once, on the device that has the logits.

The random numbers of a draw are a function of (seed, position, token id) alone: a counter-based hash, in integers, with
no generator whose state a batch or a crash could change. A draw is the largest of score + Gumbel noise (the Gumbel-max
trick: its distribution is exactly softmax(score)), so two runs whose logits differ in rounding choose the same token
unless the two best noisy scores are that close.

Work that no row asks for is skipped: a batch of greedy rows is one argmax. Filters need the largest scores only, so the
512 best are taken first and all are sorted only for rows whose cut lies further down. Ties with the last token kept are
kept. Must not know about requests or text.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatserve.types import SamplingParams

_CANDIDATES = 512
_LEAST_TEMPERATURE = 1e-30
"""Lower ones draw the same, but scores divided by them would be infinite, and so all alike."""
_NOISY_ROWS = 8
"""Rows whose noise is drawn together over the whole vocabulary: 8 bytes a token, several times over."""

_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_WORD = (1 << 64) - 1


@dataclass(slots=True)
class TokenHistory:
    """What penalties need of one request, kept on the device between steps; made for rows that have any."""

    seen: torch.Tensor
    """bool [vocab_size]: in the prompt or the output."""
    counts: torch.Tensor
    """float32 [vocab_size]: how often in the output."""

    @classmethod
    def of(cls, token_ids: Sequence[int], num_prompt: int, vocab_size: int, device: torch.device) -> TokenHistory:
        ids = torch.as_tensor(token_ids, dtype=torch.int64, device=device)
        history = cls(
            torch.zeros(vocab_size, dtype=torch.bool, device=device),
            torch.zeros(vocab_size, dtype=torch.float32, device=device),
        )
        history.seen[ids] = True
        output = ids[num_prompt:]
        history.counts.scatter_add_(0, output, torch.ones(len(output), device=device))
        return history

    def append(self, token_id: int) -> None:
        self.seen[token_id] = True
        self.counts[token_id] += 1.0


def has_penalties(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0


@torch.inference_mode()
def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
    histories: Sequence[TokenHistory | None],
) -> list[int]:
    """Next token ids, one a row of `logits`, float32 [num_rows, vocab_size], which may be overwritten.

    `positions` are the places that the new tokens take in their sequences. A row without penalties needs no history; a
    row that is not greedy needs a seed.
    """
    _penalise(logits, params, histories)
    drawn = [row for row, its in enumerate(params) if its.temperature > 0.0]
    if len(drawn) < len(params):
        best = torch.argmax(logits, dim=-1)
        if not drawn:
            return _whole_numbers(best)
    else:
        best = torch.empty(len(params), dtype=torch.int64, device=logits.device)
    rows = torch.tensor(drawn, device=logits.device)
    scores = logits if len(drawn) == len(params) else logits[rows]
    best[rows] = _draw(scores, [params[row] for row in drawn], [positions[row] for row in drawn])
    return _whole_numbers(best)


def _penalise(logits: torch.Tensor, params: Sequence[SamplingParams], histories: Sequence[TokenHistory | None]) -> None:
    for row, (its, history) in enumerate(zip(params, histories, strict=True)):
        if not has_penalties(its):
            continue
        assert history is not None
        scores = logits[row]
        if (factor := its.repetition_penalty) != 1.0:
            repeated = torch.where(scores > 0, scores / factor, scores * factor)
            torch.where(history.seen, repeated, scores, out=scores)
        if its.presence_penalty != 0.0:
            scores.sub_(its.presence_penalty * (history.counts > 0))
        if its.frequency_penalty != 0.0:
            scores.sub_(its.frequency_penalty * history.counts)


def _draw(scores: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]) -> torch.Tensor:
    """int64 [num_rows] by temperature, top-k, top-p, min-p and the Gumbel-max trick."""
    device = scores.device
    temperatures = torch.tensor([max(its.temperature, _LEAST_TEMPERATURE) for its in params], device=device)
    scores = scores / temperatures[:, None]
    keys = torch.from_numpy(draw_keys([_seed(its) for its in params], positions)).to(device)
    filtered = np.array([its.top_k > 0 or its.top_p < 1.0 or its.min_p > 0.0 for its in params])
    if not filtered.any():
        return _noisy_argmax(scores, keys)
    vocab_size = scores.shape[1]
    values, ids = torch.topk(scores, min(_CANDIDATES, vocab_size), dim=-1)
    cuts = _cuts(values, scores, params)
    # The candidates hold all that is kept if the cut lies above the last of them.
    found = filtered & ((values[:, -1] < cuts).cpu().numpy() | (values.shape[1] == vocab_size))
    noisy = values.double() + gumbel_noise(keys, ids)
    noisy.masked_fill_(values < cuts[:, None], -torch.inf)
    chosen = ids.gather(1, noisy.argmax(dim=-1, keepdim=True)).squeeze(1)
    if found.all():
        return chosen
    left: list[int] = np.flatnonzero(~found).tolist()
    rest = torch.tensor(left, device=device)
    wide = scores[rest]
    wide_params = [params[row] for row in left]
    if filtered[~found].any():
        ordered = torch.sort(wide, dim=-1, descending=True).values
        wide = wide.masked_fill(wide < _cuts(ordered, wide, wide_params)[:, None], -torch.inf)
    chosen[rest] = _noisy_argmax(wide, keys[rest])
    return chosen


def _cuts(values: torch.Tensor, scores: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """The smallest score that each row keeps, float32 [num_rows], from its largest scores in falling order.

    `values` [num_rows, n] are the n largest of `scores` [num_rows, vocab_size]. A cut that lies below the n-th is given
    as the n-th, so that the caller can tell.
    """
    device = scores.device
    width = values.shape[1]
    cuts = torch.full((len(params),), -torch.inf, device=device)
    top_k = torch.tensor([its.top_k or scores.shape[1] for its in params], device=device)
    if bool((top_k < scores.shape[1]).any()):
        kth = values.gather(1, (top_k.clamp(max=width) - 1)[:, None]).squeeze(1)
        cuts = torch.where(top_k < scores.shape[1], kth, cuts)
    if any(its.top_p < 1.0 for its in params):
        top_p = torch.tensor([its.top_p for its in params], dtype=torch.float64, device=device)
        best = values[:, :1]
        mass = torch.where(scores >= cuts[:, None], (scores - best).exp(), 0.0).sum(-1, dtype=torch.float64)
        share = torch.where(values >= cuts[:, None], (values - best).exp(), 0.0).double() / mass[:, None]
        before = share.cumsum(-1) - share  # what the better ones hold; the first token is always kept
        kept = ((before < top_p[:, None]).sum(-1) - 1).clamp(min=0)
        cuts = torch.where(top_p < 1.0, torch.maximum(cuts, values.gather(1, kept[:, None]).squeeze(1)), cuts)
    if any(its.min_p > 0.0 for its in params):
        min_p = torch.tensor([its.min_p for its in params], device=device)
        cuts = torch.maximum(cuts, values[:, 0] + min_p.log())
    return cuts


def _noisy_argmax(scores: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    ids = torch.arange(scores.shape[1], device=scores.device)[None]
    return torch.cat(
        [
            (scores[some : some + _NOISY_ROWS].double() + gumbel_noise(keys[some : some + _NOISY_ROWS], ids)).argmax(-1)
            for some in range(0, scores.shape[0], _NOISY_ROWS)
        ]
    )


def draw_keys(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """One 64-bit key a draw, int64 [num_rows] (the same bits as the unsigned number)."""
    keys = [_mix(_mix(seed) + _GOLDEN * (position + 1)) for seed, position in zip(seeds, positions, strict=True)]
    return np.array(keys, dtype=np.uint64).view(np.int64)


def gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise, float64 [num_rows, n], for int64 keys [num_rows] and token ids [num_rows or 1, n].

    SplitMix64 (Steele, Lea and Flood 2014) as a counter-based generator: the token id counts from the key. Its upper 52
    bits and a half give a uniform number that is never 0 or 1.
    """
    x = keys[:, None] + (token_ids + 1) * _signed(_GOLDEN)
    x = (x ^ _shift(x, 30)) * _signed(_MIX_1)
    x = (x ^ _shift(x, 27)) * _signed(_MIX_2)
    x = x ^ _shift(x, 31)
    uniform = (_shift(x, 12).double() + 0.5) * 2.0**-52
    return uniform.log_().neg_().log_().neg_()


def _whole_numbers(ids: torch.Tensor) -> list[int]:
    numbers: list[int] = ids.tolist()
    return numbers


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right of int64, whose own is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _mix(x: int) -> int:
    x &= _WORD
    x = ((x ^ (x >> 30)) * _MIX_1) & _WORD
    x = ((x ^ (x >> 27)) * _MIX_2) & _WORD
    return x ^ (x >> 31)


def _seed(params: SamplingParams) -> int:
    assert params.seed is not None, "a row that is drawn needs a seed"
    return params.seed
