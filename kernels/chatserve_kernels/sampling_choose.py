"""The last kernel of `sampling.sample_tokens`: one program a row says which token it is."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from chatserve_kernels.sampling_noise import (
    draw_key,
    gumbel_noise,
    unfinished_bits,
)
from chatserve_kernels.sampling_row import (
    AGREED,
    CHANCE,
    FLOATS,
    HIGH,
    INTS,
    LOG2_E,
    LOW,
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
    depth_of,
    exp2,
    first_largest,
    float_setting,
    inverse_temperature,
    is_finite,
    min_p_cut,
    penalised_logits,
)


@triton.jit
def _open_tokens(
    tile,
    whole,
    source,
    TILE: tl.constexpr,
    CHUNKS_PAD: tl.constexpr,
    OPEN_PAD: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
):
    """A tile of the tokens in doubt: of the chunks' lists, some of each, or the row; d is -inf where there is none."""
    logits, words, counts, ints, open_ids, open_scores, top, inverse, vocab_size, vocab_stride, num_chunks = source
    at = tl.arange(0, TILE)
    ids = tile * TILE + at
    d = tl.full([TILE], -float("inf"), tl.float32)
    if whole:
        x = penalised_logits(logits, ids, vocab_size, words, counts, vocab_stride, HAS_COUNTS)
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
    top, token = first_largest(tops, top_ids)
    temperature, inverse = inverse_temperature(words)
    if (temperature > 0.0) & is_finite(top):
        top_k = tl.load(words + 1)
        top_p = float_setting(words, 2)
        has_top_k = (top_k > 0) & (top_k < vocab_size)
        agreed += row * AGREED
        low = tl.load(agreed + LOW)
        high = tl.load(agreed + HIGH)
        surely = tl.load(agreed + SURELY)
        wanted = tl.load(agreed + WANTED)
        sures = tl.load(floats + SURE * num_chunks + chunks, mask=mask, other=-float("inf"))
        sure_ids = tl.load(ints + SURE_ID * num_chunks + chunks, mask=mask, other=NO_ID)
        sure, sure_id = first_largest(sures, sure_ids)
        opens = tl.load(floats + OPEN * num_chunks + chunks, mask=mask, other=-float("inf"))
        open_best = tl.max(opens, 0)
        token = sure_id
        # What is no better than the bound need not be the best of those whose noise was not worked out.
        bound = -tl.log2(tl.load(agreed + CHANCE))
        if has_top_k | (sure <= bound) | (open_best > sure):
            lengths = tl.load(ints + OPEN_COUNT * num_chunks + chunks, mask=mask, other=0)
            longest = tl.max(lengths, 0)
            row_tiles = tl.cdiv(vocab_size, TILE)
            num_tiles = tl.cdiv(longest, TILE // CHUNKS_PAD)
            whole = longest > OPEN_PAD
            if whole:
                num_tiles = row_tiles
            key = draw_key(words, tl.load(positions + row) + position_offset)
            source = (
                logits,
                words,
                counts,
                ints,
                open_ids,
                open_scores,
                top,
                inverse,
                vocab_size,
                vocab_stride,
                num_chunks,
            )
            if has_top_k:
                # The k-th largest, by halving: `kept` tokens are k or more, those down to `above` fewer.
                _first_ids, first_d = _open_tokens(0, whole, source, TILE, CHUNKS_PAD, OPEN_PAD, HAS_COUNTS)
                above, kept = -1, depth_of(low)
                while kept - above > 1:
                    middle = above + (kept - above) // 2
                    number = tl.sum((depth_of(first_d) <= middle).to(tl.int32), 0)
                    for tile in range(1, num_tiles):
                        ids, d = _open_tokens(tile, whole, source, TILE, CHUNKS_PAD, OPEN_PAD, HAS_COUNTS)
                        number += tl.sum((depth_of(d) <= middle).to(tl.int32), 0)
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
                        ids, d = _open_tokens(tile, whole, source, TILE, CHUNKS_PAD, OPEN_PAD, HAS_COUNTS)
                        masses += tl.where(d >= low, exp2(d), 0.0)
                    wanted = tl.maximum(tl.sum(masses, 0) * top_p, 1e-30)
                low = tl.maximum(low, min_p_cut(words))
            passed = -float("inf")
            is_open = 1
            while is_open > 0:
                noisy = tl.full([TILE], -float("inf"), tl.float32)
                noisy_ids = tl.full([TILE], NO_ID, tl.int32)
                noisy_d = tl.full([TILE], -float("inf"), tl.float32)
                for tile in range(num_tiles):
                    ids, d = _open_tokens(tile, whole, source, TILE, CHUNKS_PAD, OPEN_PAD, HAS_COUNTS)
                    score = tl.where(
                        (d >= low) & (d > passed) & (d < high),
                        d + gumbel_noise(unfinished_bits(key, ids)) * LOG2_E,
                        -float("inf"),
                    )
                    is_better = score > noisy
                    noisy = tl.where(is_better, score, noisy)
                    noisy_ids = tl.where(is_better, ids, noisy_ids)
                    noisy_d = tl.where(is_better, d, noisy_d)
                best, best_id = first_largest(noisy, noisy_ids)
                if (not has_top_k) & (not whole) & (tl.maximum(best, sure) <= bound):
                    whole = True
                    num_tiles = row_tiles
                    if sure <= bound:
                        sure = -float("inf")
                        high = float("inf")
                        surely = 0.0
                elif best > sure:
                    best_d = tl.max(tl.where((noisy == best) & (noisy_ids == best_id), noisy_d, -float("inf")), 0)
                    mass = 0.0
                    if wanted < float("inf"):
                        # With top-k the lists hold all that counts; else they hold only what may win.
                        masses = tl.zeros([TILE], tl.float32)
                        for tile in range(num_tiles if has_top_k else row_tiles):
                            _other_ids, other_d = _open_tokens(
                                tile, whole | (not has_top_k), source, TILE, CHUNKS_PAD, OPEN_PAD, HAS_COUNTS
                            )
                            masses += tl.where((other_d > best_d) & (other_d < high), exp2(other_d), 0.0)
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
