"""What the engine's own loop costs a step, and whether sessions that are known and silent cost anything.

The engine's real loop with its socket, around a runner that computes nothing: what is left is draining the inbox,
scheduling, booking, and telling the client in MessagePack. A device is kept busy as long as that takes less than its
step. Beside it: CPU memory a block of what the cache and the paths remember.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from chatserve.cache.kv_manager import KVManager
from chatserve.engine.engine import Engine
from chatserve.engine.framing import encode
from chatserve.engine.garbage import IdleCollector
from chatserve.engine.messages import EngineInfo, Submit
from chatserve.engine.server import EngineServer
from chatserve.sched.plan import CompletedStep, PendingStep, StepPlan, StepResult
from chatserve.sched.scheduler import Scheduler
from chatserve.types import RequestId, SamplingParams, UserId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_BLOCK_SIZE: Final = 16
_VOCAB_SIZE: Final = 128_256
_BATCHED_TOKENS: Final = 8_192
_PROMPT_TOKENS: Final = 1_024
_NUM_USERS: Final = 100
_START_STEPS: Final = 500
"""Room for what the first ones say before the last one's prompt is computed."""
_WARM_UP_STEPS: Final = 50
_CLIENT: Final = """
import socket, sys
client = socket.socket(fileno=0)
client.sendall(open(sys.argv[1], "rb").read())
while client.recv(1 << 20):
    pass
"""
"""A client in a process of its own: it says all that it has to say, and then reads as fast as it can."""


class NullRunner:
    """Implements `sched.plan.Runner`: every token is 1, and there at once. `on_step` is called with each plan."""

    max_in_flight = 2

    def __init__(self) -> None:
        self.on_step: Callable[[StepPlan], None] | None = None
        self._background_done: list[int] = []

    def launch(self, plan: StepPlan) -> PendingStep:
        if self.on_step is not None:
            self.on_step(plan)
        if plan.background:
            self._background_done.append(plan.step)
        return CompletedStep(StepResult(plan.step, (1,) * sum([row.sample for row in plan.rows])))

    def poll_background(self) -> tuple[int, ...]:
        done, self._background_done = tuple(self._background_done), []
        return done


@dataclass(frozen=True)
class StepTimes:
    """From one launch to the next, in microseconds: by the clock, and of this process's CPU time."""

    wall: list[float]
    cpu: list[float]


class Bench:
    """An engine on a null runner with `num_idle` sessions that have had a turn: a third each on the device, on the host
    and gone.
    """

    def __init__(self, num_running: int, num_idle: int, num_steps: int, idle_tokens: int) -> None:
        self.runner = NullRunner()
        self._num_running = num_running
        self._num_steps = num_steps
        self._rng = random.Random(0)
        num_idle_blocks = num_idle * -(-idle_tokens // _BLOCK_SIZE)
        running_tokens = _PROMPT_TOKENS + num_steps + 2 * _WARM_UP_STEPS + _START_STEPS
        num_running_blocks = (num_running + 1) * (running_tokens // _BLOCK_SIZE + 2)
        kv = KVManager(
            num_blocks=num_running_blocks + num_idle_blocks // 3,
            num_host_blocks=num_idle_blocks // 3,
            block_size=_BLOCK_SIZE,
        )
        scheduler = Scheduler(
            kv,
            max_batched_tokens=_BATCHED_TOKENS,
            max_running=max(num_running, 1),
            max_queued=num_running + 1,
            context_tokens=running_tokens,
        )
        info = EngineInfo(
            epoch="bench",
            model="none",
            context_tokens=running_tokens,
            block_size=_BLOCK_SIZE,
            vocab_size=_VOCAB_SIZE,
            max_queued=num_running + 1,
            device="none",
        )
        self.engine = Engine(kv, scheduler, self.runner, info)
        gc.collect()
        before = _resident_bytes()
        for number in range(num_idle):
            self.engine.handle(self.submit(f"idle{number}", idle_tokens, max_tokens=1))
            while self.engine.has_work:
                self.engine.step()
        IdleCollector().collect()
        self.idle_bytes = _resident_bytes() - before
        self.num_cached = len(kv.manifest_builder().candidates())

    def run(self) -> StepTimes:
        """Time the steps in which everybody decodes."""
        has_begun = False
        wall: list[float] = []
        cpu: list[float] = []
        with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as listener:
            path = os.fspath(Path(directory) / "engine")
            listener.bind(path)
            listener.listen()
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(path)

                def on_idle() -> None:
                    if has_begun:
                        server.stop()

                server = EngineServer(self.engine, listener, drain_s=0.0, on_idle=on_idle)

                def on_step(plan: StepPlan) -> None:
                    nonlocal has_begun
                    has_begun = True
                    if len(plan.rows) == self._num_running and plan.num_tokens == self._num_running:
                        wall.append(time.perf_counter())
                        cpu.append(time.process_time())
                        if len(wall) > self._num_steps + _WARM_UP_STEPS:
                            server.stop()

                self.runner.on_step = on_step
                frames = [encode(self.submit(f"r{n}", _PROMPT_TOKENS, None)) for n in range(self._num_running)]
                data = Path(directory) / "commands"
                data.write_bytes(b"".join(frames))
                command = [sys.executable, "-c", _CLIENT, os.fspath(data)]
                with subprocess.Popen(command, stdin=client.fileno()):  # noqa: S603 - our own program
                    client.close()
                    server.run()
        assert len(wall) > self._num_steps, "some had come to the end of their context before all decoded"
        return StepTimes(wall=_gaps_us(wall), cpu=_gaps_us(cpu))

    def submit(self, request_id: str, num_tokens: int, max_tokens: int | None) -> Submit:
        return Submit(
            request_id=RequestId(request_id),
            user=UserId(f"user{hash(request_id) % _NUM_USERS}"),
            base=None,
            token_ids=tuple([self._rng.randrange(2, _VOCAB_SIZE) for _ in range(num_tokens)]),
            num_shared_tokens=0,
            num_prompt_tokens=num_tokens,
            sampling=SamplingParams(max_tokens=max_tokens, seed=0),
            stop_token_ids=(0,),
        )


def _gaps_us(times_s: Sequence[float]) -> list[float]:
    return [(end - start) * 1e6 for start, end in itertools.pairwise(times_s[_WARM_UP_STEPS:])]


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="chatserve bench engine", description=__doc__)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 64, 256], help="sessions that decode")
    parser.add_argument("--idle", type=int, nargs="+", default=[0, 10_000], help="sessions that are known and silent")
    parser.add_argument("--idle-tokens", type=int, default=256, help="tokens of each of these")
    parser.add_argument("--steps", type=int, default=500)
    options = parser.parse_args(argv)
    print("running    idle  us a step  CPU mean    CPU p99   steps/s  bytes a block")
    for num_idle in options.idle:
        for num_running in options.running:
            bench = Bench(num_running, num_idle, options.steps, options.idle_tokens)
            times = bench.run()
            wall, cpu = statistics.median(times.wall), statistics.mean(times.cpu)
            worst = statistics.quantiles(times.cpu, n=100)[98]
            memory = f"{bench.idle_bytes / bench.num_cached:.0f}" if bench.num_cached else "-"
            print(f"{num_running:7} {num_idle:7} {wall:10.0f} {cpu:9.0f} {worst:10.0f} {1e6 / wall:9.0f} {memory:>13}")
