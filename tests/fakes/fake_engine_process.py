"""The engine's real process around a `FakeRunner`: `python -m tests.fakes.fake_engine_process --settings JSON`.

For tests of processes, sockets and deaths that need no model. With CHATSERVE_TEST_GATE naming a FIFO, each step first
reads one byte from it, so that a test decides how far the engine gets.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from chatserve.config import EngineSettings
from chatserve.engine.process import read_settings, serve, start_logging
from chatserve.sched.plan import StepPlan
from tests.fakes.fake_runner import FakeRunner


def build_runner(settings: EngineSettings) -> FakeRunner:
    num_blocks = int(settings.kv_cache_memory.removesuffix("blocks") if settings.kv_cache_memory != "auto" else 256)
    num_host = int(settings.host_cache_memory.removesuffix("blocks") if settings.host_cache_memory != "auto" else 256)
    gate = None
    if "CHATSERVE_TEST_GATE" in os.environ:
        fifo = Path(os.environ["CHATSERVE_TEST_GATE"]).open("rb", buffering=0)  # noqa: SIM115 - as long as we live

        def gate(plan: StepPlan) -> None:
            fifo.read(1)

    runner = FakeRunner(
        num_blocks=num_blocks,
        num_host_blocks=num_host,
        block_size=settings.block_size,
        context_tokens=settings.context_tokens or 1_000_000,
        gate=gate,
    )
    runner.keep_plans = False
    return runner


if __name__ == "__main__":
    start_logging()
    sys.exit(serve(read_settings(), build_runner))
