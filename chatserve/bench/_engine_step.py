"""How long a step of the engine takes that gives each of many sessions a token: the measure of others' work a step."""

from __future__ import annotations

import random
import statistics
from typing import Final

from chatserve.bench.decode import time_runner
from chatserve.config import EngineSettings
from chatserve.model import catalog
from chatserve.model.runner import build_runner
from chatserve.supervisor.paths import default_cache_dir

_CONTEXT: Final = 16
"""Tokens before the ones that are timed: few, because longer ones take longer, and the step is to be no excuse."""
_NUM_TOKENS: Final = 6


def time_step(num_sessions: int, model: str, device: str) -> float:
    """Seconds, the median of a few steps."""
    runner = build_runner(
        EngineSettings(
            model_dir=catalog.pull(model, default_cache_dir()),
            model_name=model,
            device=device,
            kv_cache_memory=f"{num_sessions * (_CONTEXT + _NUM_TOKENS) // 8 + 64}blocks",
            host_cache_memory="0",
        )
    )
    chance = random.Random(0)
    prompts = [[chance.randrange(runner.vocab_size) for _ in range(_CONTEXT)] for _ in range(num_sessions)]
    return statistics.median(time_runner(runner, prompts, _NUM_TOKENS)[1])
