"""Sampled tokens are those of the definition, in any batch, whatever the settings, and on any logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from chatserve_kernels import reference, sampling
from chatserve_kernels.sampling import SamplingWorkspace, count_tokens, greedy_rows, sample_tokens, to_words
from chatserve_kernels.sampling_noise import gumbel_noise, unfinished_bits

from chatserve.model import sampler
from chatserve.model.sampler import TokenHistory
from chatserve.types import SamplingParams
from tests.kernels.decode_cases import DEVICE

OPTIONS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"top_k": 1},
    {"top_k": 7, "temperature": 1.7},
    {"top_p": 0.9},
    {"top_p": 0.3, "temperature": 2.0},
    {"top_p": 1e-9},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 1e-40},
    {"temperature": 1e-25, "top_p": 0.5},
    {"top_k": 20, "top_p": 0.8},
    {"top_p": 0.95, "min_p": 0.05},
    {"top_k": 1_000_000, "top_p": 0.7},
    {"top_k": 30, "top_p": 0.99, "min_p": 0.02, "temperature": 0.6},
]


def make_rows(options: list[dict[str, float]], seed: int = 0) -> np.ndarray:
    rows = greedy_rows(len(options))
    rows["temperature"] = 1.0
    rows["seed"] = seed + np.arange(len(options)) * 2**40
    for row, its in zip(rows, options, strict=True):
        for name, value in its.items():
            row[name] = value
    return rows


def choose(
    logits: torch.Tensor, rows: np.ndarray, positions: list[int] | None = None, counts: torch.Tensor | None = None
) -> list[int]:
    num_rows, vocab_size = logits.shape
    positions = positions or list(range(num_rows))
    out = torch.full((num_rows,), -1, device=DEVICE)
    workspace = SamplingWorkspace(num_rows, vocab_size, DEVICE)
    where = torch.tensor(positions, device=DEVICE)
    words = to_words(rows).to(DEVICE)
    assert sample_tokens(logits, words, where, workspace, counts=counts, out=out) is out
    return out.tolist()


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE)


def assert_drawn(token: int, logits: torch.Tensor, row: np.void, position: int) -> None:
    """The best of the kept, unless what is within rounding of a cut or of the best says otherwise."""
    temperature = float(row["temperature"])
    assert 0 <= token < len(logits)
    logits = logits.double().cpu()
    if temperature == 0.0:
        assert token == int(logits.argmax())
        return
    noise = reference.gumbel_noise(int(row["seed"]), position, len(logits))
    top_p, min_p = float(row["top_p"]), float(row["min_p"])
    for factor in (1.0, 1 - 1e-5, 1 + 1e-5):
        nudged = top_p if top_p == 1.0 else top_p * factor
        kept = reference.kept_tokens(logits, temperature, int(row["top_k"]), nudged, min_p / factor)
        noisy = (logits / temperature + noise).masked_fill(~kept, -torch.inf)
        if noisy[token] >= noisy.max() - 1e-4:
            return
    pytest.fail(f"token {token} is not the one drawn with {row} at {position}")


@pytest.mark.parametrize("vocab_size", [32, 33, 1000, 8200])
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0])
def test_tokens_are_those_of_the_definition(vocab_size, spread):
    logits = (randn(len(OPTIONS), vocab_size + 3) * spread)[:, :vocab_size]
    rows = make_rows(OPTIONS)
    tokens = choose(logits, rows)
    for index, token in enumerate(tokens):
        assert_drawn(token, logits[index], rows[index], index)


@pytest.mark.parametrize(
    ("vocab_size", "dtype", "its"),
    [
        (49_152, torch.float16, {"top_k": 50}),
        (49_152, torch.float32, {}),
        (128_256, torch.bfloat16, {"top_p": 0.95, "temperature": 0.7}),
    ],
)
def test_large_vocabularies(vocab_size, dtype, its):
    logits = (randn(1, vocab_size) * 2).to(dtype)
    rows = make_rows([its], seed=4)
    assert_drawn(choose(logits, rows, [9])[0], logits[0], rows[0], 9)


def test_a_token_is_the_cpu_samplers():
    """The same numbers, so a conversation goes on alike whichever device takes it up."""
    params = [SamplingParams(**({"temperature": 1.0, "top_p": 1.0, "seed": 5 + i} | o)) for i, o in enumerate(OPTIONS)]
    logits = randn(len(OPTIONS), 3000, seed=2) * 3
    rows = make_rows(OPTIONS)
    rows["seed"] = [its.seed for its in params]
    positions = [1000 * index for index in range(len(OPTIONS))]
    assert choose(logits, rows, positions) == sampler.sample(logits.cpu(), params, positions, [None] * len(params))


def test_a_token_depends_on_its_own_row_alone(monkeypatch):
    """In another batch, in another place, and when a program takes all chunks of its row."""
    logits = randn(len(OPTIONS), 8300) * 2
    rows = make_rows(OPTIONS)
    together = choose(logits, rows)
    order = list(range(len(OPTIONS)))[::-4]
    assert choose(logits[order], rows[order], order) == [together[index] for index in order]
    monkeypatch.setattr(sampling, "PROGRAMS", 1)
    assert choose(logits[2:6].clone(), rows[2:6], [2, 3, 4, 5]) == together[2:6]


@pytest.mark.parametrize("value", [0.0, -3.0, 1e30])
def test_equal_logits_are_all_kept_and_drawn_alike(value):
    options = [{}, {"top_k": 3}, {"top_p": 0.1}, {"min_p": 1.0}, {"top_k": 3, "top_p": 0.5}]
    tokens = choose(torch.full((5, 700), value, device=DEVICE), make_rows(options))
    for index, token in enumerate(tokens):
        noise = reference.gumbel_noise(index * 2**40, index, 700)
        assert token == int(noise.argmax())


def test_ties_with_the_last_kept_are_kept():
    """Of logits 2, 1, 1, 1, 0, ...: top-k of 2 and top-p that ends in the second keep four tokens, and only those."""
    logits = torch.full((1, 40), 0.0, device=DEVICE)
    logits[0, [30]] = 2.0
    logits[0, [3, 17, 35]] = 1.0
    for its in ({"top_k": 2}, {"top_p": 0.2}):
        drawn = choose(logits.expand(16, -1), make_rows([its] * 16))
        assert set(drawn) == {30, 3, 17, 35}


def test_logits_that_are_not_finite():
    """As the CPU's sampler, where that depends on no order of sorting."""
    infinite = math.inf
    cases = [
        ([-infinite] * 40, 0),
        ([0.0, -1.0, math.nan, 5.0] + [1.0] * 36, 2),
        ([0.0, infinite, 3.0, infinite] + [1.0] * 36, 1),
        ([-infinite] * 39 + [-5.0], 39),
    ]
    for its in ({}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 5, "top_p": 0.5}):
        logits = torch.tensor([values for values, _ in cases], device=DEVICE)
        assert choose(logits, make_rows([its] * len(cases))) == [expected for _, expected in cases]


