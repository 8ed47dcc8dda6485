"""The four kernels of `sampling.sample_tokens`, and what they share.

Notation: x a token's logit after penalties, M a row's largest, d = (x - M) / temperature <= 0 its score, e = exp(d) its
weight, Z the sum of all weights. All comparisons are of d, computed everywhere by the same operations, so that tokens
of equal d are treated alike.

A row is cut into chunks of CHUNK tokens, one program each, whatever the batch: sums are in the same order in every
batch, and so is the result, to the last bit. `floats` [num_rows, FLOATS, num_chunks] and `ints` [num_rows, INTS,
num_chunks] carry what a chunk's program finds to the next kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

ROW_WORDS = tl.constexpr(10)
GROUP = tl.constexpr(32)
THRESHOLDS = tl.constexpr(6)

# floats
TOP = tl.constexpr(0)  # largest x
MASS = tl.constexpr(1)  # of weights relative to TOP; times d; times d squared
ABOVE = tl.constexpr(4)  # mass at or above each threshold
SURE = tl.constexpr(4 + 6)  # largest noisy score of the tokens that are surely kept
OPEN = tl.constexpr(5 + 6)  # and of those that may be
FLOATS = tl.constexpr(6 + 6)
# ints
TOP_ID = tl.constexpr(0)
SURE_ID = tl.constexpr(1)
OPEN_COUNT = tl.constexpr(2)
INTS = tl.constexpr(3)
# what a row's chunks agree on, written by one of them for the next kernel, since another may round differently
GUESS = tl.constexpr(0)  # thresholds; of a row with top-k, one that no kept token is below
LOW = tl.constexpr(6)
HIGH = tl.constexpr(7)
SURELY = tl.constexpr(8)
WANTED = tl.constexpr(9)
CHANCE = tl.constexpr(10)
AGREED = tl.constexpr(11)

FAINT = tl.constexpr(-80.0)
"""Scores are taken as no lower where sums are made: exp(-80) is nothing beside 1, and 0 times infinity is not a number."""
NO_ID = tl.constexpr(2**31 - 1)
LIKELY = tl.constexpr(10.0)
"""How many tokens a row is expected to draw above the bound under which noise is not evaluated."""
GOLDEN = tl.constexpr(0x9E3779B97F4A7C15)
MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
MIX_2 = tl.constexpr(0x94D049BB133111EB)


@triton.jit
def _float_word(words, index: tl.constexpr):
    return tl.load(words + index).to(tl.float32, bitcast=True)


@triton.jit
def _temper(words):
    """A row's temperature, and its inverse, kept finite."""
    temperature = _float_word(words, 0)
    return temperature, tl.minimum(1.0 / tl.maximum(temperature, 1e-37), 1e30)


@triton.jit
def _logits(logits, ids, vocab_size, words, counts, vocab_stride, HAS_COUNTS: tl.constexpr):
    """float32, after penalties; -inf past the vocabulary's end."""
    mask = ids < vocab_size
    x = tl.load(logits + ids, mask=mask, other=-float("inf")).to(tl.float32)
    if HAS_COUNTS:
        slot = tl.load(words + 7)
        if slot >= 0:
            repetition = _float_word(words, 4)
            count = tl.load(counts + slot.to(tl.int64) * vocab_stride + ids, mask=mask, other=0)
            x = tl.where(count != 0, tl.where(x > 0, x / repetition, x * repetition), x)
            outputs = count >> 1
            x -= tl.where(outputs > 0, _float_word(words, 5), 0.0)
            x -= _float_word(words, 6) * outputs.to(tl.float32)
    return x


@triton.jit
def _is_finite(x):
    return (x > -float("inf")) & (x < float("inf"))


@triton.jit
def _top(floats, num_chunks, CHUNKS_PAD: tl.constexpr):
    chunks = tl.arange(0, CHUNKS_PAD)
    return tl.max(tl.load(floats + TOP * num_chunks + chunks, mask=chunks < num_chunks, other=-float("inf")), 0)


