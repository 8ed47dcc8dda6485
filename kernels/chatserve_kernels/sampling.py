"""Choosing the next token of every row of a batch, on the device, without a sort and without the host.

    x   = logits after repetition, presence and frequency penalties
    d   = (x - max x) / temperature
    kept: d is among the top_k largest; of those, the larger ones sum to less than top_p of their softmax; and
          exp(d) >= min_p.  Ties with the last token kept are kept.
    token = argmax over the kept of d + Gumbel noise             (the Gumbel-max trick: exactly softmax of the kept)

This is `chatserve.model.sampler`'s definition, with its random numbers: SplitMix64 counting from (seed, position) by
token id. So a row's token depends on its own logits, settings, seed and position, to the last bit, in any batch, and is
the one that the CPU draws unless the two best noisy scores are within rounding of each other. Temperature 0 takes the
lowest id of the largest logits. NaN counts as +inf, and a row whose largest is infinite, either way, as greedy.

Four launches with a fixed grid, so a captured graph serves greedy and drawn rows and any settings (see
`sampling_kernels`):

1. maxima, masses and moments of chunks of 4,096 tokens;
2. the mass above six guesses of top-p's cut (made from mean and deviation), or the floor of top-k;
3. the best draw of the tokens that are above all doubt, and a list of those between the two guesses around the cut;
4. a program a row: unless the best draw of step 3 is better than all in doubt, the best of these is tested until one is
   kept, which takes one or two sums over the list. Top-k's cut is found exactly in its list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
import triton

from chatserve_kernels.early_launch import can_launch_early, early_launch
from chatserve_kernels.sampling_choose import choose_kernel
from chatserve_kernels.sampling_kernels import bound_kernel, chunk_kernel, draw_kernel
from chatserve_kernels.sampling_row import AGREED, FLOATS, GROUP, INTS, ROW_WORDS

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROW = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("count_slot", np.int32),
        ("seed", np.int64),
    ]
)
"""One row's settings. top_k 0, top_p 1 and min_p 0 are off; count_slot -1: no penalties."""

CHUNK = 4096
STEP = PART = 512
"""Tokens that the loops over a chunk take at a time: of the second kernel, and of the third."""
OPEN_PER_CHUNK = 1024
"""Tokens in doubt that a chunk's list holds; a row with more is searched as a whole, which is slower."""
TILE = 4096
PROGRAMS = 2112
"""Of the kernels that go by chunks, in all; at least one a row, at most one a chunk."""
NUM_WARPS = {"chunk": 4, "bound": 4, "draw": 4, "choose": 8}


def greedy_rows(num_rows: int) -> NDArray[np.void]:
    """`ROW` [num_rows], all greedy and without penalties; what a graph's padding rows should be."""
    rows = np.zeros(num_rows, ROW)
    rows["top_p"] = rows["repetition_penalty"] = 1.0
    rows["count_slot"] = -1
    return rows


def to_words(rows: NDArray[np.void]) -> torch.Tensor:
    """`ROW` [num_rows] as int32 [num_rows, 10], the same memory, to be copied to the device."""
    if rows.dtype != ROW or rows.ndim != 1:
        raise ValueError(f"expected rows of sampling.ROW, got {rows.dtype} of shape {rows.shape}")
    return torch.from_numpy(rows.view(np.int32).reshape(len(rows), ROW_WORDS.value))


