"""What the sampling kernels know of a row: its settings, its logits, and what its chunks' programs found.

Notation: x a token's logit after penalties, M a row's largest, d = (x - M) / temperature / log(2) <= 0 its score,
e = 2^d its weight, Z the sum of all weights. All comparisons are of d, computed everywhere by the same operations, so
tokens of equal d are treated alike.

`floats` [num_rows, FLOATS, num_chunks], `ints` [num_rows, INTS, num_chunks] and `agreed` [num_rows, AGREED] carry it
from kernel to kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROW_WORDS = tl.constexpr(10)
GROUP = tl.constexpr(32)
THRESHOLDS = tl.constexpr(5)
THRESHOLDS_PAD = tl.constexpr(8)

# floats
TOP = tl.constexpr(0)  # largest x
MASS = tl.constexpr(1)  # of weights relative to TOP; times d; times d squared
ABOVE = tl.constexpr(4)  # mass at or above each threshold
SURE = tl.constexpr(4 + 5)  # largest noisy score of the tokens that are surely kept
OPEN = tl.constexpr(5 + 5)  # and of those that may be
FLOATS = tl.constexpr(6 + 5)
# ints
TOP_ID = tl.constexpr(0)
SURE_ID = tl.constexpr(1)
OPEN_COUNT = tl.constexpr(2)
INTS = tl.constexpr(3)
# what a row's chunks agree on, written by one of them for the next kernel, since another may round differently
GUESS = tl.constexpr(0)  # thresholds; of a row with top-k, one that no kept token is below
LOW = tl.constexpr(5)
HIGH = tl.constexpr(6)
SURELY = tl.constexpr(7)
WANTED = tl.constexpr(8)
CHANCE = tl.constexpr(9)
AGREED = tl.constexpr(10)

LOG2_E = tl.constexpr(1.4426950408889634)
IS_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)
FAINT = tl.constexpr(-115.0)
"""Scores are taken as no lower where sums are made: 2^-115 is nothing beside 1, but 0 times infinity is NaN."""
NO_ID = tl.constexpr(2**31 - 1)
LIKELY = tl.constexpr(10.0)
"""How many tokens a row is expected to draw above the bound under which noise is not evaluated."""


@triton.jit
def exp2(x):
    """Results under 2^-126 are 0, which spares three instructions a token."""
    if IS_COMPILED:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def float_setting(words, index: tl.constexpr):
    return tl.load(words + index).to(tl.float32, bitcast=True)


@triton.jit
def inverse_temperature(words):
    """A row's temperature, and what scores are multiplied by, kept finite."""
    temperature = float_setting(words, 0)
    return temperature, tl.minimum(1.0 / tl.maximum(temperature, 1e-37), 1e30) * LOG2_E


@triton.jit
def penalised_logits(logits, ids, vocab_size, words, counts, vocab_stride, HAS_COUNTS: tl.constexpr):
    """float32, after penalties; -inf past the vocabulary's end."""
    mask = ids < vocab_size
    x = tl.load(logits + ids, mask=mask, other=-float("inf")).to(tl.float32)
    if HAS_COUNTS:
        slot = tl.load(words + 7)
        if slot >= 0:
            repetition = float_setting(words, 4)
            count = tl.load(counts + slot.to(tl.int64) * vocab_stride + ids, mask=mask, other=0)
            x = tl.where(count != 0, tl.where(x > 0, x / repetition, x * repetition), x)
            outputs = count >> 1
            x -= tl.where(outputs > 0, float_setting(words, 5), 0.0)
            x -= float_setting(words, 6) * outputs.to(tl.float32)
    return x


@triton.jit
def is_finite(x):
    return (x > -float("inf")) & (x < float("inf"))


@triton.jit
def largest(floats, num_chunks, CHUNKS_PAD: tl.constexpr):
    chunks = tl.arange(0, CHUNKS_PAD)
    return tl.max(tl.load(floats + TOP * num_chunks + chunks, mask=chunks < num_chunks, other=-float("inf")), 0)