def test_tokens_of_no_weight_are_never_drawn():
    options = [{}, {"top_k": 100}, {"top_p": 0.999}, {"top_k": 100, "top_p": 0.999}, {"min_p": 1e-6}]
    logits = torch.full((len(options), 5000), -math.inf, device=DEVICE)
    logits[:, 4000:4003] = randn(len(options), 3)
    assert all(4000 <= token < 4003 for token in choose(logits, make_rows(options, seed=3)))


def test_rows_whose_doubtful_tokens_do_not_fit_their_list(monkeypatch):
    """Are searched as a whole, with the same result."""
    logits = randn(len(OPTIONS), 3000)
    rows = make_rows(OPTIONS)
    with_list = choose(logits, rows)
    monkeypatch.setattr(sampling, "OPEN_PER_CHUNK", 1)
    assert choose(logits, rows) == with_list


def test_draws_under_the_bound_below_which_noise_is_not_evaluated():
    """One row in 22,000: found by its noise, which is small for every token."""
    vocab_size, positions = 32, np.arange(100_000)
    noise = sampler.gumbel_noise(
        torch.from_numpy(sampler.draw_keys([0] * len(positions), positions.tolist())), torch.arange(vocab_size)[None]
    )
    largest = noise.max(1).values
    rare = torch.argsort(largest)[:4]
    assert (largest[rare] < math.log(vocab_size) - math.log(10)).all()
    options = [{}, {"top_p": 0.999}, {"min_p": 0.5}, {"top_p": 0.999, "min_p": 0.5}]
    rows = make_rows(options)
    rows["seed"] = 0
    tokens = choose(torch.zeros(4, vocab_size, device=DEVICE), rows, rare.tolist())
    assert tokens == noise[rare].argmax(1).tolist()


