"""An engine's process with made-up weights, and a client that times what comes out of it.

Random token ids and random weights of a model's shape time like real ones; what is measured goes through the engine's
own client, sockets included, as a web worker would see it.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import re
import sys
import time
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from chatserve.config import EngineSettings, hand_over_settings
from chatserve.engine.client import EngineClient
from chatserve.engine.messages import EngineDown, PathRef, StepOutput, Submit
from chatserve.types import RequestId, SamplingParams, UserId

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

USER = UserId("bench")

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "tiny": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 2000,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
}
GREEDY = SamplingParams(temperature=0.0, seed=0)


@dataclass(slots=True)
class Answer:
    """One request as its client saw it; times by `time.perf_counter`."""

    submitted_s: float
    tokens_s: list[float] = field(default_factory=list)
    """When each token came."""
    path: PathRef | None = None
    """What the next turn continues."""
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Its first token is there, or it has ended."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    failure: str = ""

    def end(self, failure: str) -> None:
        self.failure = failure
        self.begun.set()
        self.ended.set()

    @property
    def first_token_ms(self) -> float:
        return (self.tokens_s[0] - self.submitted_s) * 1e3


class Driver:
    """Submits requests to an engine, and notes when their tokens come."""

    def __init__(self, client: EngineClient, vocab_size: int, process: EngineProcess) -> None:
        self.client = client
        self.process = process
        self.vocab_size = vocab_size
        self._answers: dict[RequestId, Answer] = {}
        self._count = itertools.count()
        self._rng = random.Random(0)
        self._task = asyncio.create_task(self._listen())

    def tokens(self, count: int) -> list[int]:
        """Random ids."""
        return self._rng.choices(range(self.vocab_size // 128, self.vocab_size - self.vocab_size // 16), k=count)

    def submit(
        self,
        token_ids: Sequence[int],
        num_output: int,
        *,
        base: PathRef | None = None,
        sampling: SamplingParams = GREEDY,
    ) -> Answer:
        """Begin to generate `num_output` tokens after `base` and `token_ids`."""
        request_id = RequestId(f"bench{next(self._count)}")
        answer = self._answers[request_id] = Answer(time.perf_counter())
        length = len(token_ids) + (0 if base is None else base.num_tokens)
        params = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
        self.client.submit(
            Submit(
                request_id=request_id,
                user=USER,
                base=base,
                token_ids=tuple(token_ids),
                num_shared_tokens=0,
                num_prompt_tokens=length,
                sampling=SamplingParams(**{**params, "max_tokens": num_output}),
                stop_token_ids=(),
            )
        )
        return answer

    async def finish(self, answers: Sequence[Answer]) -> None:
        """Wait until all have ended.

        Raises:
            RuntimeError: one was refused or failed.
        """
        for answer in answers:
            await answer.ended.wait()
            if answer.failure:
                raise RuntimeError(f"the engine did not answer: {answer.failure}")

    async def generate(
        self, prompts: Sequence[Sequence[int]], num_output: int, *, sampling: SamplingParams = GREEDY
    ) -> tuple[float, list[Answer]]:
        """Seconds until all prompts, submitted at once, have so many tokens each."""
        start = time.perf_counter()
        answers = [self.submit(prompt, num_output, sampling=sampling) for prompt in prompts]
        await self.finish(answers)
        return time.perf_counter() - start, answers

    async def close(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _listen(self) -> None:
        async for event in self.client.events():
            now = time.perf_counter()
            match event:
                case StepOutput():
                    for delta in event.deltas:
                        answer = self._answers[delta.request_id]
                        answer.tokens_s.extend([now] * len(delta.token_ids))
                        answer.begun.set()
                    for end in event.finished:
                        answer = self._answers.pop(end.request_id)
                        answer.path = end.path
                        answer.end("" if end.reason == "length" else f"{end.reason} {end.detail}")
                    for refusal in event.rejected:
                        self._answers.pop(refusal.request_id).end(f"{refusal.code}: {refusal.detail}")
                case EngineDown():
                    for answer in self._answers.values():
                        answer.end("the engine's process ended")
                    self._answers.clear()
                case _:
                    pass


class EngineProcess:
    """A process of `module` (the engine's own, or one that traces it), in a directory of its own."""

    def __init__(self, settings: EngineSettings, directory: Path, module: str) -> None:
        self._settings = settings
        self._directory = directory
        self._module = module
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        argument = hand_over_settings(self._settings, self._directory / "settings.json")
        path = os.pathsep.join(entry for entry in sys.path if entry)
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", self._module, "--settings", argument),
            env={**os.environ, "PYTHONPATH": path},
            stdin=asyncio.subprocess.PIPE,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.terminate()
        await self._process.wait()

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def resident_bytes(self) -> int:
        """Of memory that is its own, which the host's pool is not (Linux)."""
        assert self._process is not None
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(re.findall(r"RssAnon:\s*(\d+) kB", status)[0]) * 1024


def _settings(shape: str, directory: Path, fields: dict[str, Any]) -> EngineSettings:
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    (directory / "config.json").write_text(json.dumps(SHAPES[shape]))
    return EngineSettings(
        model_dir=directory,
        model_name=shape,
        load_format="random",
        socket_path=directory / "engine.sock",
        **fields,
    )


@asynccontextmanager
async def starting_engine(
    shape: str, directory: Path, *, module: str = "chatserve.engine.process", **fields: Any
) -> AsyncIterator[Callable[[], Awaitable[Driver]]]:
    """An engine with random weights of a shape in `SHAPES`, and how to wait for a driver of it; `fields` of
    `EngineSettings`."""
    settings = _settings(shape, directory, fields)
    async with EngineProcess(settings, directory, module) as process:
        client = EngineClient(settings.socket_path)
        drivers: list[Driver] = []

        async def drive() -> Driver:
            await client.connect(timeout_s=180)
            drivers.append(Driver(client, SHAPES[shape]["vocab_size"], process))
            return drivers[-1]

        try:
            yield drive
        finally:
            for driver in drivers:
                await driver.close()
            await client.close()