@triton.jit
def total_mass(floats, top, inverse, num_chunks, CHUNKS_PAD: tl.constexpr):
    """Z, and mean and standard deviation of d under the weights."""
    chunks = tl.arange(0, CHUNKS_PAD)
    mask = chunks < num_chunks
    tops = tl.load(floats + TOP * num_chunks + chunks, mask=mask, other=-float("inf"))
    mass = tl.load(floats + MASS * num_chunks + chunks, mask=mask, other=0.0)
    first = tl.load(floats + (MASS + 1) * num_chunks + chunks, mask=mask, other=0.0)
    second = tl.load(floats + (MASS + 2) * num_chunks + chunks, mask=mask, other=0.0)
    shift = tl.maximum((tops - top) * inverse, FAINT)
    weight = exp2(shift)
    total = tl.sum(weight * mass, 0)
    mean = tl.sum(weight * (first + shift * mass), 0) / total
    square = tl.sum(weight * (second + shift * (2.0 * first + shift * mass)), 0) / total
    return total, mean, tl.sqrt(tl.maximum(square - mean * mean, 0.0))


@triton.jit
def top_p_threshold(index: tl.constexpr, mean, deviation, top_p):
    """The index-th guess, from above, of where d has top_p of the mass above it.

    Exact guesses are not needed: they only bound the cut. Were d normal under the weights, the cut would be `normal`
    deviations below its mean (Phi's inverse by Lin 1990, to 0.01). Long tails put it up to half a deviation lower for
    top_p of 0.9 to 0.95, and more beyond.
    """
    larger = tl.minimum(tl.maximum(top_p, 1.0 - top_p), 0.999999)
    normal = 5.5556 * (1.0 - tl.exp(0.1186 * tl.log((1.0 - larger) / larger)))
    normal = tl.where(top_p < 0.5, normal, -normal)
    if index == 0:
        offset: tl.constexpr = 0.4
    elif index == 1:
        offset: tl.constexpr = 0.03
    elif index == 2:
        offset: tl.constexpr = -0.15
    elif index == 3:
        offset: tl.constexpr = -0.45
    else:
        offset: tl.constexpr = -1.4
    return tl.minimum(mean + (normal + offset) * deviation, 0.0)


@triton.jit
def bracket(words, floats, guesses, total, vocab_size, num_chunks, CHUNKS_PAD: tl.constexpr):
    """(low, high, mass at or above high, mass wanted): tokens below low are surely not kept, those at or above high
    surely are. With top-k nothing is sure but the floor, and what top-p and min-p take of the k is found later."""
    top_k = tl.load(words + 1)
    top_p = float_setting(words, 2)
    low = -float("inf")
    high = -float("inf")
    surely = 0.0
    wanted = float("inf")
    if (top_k > 0) & (top_k < vocab_size):
        low = tl.load(guesses)
        high = float("inf")
    else:
        if top_p < 1.0:
            wanted = tl.maximum(total * top_p, 1e-30)  # never 0, so that the largest is always kept
            chunks = tl.arange(0, CHUNKS_PAD)[None, :]
            index = tl.arange(0, THRESHOLDS_PAD)
            at = floats + (ABOVE + index[:, None]) * num_chunks + chunks
            mask = (index[:, None] < THRESHOLDS) & (chunks < num_chunks)
            masses = tl.sum(tl.load(at, mask=mask, other=0.0), 1)
            thresholds = tl.load(guesses + index, mask=index < THRESHOLDS, other=float("inf"))
            is_above = masses < wanted
            high = tl.min(tl.where(is_above, thresholds, float("inf")), 0)
            surely = tl.max(tl.where(is_above, masses, 0.0), 0)
            low = tl.max(tl.where(is_above, -float("inf"), thresholds), 0)
        cut = min_p_cut(words)
        low = tl.maximum(low, cut)
        high = tl.maximum(high, cut)  # of what min-p leaves above top-p's bound, all is kept
    return low, high, surely, wanted


@triton.jit
def noise_chance(words, total):
    """What a token's weight is multiplied by for the chance above which `draw_kernel` looks at its noise."""
    least = tl.where(float_setting(words, 3) > 0.0, 1.0, total * tl.minimum(float_setting(words, 2), 1.0))
    return 1.0 / tl.maximum(least, 1e-30) * LIKELY


@triton.jit
def min_p_cut(words):
    min_p = float_setting(words, 3)
    # At most 0, so that the largest is kept.
    return tl.where(min_p > 0.0, tl.minimum(tl.log2(tl.maximum(min_p, 1e-37)), 0.0), -float("inf"))


@triton.jit
def depth_of(d):
    """-d as an integer of the same order: of floats that are not negative, so are the bits."""
    return tl.abs(d).to(tl.int32, bitcast=True)


@triton.jit
def first_largest(noisy, ids):
    """The largest noisy score and its id; of equal ones, the lowest."""
    best = tl.max(noisy, 0)
    return best, tl.min(tl.where(noisy == best, ids, NO_ID), 0)