def count_tokens(token_ids: torch.Tensor, num_prompt: int, vocab_size: int) -> torch.Tensor:
    """A slot of `counts`, int32 [vocab_size], of one sequence: its prompt, then its output, int64 [num_tokens].

    Bit 0: the token is in the sequence; the rest: how often it is in the output. `sample_tokens` adds what it samples.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int32, device=token_ids.device)
    output = token_ids[num_prompt:]
    counts.scatter_add_(0, output, torch.full_like(output, 2, dtype=torch.int32))
    counts[token_ids] |= 1
    return counts


class SamplingWorkspace:
    """Scratch of `sample_tokens` for up to `max_rows` rows: 280 KB a row of 128,256 tokens. One sampling at a time."""

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self.vocab_size = vocab_size
        # A vocabulary shorter than a chunk is one chunk, of a power of two.
        self.chunk = max(GROUP.value, min(CHUNK, triton.next_power_of_2(vocab_size)))
        self.num_chunks = triton.cdiv(vocab_size, self.chunk)
        self.num_groups = triton.cdiv(vocab_size, GROUP.value)
        self.open_pad = min(OPEN_PER_CHUNK, self.chunk)
        assert self.chunk <= 16 * PART, "a lane has 16 bits for the parts of its chunk"

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty((max_rows, *shape), dtype=dtype, device=device)

        self.floats = empty(FLOATS.value, self.num_chunks)
        self.ints = empty(INTS.value, self.num_chunks, dtype=torch.int32)
        self.maxima = empty(self.num_groups)
        self.agreed = empty(AGREED.value)
        self.open_ids = empty(self.num_chunks, self.open_pad, dtype=torch.int32)
        self.open_scores = empty(self.num_chunks, self.open_pad)


def chunk_constants(space: SamplingWorkspace) -> dict[str, int]:
    """The sizes that are compiled in."""
    chunks_pad = triton.next_power_of_2(space.num_chunks)
    return {
        "CHUNK": space.chunk,
        "CHUNKS_PAD": chunks_pad,
        "GROUPS_PAD": triton.next_power_of_2(space.num_groups),
        "STEP": min(STEP, space.chunk),
        "PART": min(PART, space.chunk),
        "OPEN_PAD": space.open_pad,
        "TILE": max(chunks_pad, min(TILE, space.chunk)),
    }


def sample_tokens(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    workspace: SamplingWorkspace,
    *,
    counts: torch.Tensor | None = None,
    position_offset: int = 0,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Token ids, int64 [num_rows], by `rows` [num_rows, 10] (`to_words`) on the device.

    `logits` [num_rows, vocab_size], float32, float16 or bfloat16, are only read. Row i's new token takes the place
    `positions[i] + position_offset` in its sequence, int64 [num_rows]. `counts` int32 [num_slots, vocab_size] are
    needed if any row's count_slot is not -1; the row's slot then counts the token that was sampled.

    Raises:
        ValueError: shapes, types or strides that the kernels cannot use.
    """
    num_rows, vocab_size = logits.shape
    _check(logits, rows, positions, workspace, counts)
    if out is None:
        out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    elif out.shape != (num_rows,) or out.dtype != torch.int64 or not out.is_contiguous():
        raise ValueError(f"expected a contiguous int64 out [{num_rows}], got {out.dtype} {list(out.shape)}")
    if not num_rows:
        return out
    space = workspace
    count_slots = space.ints if counts is None else counts
    sizes = (logits.stride(0), vocab_size, count_slots.stride(0), space.num_chunks)
    constants = chunk_constants(space)
    options = {"HAS_COUNTS": counts is not None, "DEPENDS": can_launch_early(logits.device)}
    options |= early_launch(logits.device)
    # Each program prepares its row before its chunks, so there are no more programs than keep the device busy.
    programs_a_row = max(1, min(space.num_chunks, triton.cdiv(PROGRAMS, num_rows)))
    grid = (programs_a_row, num_rows)
    chunk_kernel[grid](
        logits,
        rows,
        count_slots,
        space.floats,
        space.ints,
        space.maxima,
        *sizes,
        space.num_groups,
        **_of(chunk_kernel, constants),
        **options,
        num_warps=NUM_WARPS["chunk"],
    )
    bound_kernel[grid](
        logits,
        rows,
        count_slots,
        space.floats,
        space.maxima,
        space.agreed,
        *sizes,
        space.num_groups,
        **_of(bound_kernel, constants),
        **options,
        num_warps=NUM_WARPS["bound"],
    )
    draw_kernel[grid](
        logits,
        rows,
        count_slots,
        positions,
        space.floats,
        space.ints,
        space.agreed,
        space.open_ids,
        space.open_scores,
        *sizes,
        position_offset,
        **_of(draw_kernel, constants),
        **options,
        num_warps=NUM_WARPS["draw"],
    )
    choose_kernel[(num_rows,)](
        out,
        logits,
        rows,
        count_slots,
        positions,
        space.floats,
        space.ints,
        space.agreed,
        space.open_ids,
        space.open_scores,
        *sizes,
        position_offset,
        **_of(choose_kernel, constants),
        **options,
        num_warps=NUM_WARPS["choose"],
    )
    return out


def _of(kernel: triton.JITFunction, constants: dict[str, int]) -> dict[str, int]:
    return {name: value for name, value in constants.items() if name in kernel.arg_names}


def _check(
    logits: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    workspace: SamplingWorkspace,
    counts: torch.Tensor | None,
) -> None:
    num_rows, vocab_size = logits.shape
    if num_rows > workspace.max_rows or vocab_size != workspace.vocab_size:
        limits = f"{workspace.max_rows} rows of {workspace.vocab_size} tokens"
        raise ValueError(f"expected logits of at most {limits}, got {num_rows} of {vocab_size}")
    if logits.stride(1) != 1:
        raise ValueError("expected a stride of 1 along the vocabulary")
    if rows.shape != (num_rows, ROW_WORDS.value) or rows.dtype != torch.int32 or not rows.is_contiguous():
        expected = [num_rows, ROW_WORDS.value]
        raise ValueError(f"expected contiguous int32 rows {expected}, got {rows.dtype} {list(rows.shape)}")
    if positions.shape != (num_rows,) or positions.dtype != torch.int64 or not positions.is_contiguous():
        raise ValueError(f"expected int64 positions [{num_rows}], got {positions.dtype} {list(positions.shape)}")
    if counts is not None and (
        counts.dtype != torch.int32 or counts.ndim != 2 or counts.shape[1] != vocab_size or counts.stride(1) != 1
    ):
        raise ValueError(f"expected int32 counts of {vocab_size} tokens, got {counts.dtype} {list(counts.shape)}")