@triton.jit
def _mass(floats, top, inverse, num_chunks, CHUNKS_PAD: tl.constexpr):
    """Z, and mean and standard deviation of d under the weights."""
    chunks = tl.arange(0, CHUNKS_PAD)
    mask = chunks < num_chunks
    tops = tl.load(floats + TOP * num_chunks + chunks, mask=mask, other=-float("inf"))
    mass = tl.load(floats + MASS * num_chunks + chunks, mask=mask, other=0.0)
    first = tl.load(floats + (MASS + 1) * num_chunks + chunks, mask=mask, other=0.0)
    second = tl.load(floats + (MASS + 2) * num_chunks + chunks, mask=mask, other=0.0)
    shift = tl.maximum((tops - top) * inverse, FAINT)
    weight = tl.exp(shift)
    total = tl.sum(weight * mass, 0)
    mean = tl.sum(weight * (first + shift * mass), 0) / total
    square = tl.sum(weight * (second + shift * (2.0 * first + shift * mass)), 0) / total
    return total, mean, tl.sqrt(tl.maximum(square - mean * mean, 0.0))


@triton.jit
def _threshold(index: tl.constexpr, mean, deviation, top_p):
    """The index-th guess, from above, of where d has top_p of the mass above it.

    Exact guesses are not needed: they only bound the cut. Were d normal under the weights, the cut would be `normal`
    deviations below its mean (Phi's inverse by Lin 1990, to 0.01); so thresholds lie close around that, and others at a
    distance for what is not normal at all.
    """
    larger = tl.minimum(tl.maximum(top_p, 1.0 - top_p), 0.999999)
    normal = 5.5556 * (1.0 - tl.exp(0.1186 * tl.log((1.0 - larger) / larger)))
    normal = tl.where(top_p < 0.5, normal, -normal)
    if index == 0:
        offset: tl.constexpr = 1.2
    elif index == 1:
        offset: tl.constexpr = 0.35
    elif index == 2:
        offset: tl.constexpr = 0.04
    elif index == 3:
        offset: tl.constexpr = -0.04
    elif index == 4:
        offset: tl.constexpr = -0.4
    else:
        offset: tl.constexpr = -1.5
    return tl.minimum(mean + (normal + offset) * deviation, 0.0)


@triton.jit
def _depth(d):
    """-d as an integer of the same order: of floats that are not negative, so are the bits."""
    return tl.abs(d).to(tl.int32, bitcast=True)


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * MIX_1
    x = (x ^ (x >> 27)) * MIX_2
    return x ^ (x >> 31)


@triton.jit
def _draw_key(words, position):
    """uint64, as `chatserve.model.sampler.draw_keys`."""
    low = tl.load(words + 8).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = tl.load(words + 9).to(tl.uint32, bitcast=True).to(tl.uint64)
    seed = (high << 32) | low
    return _mix(_mix(seed) + (position + 1).to(tl.uint64) * GOLDEN)


@triton.jit
def _random(key, ids):
    """64 random bits a token: SplitMix64 (Steele, Lea and Flood 2014), counting from the key."""
    return _mix(key + (ids + 1).to(tl.uint64) * GOLDEN)


@triton.jit
def _unit(bits):
    """(the upper 52 bits + 1/2) / 2^52, to float32's relative precision however small."""
    high = (bits >> 32).to(tl.uint32).to(tl.float32)
    low = ((bits >> 12) & 0xFFFFF).to(tl.uint32).to(tl.float32)
    return high * 2.0**-32 + (low + 0.5) * 2.0**-52


@triton.jit
def _gumbel(bits):
    """-log(-log(u)) for u of the upper 52 bits.

    Near u = 1, where draws are won, log(u) is a series in v = 1 - u, which the complement of the bits gives exactly:
    -log(1 - v) = 2 artanh(v / (2 - v)).
    """
    v = _unit(~bits)
    s = v / (2.0 - v)
    q = s * s
    series = 1.0 / 13.0
    series = series * q + 1.0 / 11.0
    series = series * q + 1.0 / 9.0
    series = series * q + 1.0 / 7.0
    series = series * q + 1.0 / 5.0
    series = series * q + 1.0 / 3.0
    series = series * q + 1.0
    return -tl.log(tl.where(v < 0.5, 2.0 * s * series, -tl.log(_unit(bits))))


@triton.jit
def _best(noisy, ids):
    """The largest noisy score and its id; of equal ones, the lowest."""
    best = tl.max(noisy, 0)
    return best, tl.min(tl.where(noisy == best, ids, NO_ID), 0)


