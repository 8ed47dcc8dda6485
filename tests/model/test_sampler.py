"""Sampling has the exact distribution that its parameters say, and depends on (seed, position) alone."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatserve.model import sampler
from chatserve.model.sampler import TokenHistory, draw_keys, gumbel_noise, sample
from chatserve.types import SamplingParams

CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0)


def drawn(**fields: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "top_p": 1.0, "seed": 1, **fields})


def reference_probabilities(logits: torch.Tensor, its: SamplingParams) -> torch.Tensor:
    """The definition, in float64, by one full sort: temperature, top-k, top-p, min-p."""
    scores = logits.double() / its.temperature
    order = torch.argsort(scores, descending=True, stable=True)
    if its.top_k:
        scores[scores < scores[order[min(its.top_k, len(order)) - 1]]] = -math.inf
    share = torch.softmax(scores, -1)
    before = share[order].cumsum(-1) - share[order]
    scores[order[before >= its.top_p]] = -math.inf
    share = torch.softmax(scores, -1)
    if its.min_p:
        scores[share < its.min_p * share.max()] = -math.inf
    return torch.softmax(scores, -1)


def frequencies(logits: torch.Tensor, its: SamplingParams, draws: int) -> torch.Tensor:
    counts = torch.zeros(len(logits), dtype=torch.float64)
    for start in range(0, draws, 500):
        rows = min(500, draws - start)
        ids = sample(logits.repeat(rows, 1), [its] * rows, range(start, start + rows), [None] * rows)
        counts += torch.bincount(torch.tensor(ids), minlength=len(logits))
    return counts / draws


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 1.7, "top_k": 5},
        {"top_p": 0.6},
        {"top_k": 6, "top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 0.8, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_draws_follow_the_exact_distribution(fields: dict[str, float]) -> None:
    logits = torch.randn(24, generator=torch.Generator().manual_seed(3)) * 1.5
    its = drawn(**fields)
    expected = reference_probabilities(logits, its)
    draws = 6000
    got = frequencies(logits, its, draws)
    assert not got[expected == 0].any()
    kept = expected > 0
    # Pearson's statistic; five standard deviations above its mean.
    statistic = float((draws * (got[kept] - expected[kept]) ** 2 / expected[kept]).sum())
    freedom = max(1, int(kept.sum()) - 1)
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)


@given(
    seed=st.integers(0, 10_000),
    spread=st.sampled_from([0.01, 0.5, 2.0, 6.0]),
    top_k=st.sampled_from([0, 1, 3, 500, 700, 2000]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.5]),
)
@settings(max_examples=60, deadline=None)
def test_no_filtered_token_is_ever_drawn_however_far_down_the_cut_lies(
    seed: int, spread: float, top_k: int, top_p: float, min_p: float
) -> None:
    # More tokens than candidates are taken at first, and so flat that cuts fall beyond them.
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(1500, generator=generator) * spread
    its = drawn(top_k=top_k, top_p=top_p, min_p=min_p, temperature=0.9)
    expected = reference_probabilities(logits, its)
    ids = sample(logits.repeat(16, 1), [its] * 16, range(16), [None] * 16)
    share = torch.softmax(logits.double() / its.temperature, -1)
    # The definition is in float64: in float32 a token just past the cut may be kept.
    cut = share[expected > 0].min() * (1 - 1e-4)
    assert all(share[token] >= cut for token in ids)


def test_a_draw_is_the_same_in_any_batch_and_order() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, 700, generator=generator)
    params = [
        drawn(seed=1),
        GREEDY,
        drawn(seed=1, top_p=0.5),
        drawn(seed=2, top_k=600, temperature=2.0),
        drawn(seed=3, min_p=0.1),
        drawn(seed=4, top_p=0.99, temperature=2.0),
        drawn(seed=5),
        GREEDY,
        drawn(seed=6, top_k=3),
    ]
    positions = list(range(40, 49))
    together = sample(logits.clone(), params, positions, [None] * 9)
    alone = [sample(logits[[row]].clone(), [params[row]], [positions[row]], [None])[0] for row in range(9)]
    reverse = sample(logits.flip(0).clone(), params[::-1], positions[::-1], [None] * 9)[::-1]
    assert together == alone == reverse


def test_seed_and_position_each_change_the_draws() -> None:
    logits = torch.zeros(64, 1000)
    positions = list(range(64))
    first = sample(logits.clone(), [drawn(seed=1)] * 64, positions, [None] * 64)
    assert first == sample(logits.clone(), [drawn(seed=1)] * 64, positions, [None] * 64)
    other = sample(logits.clone(), [drawn(seed=2)] * 64, positions, [None] * 64)
    assert sum(a == b for a, b in zip(first, other, strict=True)) < 5
    assert len(set(first)) > 50


def test_noise_is_standard_gumbel_and_uncorrelated_between_neighbours() -> None:
    keys = torch.from_numpy(draw_keys([7] * 50, range(50)))
    noise = gumbel_noise(keys, torch.arange(2000)[None])
    assert abs(float(noise.mean()) - 0.5772) < 0.02
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.05
    centred = noise - noise.mean()
    assert abs(float((centred[:, 1:] * centred[:, :-1]).mean())) < 0.02
    assert abs(float((centred[1:] * centred[:-1]).mean())) < 0.02
    assert torch.isfinite(noise).all()


def test_the_largest_seed_and_position_are_allowed() -> None:
    its = drawn(seed=2**63 - 1)
    assert 0 <= sample(torch.zeros(1, 10), [its], [10**9], [None])[0] < 10


def test_temperature_zero_is_the_argmax_and_ignores_filters() -> None:
    logits = torch.randn(4, 50)
    its = SamplingParams(temperature=0.0, top_k=1, top_p=0.01, min_p=1.0)
    assert sample(logits.clone(), [its] * 4, [0] * 4, [None] * 4) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [1e-6, 1e-20, 1e-38, 1e-40, 1e-60])
@pytest.mark.parametrize("fields", [{}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}], ids=str)
def test_the_lowest_temperatures_take_the_largest_logit(temperature: float, fields: dict[str, float]) -> None:
    logits = torch.tensor([[0.5, 30.0, 29.0, -1.0, 3e3, 2e3]])
    assert sample(logits, [drawn(temperature=temperature, **fields)], [7], [None]) == [4]


def test_greedy_rows_cost_no_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("noise was made for a greedy row")

    monkeypatch.setattr(sampler, "gumbel_noise", refuse)
    monkeypatch.setattr(torch, "topk", refuse)
    assert sample(torch.eye(3), [GREEDY] * 3, [0] * 3, [None] * 3) == [0, 1, 2]


@given(
    repetition=st.sampled_from([1.0, 0.5, 1.3]),
    presence=st.sampled_from([0.0, 1.5, -0.7]),
    frequency=st.sampled_from([0.0, 0.4, -0.2]),
    ids=st.lists(st.integers(0, 11), min_size=1, max_size=20),
    prompt=st.integers(0, 20),
)
@settings(max_examples=80, deadline=None)
def test_penalties_are_those_of_the_definition(
    repetition: float, presence: float, frequency: float, ids: list[int], prompt: int
) -> None:
    prompt = min(prompt, len(ids))
    its = SamplingParams(
        temperature=0.0, repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency
    )
    logits = torch.randn(12, generator=torch.Generator().manual_seed(len(ids) + prompt))
    expected = []
    for token, score in enumerate(logits.tolist()):
        if token in ids:
            score = score / repetition if score > 0 else score * repetition  # noqa: PLW2901
        count = ids[prompt:].count(token)
        expected.append(score - presence * (count > 0) - frequency * count)
    # A history that grew token by token is the same as one made at once.
    grown = TokenHistory.of(ids[:prompt], prompt, 12, CPU) if prompt else TokenHistory.of([], 0, 12, CPU)
    for token in ids[prompt:]:
        grown.append(token)
    for history in (grown, TokenHistory.of(ids, prompt, 12, CPU)):
        row = logits.clone()[None]
        chosen = sample(row, [its], [len(ids)], [history])
        assert expected[chosen[0]] == pytest.approx(max(expected), abs=1e-6)


def test_a_row_with_penalties_leaves_its_neighbours_alone() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
    its = SamplingParams(temperature=0.0, presence_penalty=2.0)
    histories = [TokenHistory.of([0], 0, 3, CPU), None]
    assert sample(logits, [its, GREEDY], [1, 1], histories) == [1, 0]
