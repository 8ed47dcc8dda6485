"""The first three kernels of `sampling.sample_tokens`, one program for each row and chunk of CHUNK tokens.

Chunks are the same whatever the batch, so sums are in the same order in every batch, and so is the result, to the last
bit. `sampling_row` has the notation.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from chatserve_kernels.sampling_noise import (
    draw_key,
    gumbel_noise,
    least_complement,
    unfinished_bits,
)
from chatserve_kernels.sampling_row import (
    ABOVE,
    AGREED,
    CHANCE,
    FAINT,
    FLOATS,
    GROUP,
    GUESS,
    HIGH,
    INTS,
    LOG2_E,
    LOW,
    MASS,
    NO_ID,
    OPEN,
    OPEN_COUNT,
    ROW_WORDS,
    SURE,
    SURE_ID,
    SURELY,
    TOP,
    TOP_ID,
    WANTED,
    bracket,
    depth_of,
    exp2,
    first_largest,
    float_setting,
    inverse_temperature,
    is_finite,
    largest,
    noise_chance,
    penalised_logits,
    top_p_threshold,
    total_mass,
)

STAGES = tl.constexpr(4)
"""Parts of a chunk that are on their way while one is worked on."""


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
    row = tl.program_id(1).to(tl.int64)
    words = rows + row * ROW_WORDS
    logits += row * logits_stride
    floats += row * FLOATS * num_chunks
    ints += row * INTS * num_chunks
    maxima += row * num_groups
    temperature, inverse = inverse_temperature(words)
    top_k = tl.load(words + 1)
    for chunk in range(tl.program_id(0), num_chunks, tl.num_programs(0)):
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        x = penalised_logits(logits, ids, vocab_size, words, counts, vocab_stride, HAS_COUNTS)
        x = tl.where(x == x, x, float("inf"))  # noqa: PLR0124 - NaN is not equal to itself
        top = tl.max(x, 0)
        tl.store(floats + TOP * num_chunks + chunk, top)
        if (temperature <= 0.0) | (not is_finite(top)):  # a row whose largest is infinite is as greedy
            tl.store(ints + TOP_ID * num_chunks + chunk, tl.min(tl.where(x == top, ids, NO_ID), 0))
        if temperature > 0.0:
            base = tl.where(is_finite(top), top, 0.0)
            d = tl.maximum((x - base) * inverse, FAINT)
            e = exp2(tl.minimum(d, 0.0))
            tl.store(floats + MASS * num_chunks + chunk, tl.sum(e, 0))
            tl.store(floats + (MASS + 1) * num_chunks + chunk, tl.sum(e * d, 0))
            tl.store(floats + (MASS + 2) * num_chunks + chunk, tl.sum(e * d * d, 0))
            if top_k > 0:
                group = tl.max(tl.reshape(x, [CHUNK // GROUP, GROUP]), 1)
                at = chunk * (CHUNK // GROUP) + tl.arange(0, CHUNK // GROUP)
                tl.store(maxima + at, group, mask=at < num_groups)


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
    STEP: tl.constexpr,
    GROUPS_PAD: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    DEPENDS: tl.constexpr,
):
    """What bounds the cut. Top-k: the k-th largest maximum of a group, below which no kept token lies, is the row's
    floor. Top-p alone: the mass above each threshold."""
    if DEPENDS:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    words = rows + row * ROW_WORDS
    temperature, inverse = inverse_temperature(words)
    if temperature > 0.0:
        floats += row * FLOATS * num_chunks
        top = largest(floats, num_chunks, CHUNKS_PAD)
        if is_finite(top):
            top_k = tl.load(words + 1)
            top_p = float_setting(words, 2)
            if (top_k > 0) & (top_k < vocab_size):
                if tl.program_id(0) == 0:
                    groups = tl.arange(0, GROUPS_PAD)
                    group = tl.load(maxima + row * num_groups + groups, mask=groups < num_groups, other=-float("inf"))
                    depth = depth_of((group - top) * inverse)
                    above, kept = -1, tl.full([], 0x7F800000, tl.int32)  # none; all
                    while kept - above > 1:
                        middle = above + (kept - above) // 2
                        if tl.sum((depth <= middle).to(tl.int32), 0) >= top_k:
                            kept = middle
                        else:
                            above = middle
                    tl.store(agreed + row * AGREED + GUESS, -kept.to(tl.float32, bitcast=True))
            elif top_p < 1.0:
                _total, mean, deviation = total_mass(floats, top, inverse, num_chunks, CHUNKS_PAD)
                threshold_0 = top_p_threshold(0, mean, deviation, top_p)
                threshold_1 = top_p_threshold(1, mean, deviation, top_p)
                threshold_2 = top_p_threshold(2, mean, deviation, top_p)
                threshold_3 = top_p_threshold(3, mean, deviation, top_p)
                threshold_4 = top_p_threshold(4, mean, deviation, top_p)
                if tl.program_id(0) == 0:
                    at = agreed + row * AGREED + GUESS
                    tl.store(at, threshold_0)
                    tl.store(at + 1, threshold_1)
                    tl.store(at + 2, threshold_2)
                    tl.store(at + 3, threshold_3)
                    tl.store(at + 4, threshold_4)
                row_logits = logits + row * logits_stride
                for chunk in range(tl.program_id(0), num_chunks, tl.num_programs(0)):
                    above_0 = tl.zeros([STEP], tl.float32)
                    above_1 = tl.zeros([STEP], tl.float32)
                    above_2 = tl.zeros([STEP], tl.float32)
                    above_3 = tl.zeros([STEP], tl.float32)
                    above_4 = tl.zeros([STEP], tl.float32)
                    for first in tl.range(chunk * CHUNK, (chunk + 1) * CHUNK, STEP, num_stages=STAGES):
                        ids = first + tl.arange(0, STEP)
                        x = penalised_logits(row_logits, ids, vocab_size, words, counts, vocab_stride, HAS_COUNTS)
                        d = (x - top) * inverse
                        e = exp2(d)
                        above_0 += tl.where(d >= threshold_0, e, 0.0)
                        above_1 += tl.where(d >= threshold_1, e, 0.0)
                        above_2 += tl.where(d >= threshold_2, e, 0.0)
                        above_3 += tl.where(d >= threshold_3, e, 0.0)
                        above_4 += tl.where(d >= threshold_4, e, 0.0)
                    at = floats + ABOVE * num_chunks + chunk
                    tl.store(at, tl.sum(above_0, 0))
                    tl.store(at + num_chunks, tl.sum(above_1, 0))
                    tl.store(at + 2 * num_chunks, tl.sum(above_2, 0))
                    tl.store(at + 3 * num_chunks, tl.sum(above_3, 0))
                    tl.store(at + 4 * num_chunks, tl.sum(above_4, 0))


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
    """Draw among the tokens that are surely kept, and list those in doubt: with top-k all, else such as may win.

    The best of n draws from a row of mass Z is above log(Z) - log(LIKELY) but in exp(-LIKELY) of all cases, and about
    LIKELY of them are. Whether one may be is seen from its random bits and its weight alone (-log(u) >= 1 - u), so the
    noise is worked out in the few parts that hold one; where none was found, the last kernel looks at all.
    """
    if DEPENDS:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(1).to(tl.int64)
    words = rows + row * ROW_WORDS
    temperature, inverse = inverse_temperature(words)
    if temperature > 0.0:
        floats += row * FLOATS * num_chunks
        ints += row * INTS * num_chunks
        top = largest(floats, num_chunks, CHUNKS_PAD)
        if is_finite(top):
            agreed += row * AGREED
            total, _mean, _deviation = total_mass(floats, top, inverse, num_chunks, CHUNKS_PAD)
            low, high, surely, wanted = bracket(
                words, floats, agreed + GUESS, total, vocab_size, num_chunks, CHUNKS_PAD
            )
            chance = noise_chance(words, total)
            if tl.program_id(0) == 0:
                tl.store(agreed + LOW, low)
                tl.store(agreed + HIGH, high)
                tl.store(agreed + SURELY, surely)
                tl.store(agreed + WANTED, wanted)
                tl.store(agreed + CHANCE, chance)
            chance *= 1.0001 * 2.0**32
            top_k = tl.load(words + 1)
            has_top_k = (top_k > 0) & (top_k < vocab_size)
            key = draw_key(words, tl.load(positions + row) + position_offset)
            row_logits = logits + row * logits_stride
            for chunk in range(tl.program_id(0), num_chunks, tl.num_programs(0)):
                sure, open_best, sure_id, count = -float("inf"), -float("inf"), NO_ID, 0
                list_start = (row * num_chunks + chunk) * OPEN_PAD
                chunk_top = tl.load(floats + TOP * num_chunks + chunk)
                if (chunk_top - top) * inverse >= low:
                    # A bit a part, in each lane: the loop over all tokens has no sum between lanes, and no branch.
                    flags = tl.zeros([PART], tl.int32)
                    for part in tl.range(CHUNK // PART, num_stages=STAGES):
                        ids = chunk * CHUNK + part * PART + tl.arange(0, PART)
                        x = penalised_logits(row_logits, ids, vocab_size, words, counts, vocab_stride, HAS_COUNTS)
                        d = (x - top) * inverse
                        matters = least_complement(unfinished_bits(key, ids)) <= exp2(d) * chance
                        matters = (matters | has_top_k) & (d >= low) & (ids < vocab_size)
                        flags |= tl.where(matters, 1 << part, 0)
                    left = tl.max(flags, 0)
                    while left > 0:
                        # The highest bit of the largest is that of a part to look at: the exponent of it as a float.
                        part = (left.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
                        ids = chunk * CHUNK + part * PART + tl.arange(0, PART)
                        x = penalised_logits(row_logits, ids, vocab_size, words, counts, vocab_stride, HAS_COUNTS)
                        d = (x - top) * inverse
                        matters = (flags >> part) & 1 > 0
                        is_open = matters & (d < high)
                        num_open = tl.sum(is_open.to(tl.int32), 0)
                        if num_open > 0:
                            at = count + tl.cumsum(is_open.to(tl.int32), 0) - 1
                            mask = is_open & (at < OPEN_PAD)
                            tl.store(open_ids + list_start + at, ids, mask=mask)
                            tl.store(open_scores + list_start + at, d, mask=mask)
                            count += num_open
                        if not has_top_k:
                            noisy = d + gumbel_noise(unfinished_bits(key, ids)) * LOG2_E
                            noisy = tl.where(matters, noisy, -float("inf"))
                            best, best_id = first_largest(tl.where(is_open, -float("inf"), noisy), ids)
                            sure_id = tl.where(best > sure, best_id, sure_id)
                            sure = tl.maximum(sure, best)
                            open_best = tl.maximum(open_best, tl.max(tl.where(is_open, noisy, -float("inf")), 0))
                        flags &= ~(1 << part)
                        left = tl.max(flags, 0)
                tl.store(floats + SURE * num_chunks + chunk, sure)
                tl.store(floats + OPEN * num_chunks + chunk, open_best)
                tl.store(ints + SURE_ID * num_chunks + chunk, sure_id)
                tl.store(ints + OPEN_COUNT * num_chunks + chunk, count)