@triton.jit
def chunk_kernel(
    logits,  # [num_rows, vocab_size]
    rows,  # int32 [num_rows, ROW_WORDS]
    counts,  # int32 [num_slots, vocab_size]
    floats,
    ints,
    maxima,  # float32 [num_rows, num_groups]: of each GROUP tokens, of rows with top-k
    logits_stride,
    vocab_size,
    vocab_stride,
    num_chunks,
    num_groups,
    CHUNK: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    DEPENDS: tl.constexpr,
):
    """What each chunk holds: its largest logit and where; its mass and the first moments of d under it."""
    if DEPENDS:
        gdc_wait()
        gdc_launch_dependents()
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    words = rows + row * ROW_WORDS
    floats += row * FLOATS * num_chunks + chunk
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _logits(logits + row * logits_stride, ids, vocab_size, words, counts, vocab_stride, HAS_COUNTS)
    x = tl.where(x == x, x, float("inf"))
    top, top_id = _best(x, ids)
    tl.store(floats + TOP * num_chunks, top)
    tl.store(ints + row * INTS * num_chunks + TOP_ID * num_chunks + chunk, top_id)
    temperature, inverse = _temper(words)
    if temperature > 0.0:
        base = tl.where(_is_finite(top), top, 0.0)
        d = tl.maximum((x - base) * inverse, FAINT)
        e = tl.exp(tl.minimum(d, 0.0))
        tl.store(floats + MASS * num_chunks, tl.sum(e, 0))
        tl.store(floats + (MASS + 1) * num_chunks, tl.sum(e * d, 0))
        tl.store(floats + (MASS + 2) * num_chunks, tl.sum(e * d * d, 0))
        if tl.load(words + 1) > 0:
            group = tl.max(tl.reshape(x, [CHUNK // GROUP, GROUP]), 1)
            at = chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
            tl.store(maxima + row * num_groups + at, group, mask=at < num_groups)


@triton.jit
def bound_kernel(
    logits,
    rows,
    counts,
    floats,
    maxima,
    agreed,  # float32 [num_rows, AGREED]
    logits_stride,
    vocab_size,
    vocab_stride,
    num_chunks,
    num_groups,
    CHUNK: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    DEPENDS: tl.constexpr,
):
    """What bounds the cut. Top-k: the k-th largest maximum of a group, below which no kept token lies, is the row's
    floor. Top-p alone: the mass above each threshold."""
    if DEPENDS:
        gdc_wait()
        gdc_launch_dependents()
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    words = rows + row * ROW_WORDS
    temperature, inverse = _temper(words)
    if temperature > 0.0:
        floats += row * FLOATS * num_chunks
        top = _top(floats, num_chunks, CHUNKS_PAD)
        if _is_finite(top):
            top_k = tl.load(words + 1)
            top_p = _float_word(words, 2)
            if (top_k > 0) & (top_k < vocab_size):
                if chunk == 0:
                    groups = tl.arange(0, GROUPS_PAD)
                    group = tl.load(maxima + row * num_groups + groups, mask=groups < num_groups, other=-float("inf"))
                    depth = _depth((group - top) * inverse)
                    above, kept = -1, tl.full([], 0x7F800000, tl.int32)  # none; all
                    while kept - above > 1:
                        middle = above + (kept - above) // 2
                        if tl.sum((depth <= middle).to(tl.int32), 0) >= top_k:
                            kept = middle
                        else:
                            above = middle
                    tl.store(agreed + row * AGREED + GUESS, -kept.to(tl.float32, bitcast=True))
            elif top_p < 1.0:
                _, mean, deviation = _mass(floats, top, inverse, num_chunks, CHUNKS_PAD)
                ids = chunk * CHUNK + tl.arange(0, CHUNK)
                row_logits = logits + row * logits_stride
                x = _logits(row_logits, ids, vocab_size, words, counts, vocab_stride, HAS_COUNTS)
                d = (x - top) * inverse
                e = tl.exp(d)
                for index in tl.static_range(THRESHOLDS):
                    threshold = _threshold(index, mean, deviation, top_p)
                    if chunk == 0:
                        tl.store(agreed + row * AGREED + GUESS + index, threshold)
                    above = tl.where(d >= threshold, e, 0.0)
                    tl.store(floats + (ABOVE + index) * num_chunks + chunk, tl.sum(above, 0))


@triton.jit
def _bracket(words, floats, guesses, total, vocab_size, num_chunks, CHUNKS_PAD: tl.constexpr):
    """(low, high, mass at or above high, mass wanted): tokens below low are surely not kept, those at or above high
    surely are. With top-k nothing is sure but the floor, and what top-p and min-p take of the k is found later."""
    chunks = tl.arange(0, CHUNKS_PAD)
    top_k = tl.load(words + 1)
    top_p = _float_word(words, 2)
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
            high = float("inf")
            for index in tl.static_range(THRESHOLDS):
                at = floats + (ABOVE + index) * num_chunks + chunks
                mass = tl.sum(tl.load(at, mask=chunks < num_chunks, other=0.0), 0)
                threshold = tl.load(guesses + index)
                if mass < wanted:
                    high = threshold
                    surely = mass
                else:
                    low = tl.maximum(low, threshold)
        cut = _min_p_cut(words)
        low = tl.maximum(low, cut)
        if cut > high:  # of all that min-p leaves, top-p wants more than there is
            high = cut
    return low, high, surely, wanted


@triton.jit
def _chance(words, total):
    """What a token's weight is multiplied by for the chance above which `draw_kernel` looks at its noise."""
    least = tl.where(_float_word(words, 3) > 0.0, 1.0, total * tl.minimum(_float_word(words, 2), 1.0))
    return 1.0 / tl.maximum(least, 1e-30) * LIKELY


@triton.jit
def _min_p_cut(words):
    min_p = _float_word(words, 3)
    return tl.where(min_p > 0.0, tl.log(tl.maximum(min_p, 1e-37)), -float("inf"))


@triton.jit
def draw_kernel(
    logits,
    rows,
    counts,
    positions,  # int64 [num_rows]
    floats,
    ints,
    agreed,
    open_ids,  # int32 [num_rows, num_chunks, OPEN_PAD]
    open_scores,  # float32, the same
    logits_stride,
    vocab_size,
    vocab_stride,
    num_chunks,
    position_offset,
    CHUNK: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    PART: tl.constexpr,
    OPEN_PAD: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    DEPENDS: tl.constexpr,
):
    """Draw among the tokens that are surely kept, and list those that may be.

    The best of n draws from a row of mass Z is above log(Z) - log(LIKELY) but in exp(-LIKELY) of all cases, and about
    LIKELY of them are. Whether one may be is seen from its random bits and its weight alone (-log(u) >= 1 - u), so noise
    is evaluated in the few parts that hold one; where none was found, the last kernel looks at all.
    """
    if DEPENDS:
        gdc_wait()
        gdc_launch_dependents()
    chunk = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    words = rows + row * ROW_WORDS
    temperature, inverse = _temper(words)
    if temperature > 0.0:
        floats += row * FLOATS * num_chunks
        ints += row * INTS * num_chunks
        top = _top(floats, num_chunks, CHUNKS_PAD)
        if _is_finite(top):
            agreed += row * AGREED
            total, mean, deviation = _mass(floats, top, inverse, num_chunks, CHUNKS_PAD)
            low, high, surely, wanted = _bracket(
                words, floats, agreed + GUESS, total, vocab_size, num_chunks, CHUNKS_PAD
            )
            chance = _chance(words, total)
            if chunk == 0:
                tl.store(agreed + LOW, low)
                tl.store(agreed + HIGH, high)
                tl.store(agreed + SURELY, surely)
                tl.store(agreed + WANTED, wanted)
                tl.store(agreed + CHANCE, chance)
            chance *= 1.0001
            top_k = tl.load(words + 1)
            has_top_k = (top_k > 0) & (top_k < vocab_size)
            key = _draw_key(words, tl.load(positions + row) + position_offset)
            sure, open_best, sure_id, count = -float("inf"), -float("inf"), NO_ID, 0
            chunk_top = tl.load(floats + TOP * num_chunks + chunk)
            if (chunk_top - top) * inverse >= low:
                for first in range(chunk * CHUNK, (chunk + 1) * CHUNK, PART):
                    ids = first + tl.arange(0, PART)
                    row_logits = logits + row * logits_stride
                    x = _logits(row_logits, ids, vocab_size, words, counts, vocab_stride, HAS_COUNTS)
                    d = (x - top) * inverse
                    is_kept = (d >= low) & (ids < vocab_size)
                    is_open = is_kept & (d < high)
                    num_open = tl.sum(is_open.to(tl.int32), 0)
                    if num_open > 0:
                        at = count + tl.cumsum(is_open.to(tl.int32), 0) - 1
                        mask = is_open & (at < OPEN_PAD)
                        at += (row * num_chunks + chunk) * OPEN_PAD
                        tl.store(open_ids + at, ids, mask=mask)
                        tl.store(open_scores + at, d, mask=mask)
                        count += num_open
                    if not has_top_k:
                        bits = _random(key, ids)
                        v = (~bits >> 32).to(tl.uint32).to(tl.float32) * 2.0**-32
                        if tl.max((is_kept & (v <= tl.exp(d) * chance)).to(tl.int32), 0) > 0:
                            noisy = tl.where(is_kept, d + _gumbel(bits), -float("inf"))
                            best, best_id = _best(tl.where(is_open, -float("inf"), noisy), ids)
                            sure_id = tl.where(best > sure, best_id, sure_id)
                            sure = tl.maximum(sure, best)
                            open_best = tl.maximum(open_best, tl.max(tl.where(is_open, noisy, -float("inf")), 0))
            tl.store(floats + SURE * num_chunks + chunk, sure)
            tl.store(floats + OPEN * num_chunks + chunk, open_best)
            tl.store(ints + SURE_ID * num_chunks + chunk, sure_id)
            tl.store(ints + OPEN_COUNT * num_chunks + chunk, count)


@triton.jit
def _open_tokens(
    tile,
    source,
    TILE: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    OPEN_PAD: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
):
    """A tile of the tokens that may be kept: from the chunks' lists, some of each, or of the whole row. d is -inf where
    there is none."""
    whole, logits, words, counts, ints, open_ids, open_scores, top, inverse, vocab_size, vocab_stride, num_chunks = source
    at = tl.arange(0, TILE)
    ids = tile * TILE + at
    d = tl.full([TILE], -float("inf"), tl.float32)
    if whole:
        x = _logits(logits, ids, vocab_size, words, counts, vocab_stride, HAS_COUNTS)
        d = (x - top) * inverse
    else:
        chunk = at // (TILE // CHUNKS_PAD)
        place = tile * (TILE // CHUNKS_PAD) + at % (TILE // CHUNKS_PAD)
        length = tl.load(ints + OPEN_COUNT * num_chunks + chunk, mask=chunk < num_chunks, other=0)
        mask = place < length
        ids = tl.load(open_ids + chunk * OPEN_PAD + place, mask=mask, other=NO_ID)
        d = tl.load(open_scores + chunk * OPEN_PAD + place, mask=mask, other=-float("inf"))
    return ids, d


@triton.jit
def choose_kernel(
    tokens,  # int64 [num_rows]
    logits,
    rows,
    counts,
    positions,
    floats,
    ints,
    agreed,
    open_ids,
    open_scores,
    logits_stride,
    vocab_size,
    vocab_stride,
    num_chunks,
    position_offset,
    TILE: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    OPEN_PAD: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    DEPENDS: tl.constexpr,
):
    """The row's token: its argmax, or its best surely kept draw if that beats all that may be kept, else what is best
    of those after each has shown that it is.

    A token is kept if the weights above it sum to less than is wanted, so the best of all is tested; if it is not kept,
    nothing at or below it is, and the best of those above it is next.
    """
    if DEPENDS:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    words = rows + row * ROW_WORDS
    floats += row * FLOATS * num_chunks
    ints += row * INTS * num_chunks
    logits += row * logits_stride
    open_ids += row * num_chunks * OPEN_PAD
    open_scores += row * num_chunks * OPEN_PAD
    chunks = tl.arange(0, CHUNKS_PAD)
    mask = chunks < num_chunks
    tops = tl.load(floats + TOP * num_chunks + chunks, mask=mask, other=-float("inf"))
    top_ids = tl.load(ints + TOP_ID * num_chunks + chunks, mask=mask, other=NO_ID)
    top, token = _best(tops, top_ids)
    temperature, inverse = _temper(words)
    if (temperature > 0.0) & _is_finite(top):
        top_k = tl.load(words + 1)
        top_p = _float_word(words, 2)
        has_top_k = (top_k > 0) & (top_k < vocab_size)
        agreed += row * AGREED
        low = tl.load(agreed + LOW)
        high = tl.load(agreed + HIGH)
        surely = tl.load(agreed + SURELY)
        wanted = tl.load(agreed + WANTED)
        sures = tl.load(floats + SURE * num_chunks + chunks, mask=mask, other=-float("inf"))
        sure_ids = tl.load(ints + SURE_ID * num_chunks + chunks, mask=mask, other=NO_ID)
        sure, sure_id = _best(sures, sure_ids)
        opens = tl.load(floats + OPEN * num_chunks + chunks, mask=mask, other=-float("inf"))
        open_best = tl.max(opens, 0)
        token = sure_id
        # What is no better than the bound need not be the best of those whose noise was not evaluated.
        unseen = (has_top_k == 0) & (high <= 0.0) & (sure <= -tl.log(tl.load(agreed + CHANCE)))
        if has_top_k | unseen | (sure == -float("inf")) | (open_best > sure):
            lengths = tl.load(ints + OPEN_COUNT * num_chunks + chunks, mask=mask, other=0)
            longest = tl.max(lengths, 0)
            whole = (longest > OPEN_PAD) | unseen
            if unseen:
                high = float("inf")
                surely = 0.0
                sure = -float("inf")
            num_tiles = tl.cdiv(longest, TILE // CHUNKS_PAD)
            if whole:
                num_tiles = tl.cdiv(vocab_size, TILE)
            key = _draw_key(words, tl.load(positions + row) + position_offset)
            source = (
                whole, logits, words, counts, ints, open_ids, open_scores, top, inverse, vocab_size, vocab_stride,
                num_chunks,
            )  # fmt: skip
            if has_top_k:
                # The k-th largest, by halving: `kept` tokens are k or more, those down to `above` fewer.
                first_ids, first_d = _open_tokens(0, source, TILE, CHUNKS_PAD, OPEN_PAD, HAS_COUNTS)
                above, kept = -1, _depth(low)
                while kept - above > 1:
                    middle = above + (kept - above) // 2
                    number = tl.sum((_depth(first_d) <= middle).to(tl.int32), 0)
                    for tile in range(1, num_tiles):
                        ids, d = _open_tokens(tile, source, TILE, CHUNKS_PAD, OPEN_PAD, HAS_COUNTS)
                        number += tl.sum((_depth(d) <= middle).to(tl.int32), 0)
                    if number >= top_k:
                        kept = middle
                    else:
                        above = middle
                    if number == top_k:
                        above = middle - 1
                low = -kept.to(tl.float32, bitcast=True)
                if top_p < 1.0:
                    masses = tl.zeros([TILE], tl.float32)
                    for tile in range(num_tiles):
                        ids, d = _open_tokens(tile, source, TILE, CHUNKS_PAD, OPEN_PAD, HAS_COUNTS)
                        masses += tl.where(d >= low, tl.exp(d), 0.0)
                    wanted = tl.maximum(tl.sum(masses, 0) * top_p, 1e-30)
                low = tl.maximum(low, _min_p_cut(words))
            passed = -float("inf")
            is_open = 1
            while is_open > 0:
                noisy = tl.full([TILE], -float("inf"), tl.float32)
                noisy_ids = tl.full([TILE], NO_ID, tl.int32)
                noisy_d = tl.full([TILE], -float("inf"), tl.float32)
                for tile in range(num_tiles):
                    ids, d = _open_tokens(tile, source, TILE, CHUNKS_PAD, OPEN_PAD, HAS_COUNTS)
                    score = tl.where((d >= low) & (d > passed) & (d < high), d + _gumbel(_random(key, ids)), -float("inf"))
                    is_better = score > noisy
                    noisy = tl.where(is_better, score, noisy)
                    noisy_ids = tl.where(is_better, ids, noisy_ids)
                    noisy_d = tl.where(is_better, d, noisy_d)
                best, best_id = _best(noisy, noisy_ids)
                if best > sure:
                    best_d = tl.max(tl.where((noisy == best) & (noisy_ids == best_id), noisy_d, -float("inf")), 0)
                    mass = 0.0
                    if wanted < float("inf"):
                        masses = tl.zeros([TILE], tl.float32)
                        for tile in range(num_tiles):
                            other_ids, other_d = _open_tokens(tile, source, TILE, CHUNKS_PAD, OPEN_PAD, HAS_COUNTS)
                            masses += tl.where((other_d > best_d) & (other_d < high), tl.exp(other_d), 0.0)
                        mass = surely + tl.sum(masses, 0)
                    if mass < wanted:
                        token = best_id
                        is_open = 0
                    else:
                        passed = best_d
                else:
                    is_open = 0
    tl.store(tokens + row, token.to(tl.int64))
    if HAS_COUNTS:
        slot = tl.load(words + 7)
        if slot >= 0:
            at = counts + slot.to(tl.int64) * vocab_stride + token
            tl.store(at, (tl.load(at) | 1) + 2)