@triton.jit
def noise_kernel(out, key, SIZE: tl.constexpr):  # noqa: N803 - Triton's convention
    ids = tl.arange(0, SIZE)
    tl.store(out + ids, gumbel_noise(unfinished_bits(tl.load(key).to(tl.uint64, bitcast=True), ids)))


def test_noise_is_the_cpu_samplers_and_gumbel_distributed():
    size = 2**17
    keys = torch.from_numpy(sampler.draw_keys([12], [34])).to(DEVICE)
    out = torch.empty(size, device=DEVICE)
    noise_kernel[(1,)](out, keys, SIZE=size)
    expected = sampler.gumbel_noise(keys, torch.arange(size, device=DEVICE)[None])[0]
    assert (out - expected).abs().max() < 4e-6
    # Pearson's statistic over 64 bins of equal probability; five standard deviations above its mean.
    uniform = torch.exp(-torch.exp(-out.double()))
    counts = torch.histc(uniform, 64, 0.0, 1.0)
    statistic = float(((counts - size / 64) ** 2 / (size / 64)).sum())
    assert statistic < 63 + 5 * math.sqrt(2 * 63)


def test_penalties_are_the_cpu_samplers_and_what_is_sampled_is_counted():
    vocab_size, ids, num_prompt = 300, [7, 7, 250, 3, 7, 250], 2
    fields = {"repetition_penalty": 1.4, "presence_penalty": 0.6, "frequency_penalty": -0.3}
    logits = randn(4, vocab_size) * 0.2
    logits[:, [7, 250]] += 1.0
    options = [{"temperature": 0.0, **fields}, {"top_p": 0.8, **fields}, {}, {"top_k": 9, **fields}]
    rows = make_rows(options, seed=1)
    slots = [2, 0, -1, 1]
    rows["count_slot"] = slots
    slot = count_tokens(torch.tensor(ids, device=DEVICE), num_prompt, vocab_size)
    counts = slot.expand(3, -1).contiguous()
    params = [
        SamplingParams(**({"temperature": 1.0, "top_p": 1.0, "seed": int(row["seed"])} | its))
        for row, its in zip(rows, options, strict=True)
    ]
    cpu = torch.device("cpu")
    histories = [None if slot < 0 else TokenHistory.of(ids, num_prompt, vocab_size, cpu) for slot in slots]
    for position in range(10, 13):
        expected = sampler.sample(logits.cpu().clone(), params, [position] * 4, histories)
        assert choose(logits, rows, [position] * 4, counts) == expected
        for history, token in zip(histories, expected, strict=True):
            if history is not None:
                history.append(token)
    for row, slot in enumerate(slots):
        if slot >= 0:
            assert torch.equal(counts[slot].cpu() >> 1, histories[row].counts.int())
            assert torch.equal((counts[slot].cpu() & 1).bool(), histories[row].seen)


def test_what_the_kernels_cannot_use_is_refused():
    workspace = SamplingWorkspace(2, 32, DEVICE)
    words, positions = to_words(greedy_rows(2)).to(DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    logits = randn(2, 32)
    for arguments, message in (
        ((randn(3, 32), words, positions), "at most 2 rows of 32 tokens, got 3 of 32"),
        ((randn(2, 33), words, positions), "got 2 of 33"),
        ((randn(32, 2).T, words, positions), "stride of 1"),
        ((logits, words.float(), positions), "int32 rows"),
        ((logits, words, positions.int()), "int64 positions"),
    ):
        with pytest.raises(ValueError, match=message):
            sample_tokens(*arguments, workspace)
    with pytest.raises(ValueError, match="int32 counts of 32 tokens"):
        sample_tokens(logits, words, positions, workspace, counts=torch.zeros(1, 31, dtype=torch.int32))
    for out in (positions.int(), torch.zeros(4, dtype=torch.int64, device=DEVICE)[::2], positions[:1]):
        with pytest.raises(ValueError, match=r"contiguous int64 out \[2\]"):
            sample_tokens(logits, words, positions, workspace, out=out)
    with pytest.raises(ValueError, match=r"rows of sampling\.ROW"):
        to_words(np.zeros(3))
    assert sample_tokens(logits[:0], words[:0], positions[:0], workspace).numel() == 0
