"""The default model over 8-bit KV says nearly what it says over float32: a bound on what rounding costs."""

from __future__ import annotations

import pytest
import torch

from chatserve.bench.equality import encode_prompts
from chatserve.model import catalog
from chatserve.model.kv_dtype import FP8
from chatserve.model.loader import load_model
from chatserve.supervisor.paths import default_cache_dir
from tests.model.tiny import Paged

NUM_PROMPTS = 6


@pytest.mark.model
@pytest.mark.timeout(600)
def test_rounding_to_8_bits_moves_few_choices() -> None:
    """Of the next token after each token of some prompts. Keys and values are all rounded, also the prompt's own."""
    directory = catalog.pull(catalog.DEFAULT_MODEL, default_cache_dir())
    prompts = encode_prompts(directory, NUM_PROMPTS)
    model, _ = load_model(directory, torch.device("cpu"), "llama", "float32")
    over = {}
    for dtype in (torch.float32, torch.bfloat16, FP8):
        paged = Paged(model, block_size=16, num_blocks=NUM_PROMPTS * 8, kv_dtype=dtype)
        rows = [(str(index), ids, len(ids)) for index, ids in enumerate(prompts)]
        over[dtype] = torch.cat(paged.step(rows)).double().log_softmax(-1)
    exact = over.pop(torch.float32)
    divergence = {dtype: float((exact.exp() * (exact - rounded)).sum(-1).mean()) for dtype, rounded in over.items()}
    same = {dtype: float((exact.argmax(-1) == rounded.argmax(-1)).float().mean()) for dtype, rounded in over.items()}
    print(f"{len(exact)} tokens; Kullback-Leibler divergence {divergence}, same choice {same}")  # noqa: T201 - for the reader
    assert 0 <= divergence[torch.bfloat16] < divergence[FP8] < 0.05
    assert same[FP8] > 0.9
