"""Sampling 128,256 logits a row: time, and the bytes of the logits, read once, over that time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from chatserve_kernels.bench.tables import DTYPE, Bench, Row, free, table
from chatserve_kernels.sampling import SamplingWorkspace, greedy_rows, sample_tokens, to_words

if TYPE_CHECKING:
    from collections.abc import Iterator

VOCAB_SIZE = 128_256
SETTINGS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "unfiltered": {},
    "top-p 0.95": {"top_p": 0.95},
    "top-k 50": {"top_k": 50},
    "top-k 20, top-p 0.95": {"top_k": 20, "top_p": 0.95},
    "min-p 0.05": {"min_p": 0.05},
}


@table("sampling")
def measure(bench: Bench) -> Iterator[Row]:
    """Of many rows and of one."""
    for num_rows in (256, 1):
        yield from _measure(bench, num_rows)
    free()


def _measure(bench: Bench, num_rows: int) -> Iterator[Row]:
    """A row for each of `SETTINGS`, on logits that are normal (which leaves tens of thousands of tokens to draw from)
    and ones with a head and a long tail (hundreds)."""
    normal = torch.randn(num_rows, VOCAB_SIZE, device="cuda")
    ranks = torch.rand(num_rows, VOCAB_SIZE, device="cuda").argsort(1) + 1
    workspace = SamplingWorkspace(num_rows, VOCAB_SIZE, torch.device("cuda"))
    positions = torch.arange(num_rows, device="cuda")
    out = torch.empty(num_rows, dtype=torch.int64, device="cuda")
    for name, scores in (("normal", normal), ("long tail", 0.1 * normal - 1.1 * ranks.log())):
        for dtype in (DTYPE, torch.float32):
            logits = scores.to(dtype)
            for label, fields in SETTINGS.items():
                rows = greedy_rows(num_rows)
                rows["temperature"] = 0.8
                rows["seed"] = np.arange(num_rows)
                for field, value in fields.items():
                    rows[field] = value
                words = to_words(rows).cuda()
                us = bench.us(
                    lambda logits=logits, words=words: sample_tokens(logits, words, positions, workspace, out=out)
                )
                work = f"{label}, {num_rows} rows, {name}, {str(dtype).removeprefix('torch.')}"
                yield Row("sampling", work, us, bytes=logits.nbytes)
