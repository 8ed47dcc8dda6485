"""Conversations through engines that leave a snapshot to each other."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import pytest

from chatserve.cache import snapshot_files
from chatserve.cache.snapshot import Manifest, decode_manifest
from chatserve.engine.engine import Engine
from chatserve.types import UserId
from tests.fakes.engines import Transcript, make_engine, make_submit, run_until_idle
from tests.fakes.fake_runner import FakeRunner

ANN, BOB = UserId("ann"), UserId("bob")

SYSTEM = list(range(60, 71))  # 11 tokens: the shared prefix ends inside a block


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50) for _ in range(num_tokens)]


def make_runner(num_blocks: int = 64, num_host_blocks: int = 64) -> FakeRunner:
    return FakeRunner(num_blocks=num_blocks, num_host_blocks=num_host_blocks, block_size=4)


class Talk:
    """Conversations through one engine, each compared with what an engine without any cache says."""

    def __init__(self, directory: Path, runner: FakeRunner | None = None, **options: Any) -> None:
        self.runner = runner or make_runner()
        self.engine: Engine = make_engine(self.runner, kv_snapshot=directory, **options)
        self.transcript = Transcript()
        self.count = 0

    def say(self, prompt: list[int], user: UserId = ANN, *, shared: int = 0, max_tokens: int = 8) -> list[int]:
        """One turn from its prompt; the whole sequence after it."""
        name = self.ask(prompt, user, shared=shared, max_tokens=max_tokens)
        run_until_idle(self.engine, self.transcript)
        text = self.transcript.text(name)
        assert text == self.runner.oracle(prompt, make_submit("x", (1,)).sampling, num_output_tokens=max_tokens)
        return prompt + text

    def ask(self, prompt: list[int], user: UserId = ANN, *, shared: int = 0, max_tokens: int = 8) -> str:
        self.count += 1
        name = f"r{self.count}"
        submit = make_submit(name, prompt, user=user, num_shared_tokens=shared, max_tokens=max_tokens)
        self.engine.handle(submit)
        return name

    def computed(self) -> int:
        """Prompt tokens that the last turn had to compute."""
        return self.transcript.started[f"r{self.count}"].computed_tokens

    def end(self) -> None:
        self.engine.save_snapshot()
        self.engine.check()


def manifest_of(directory: Path) -> Manifest:
    return decode_manifest((directory / snapshot_files.MANIFEST_NAME).read_bytes())


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
