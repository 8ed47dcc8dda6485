"""Sampling on a real GPU: real sizes, one captured graph for all settings, and the distribution that is drawn from."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from chatserve_kernels import reference
from chatserve_kernels.sampling import SamplingWorkspace, greedy_rows, sample_tokens, to_words

from chatserve.model import sampler
from chatserve.types import SamplingParams

pytestmark = pytest.mark.gpu
VOCAB_SIZE = 128_256
SETTINGS = [
    {"temperature": 0.0, "top_p": 1.0},
    {"temperature": 1.0, "top_p": 1.0},
    {"temperature": 0.7, "top_p": 0.95},
    {"temperature": 1.5, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 1.0, "top_k": 50},
    {"temperature": 0.6, "top_p": 0.95, "top_k": 20},
    {"temperature": 1.0, "top_p": 1.0, "top_k": 5000},
    {"temperature": 1.0, "top_p": 0.98, "min_p": 0.05},
]


def rows_of(params: list[SamplingParams]) -> np.ndarray:
    rows = greedy_rows(len(params))
    for row, its in zip(rows, params, strict=True):
        for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
            row[name] = getattr(its, name)
    return rows


def skewed(num_rows: int, spread: float) -> torch.Tensor:
    """A few likely tokens before a long tail, as models have, in a random order."""
    order = torch.rand(num_rows, VOCAB_SIZE, device="cuda").argsort(1)
    return -spread * (order + 1.0).log() + 0.1 * torch.randn(num_rows, VOCAB_SIZE, device="cuda")


def test_one_graph_serves_every_setting_at_real_size():
    num_rows = 256
    logits = torch.empty(num_rows, VOCAB_SIZE, device="cuda", dtype=torch.bfloat16)
    words = to_words(greedy_rows(num_rows)).cuda()
    positions = torch.zeros(num_rows, dtype=torch.int64, device="cuda")
    out = torch.empty(num_rows, dtype=torch.int64, device="cuda")
    workspace = SamplingWorkspace(num_rows, VOCAB_SIZE, torch.device("cuda"))
    logits.normal_()

    def step() -> None:
        sample_tokens(logits, words, positions, workspace, out=out)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for turn, spread in enumerate((0.0, 0.8, 1.3, 2.5)):
        logits.copy_(skewed(num_rows, spread) if spread else torch.randn(num_rows, VOCAB_SIZE, device="cuda"))
        params = [
            SamplingParams(**SETTINGS[(row + turn) % len(SETTINGS)], seed=row * 7919 + turn) for row in range(num_rows)
        ]
        where = [100 * turn + row for row in range(num_rows)]
        words.copy_(to_words(rows_of(params)))
        positions.copy_(torch.tensor(where))
        out.fill_(-1)
        graph.replay()
        expected = sampler.sample(logits.float(), params, where, [None] * num_rows)
        differ = [row for row, token in enumerate(out.tolist()) if token != expected[row]]
        # Rounding decides among scores that are within some 1e-6 of each other, or of a cut.
        assert len(differ) <= 1, [(params[row], expected[row], int(out[row])) for row in differ]


@pytest.mark.parametrize("fields", [{}, {"top_p": 0.7}, {"top_k": 9, "top_p": 0.9}, {"min_p": 0.05}], ids=str)
def test_draws_follow_the_distribution(fields):
    draws, size = 40_000, 64
    logits = torch.randn(size, generator=torch.Generator().manual_seed(3)) * 1.5
    rows = greedy_rows(draws)
    rows["temperature"] = 0.8
    rows["seed"] = 5
    for name, value in fields.items():
        rows[name] = value
    positions = torch.arange(draws, device="cuda")
    workspace = SamplingWorkspace(draws, size, torch.device("cuda"))
    tokens = sample_tokens(logits.cuda().expand(draws, -1), to_words(rows).cuda(), positions, workspace)
    kept = reference.kept_tokens(logits, 0.8, **fields)
    expected = torch.softmax((logits.double() / 0.8).masked_fill(~kept, -torch.inf), -1) * draws
    counts = torch.bincount(tokens.cpu(), minlength=size)
    assert not counts[~kept].any()
    # Pearson's statistic; five standard deviations above its mean.
    statistic = float(((counts - expected)[kept] ** 2 / expected[kept]).sum())
    freedom = int(kept.sum()) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom)
