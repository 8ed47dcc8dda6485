"""What `chatserve bench gpu` measures of one engine, a method a section.

Each drives the engine through its client, returns its figures and has printed them. Which engine a section needs, and
how it is started, is `gpu`'s to say.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import statistics
import time
from typing import TYPE_CHECKING, Any

from chatserve.bench._engine_process import USER, Answer, Driver
from chatserve.engine.messages import Hint
from chatserve.types import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

DECODE_ROWS = (
    (1, 1024), (1, 8192), (16, 1024), (16, 4096), (64, 1024), (64, 4096), (128, 1024), (128, 4096), (256, 1024),
    (256, 2048),
)  # fmt: skip
"""(batch, context)"""
SHARED_ROWS = ((64, 2048, 256), (256, 2048, 256), (256, 8192, 256))
"""(batch, shared, own)"""
SAMPLING = (256, 1024)
SECTIONS = ("decode", "shared", "sampling", "prefill", "mixed", "trace", "turn", "idle")
"""Each is a method of `Bench`."""
DRAWN = SamplingParams(temperature=0.8, top_p=0.95, seed=1)
STEPS = 64
PREFILL = (16, 4096)
"""(batch, context)"""
ALONE = 8192
"""Tokens of a cold prompt that is alone, of one that comes between others' tokens, and of a history."""
MIXED = (64, 1024)
"""(batch, context) of those who decode meanwhile"""
_MIXED_S = 4
_TURN = 64
_IDLE = (10_000, 32)
"""Sessions that have had a turn, and tokens of each"""
_AWAKE = (16, 1024)
"""(batch, context) of those who decode beside them"""
_RESIDENT_TURNS = 5
_AT_ONCE = 64
"""Sessions that begin together"""


def between_tokens_ms(answers: Sequence[Answer]) -> list[float]:
    """Every wait from one token to the next."""
    return [(b - a) * 1e3 for answer in answers for a, b in itertools.pairwise(answer.tokens_s)]


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def work(repeats: int, scale: float) -> dict[str, Any]:
    """The same in numbers, for `_vllm`."""

    def sized(*counts: int) -> tuple[int, ...]:
        return tuple(max(1, int(count * scale)) for count in counts)

    return {
        "repeats": repeats,
        "steps": STEPS,
        "decode": [sized(*row) for row in DECODE_ROWS],
        "shared": [sized(*row) for row in SHARED_ROWS],
        "sampling": sized(*SAMPLING),
        "prefill": (sized(*PREFILL), *sized(ALONE)),
        "mixed": (*sized(*MIXED, ALONE), _MIXED_S),
        "turn": (*sized(ALONE), _TURN),
    }


class Bench:
    """One engine's sections; each returns what it measured, and has printed it."""

    def __init__(self, driver: Driver, repeats: int, scale: float) -> None:
        self._driver = driver
        self._repeats = repeats
        self._scale = scale
        self._prompts: list[list[int]] = []

    def _sized(self, count: int) -> int:
        return max(1, int(count * self._scale))

    def _some(self, batch: int, length: int) -> list[list[int]]:
        """Prompts whose beginnings earlier rows have computed already, where there were any."""
        while len(self._prompts) < batch:
            self._prompts.append([])
        for prompt in self._prompts[:batch]:
            prompt.extend(self._driver.tokens(length - len(prompt)) if len(prompt) < length else ())
        return [prompt[:length] for prompt in self._prompts[:batch]]

    async def _step_ms(self, prompts: list[list[int]], sampling: SamplingParams | None = None) -> float:
        kept = {} if sampling is None else {"sampling": sampling}
        await self._driver.generate(prompts, 1, **kept)
        first = min([(await self._driver.generate(prompts, 1, **kept))[0] for _ in range(self._repeats)])
        all_s = min([(await self._driver.generate(prompts, 1 + STEPS, **kept))[0] for _ in range(self._repeats)])
        return (all_s - first) / STEPS * 1e3

    async def decode(self) -> list[dict[str, Any]]:
        """Rows of unshared prompts."""
        rows = []
        for batch, context in DECODE_ROWS:
            batch, context = self._sized(batch), self._sized(context)  # noqa: PLW2901
            step_ms = await self._step_ms(self._some(batch, context))
            rows.append({"batch": batch, "context": context, "step_ms": step_ms, "tokens_s": batch / step_ms * 1e3})
            print(f"  {batch:4} x {context:6,}: {step_ms:7.3f} ms a step, {batch / step_ms * 1e3:8,.0f} tokens/s")
        return rows

    async def shared(self) -> list[dict[str, Any]]:
        """Rows of prompts that begin alike."""
        rows = []
        for batch, shared, own in SHARED_ROWS:
            batch, shared, own = self._sized(batch), self._sized(shared), self._sized(own)  # noqa: PLW2901
            prefix = self._driver.tokens(shared)
            step_ms = await self._step_ms([prefix + self._driver.tokens(own) for _ in range(batch)])
            rows.append({"batch": batch, "shared": shared, "own": own, "step_ms": step_ms})
            print(f"  {batch:4} x ({shared:,} shared + {own}): {step_ms:7.3f} ms a step")
        return rows

    async def sampling(self) -> dict[str, float]:
        """What drawing costs over taking the best."""
        prompts = self._some(*map(self._sized, SAMPLING))
        greedy, drawn = await self._step_ms(prompts), await self._step_ms(prompts, DRAWN)
        print(
            f"  {len(prompts)} rows: greedy {greedy:.3f} ms, drawn {drawn:.3f} ms, {100 * (drawn / greedy - 1):+.1f} %"
        )
        return {"greedy_ms": greedy, "drawn_ms": drawn}

    async def prefill(self) -> dict[str, Any]:
        """Cold prompts in a batch, and one alone."""
        batch, length = map(self._sized, PREFILL)
        alone_length = self._sized(ALONE)
        rates, firsts = [], []
        for _ in range(self._repeats):
            seconds, answers = await self._driver.generate([self._driver.tokens(length) for _ in range(batch)], 1)
            rates.append(batch * length / seconds)
            firsts.append(sorted(answer.first_token_ms for answer in answers))
        alone = []
        for _ in range(self._repeats):
            _, answers = await self._driver.generate([self._driver.tokens(alone_length)], 1)
            alone.append(answers[0].first_token_ms)
        print(f"  {batch} x {length:,} cold: {max(rates):,.0f} tokens/s; {alone_length:,} alone: {min(alone):.1f} ms")
        print("  each prompt's token after " + ", ".join(f"{ms:.0f}" for ms in firsts[-1]) + " ms")
        return {"tokens_s": max(rates), "cold_8192_ms": min(alone), "first_tokens_ms": firsts}

    async def mixed(self) -> dict[str, float]:
        """64 sessions decode, and a new prompt of 8,192 tokens comes every second."""
        batch, context, length = map(self._sized, (*MIXED, ALONE))
        prompts = self._some(batch, context)
        await self._driver.generate(prompts, 1)
        _, alone = await self._driver.generate(prompts, 1 + 2 * STEPS)
        unmixed = statistics.median(between_tokens_ms(alone))
        seconds = _MIXED_S
        running = [self._driver.submit(prompt, int(seconds * 1e3 / unmixed * 0.8)) for prompt in prompts]
        for answer in running:
            await answer.begun.wait()
        start = time.perf_counter()
        arrivals = []
        for second in range(seconds):
            await asyncio.sleep(max(0.0, start + second - time.perf_counter()))
            arrivals.append(self._driver.submit(self._driver.tokens(length), 1))
        await self._driver.finish([*arrivals, *running])
        # Of the time in which prompts came.
        waits = [
            (b - a) * 1e3
            for answer in running
            for a, b in itertools.pairwise(answer.tokens_s)
            if start <= a and b <= start + seconds
        ]
        firsts = [answer.first_token_ms for answer in arrivals]
        result = {
            "unmixed_median_ms": unmixed,
            "median_ms": statistics.median(waits),
            "p99_ms": percentile(waits, 0.99),
            "longest_ms": max(waits),
            "first_token_ms": max(firsts),
        }
        print(
            f"  between tokens: median {result['median_ms']:.2f} ms (unmixed {unmixed:.2f}), "
            f"p99 {result['p99_ms']:.2f}, longest {result['longest_ms']:.1f}; "
            f"the prompts' first tokens after {min(firsts):.0f} to {max(firsts):.0f} ms"
        )
        return result

    async def trace(self) -> None:
        """Steps for the engine's own trace, which it writes as it records them."""
        self._driver.process.signal(signal.SIGUSR1)
        batches = [self._some(self._sized(batch), self._sized(1024)) for batch in (1, 64, 256)]
        batch, shared, own = map(self._sized, SHARED_ROWS[1])
        prefix = self._driver.tokens(shared)
        batches.append([prefix + self._driver.tokens(own) for _ in range(batch)])
        for prompts in batches:
            await self._driver.generate(prompts, 1)
            await self._driver.generate(prompts, STEPS)
        await self._driver.generate(
            [self._driver.tokens(self._sized(PREFILL[1])) for _ in range(self._sized(PREFILL[0]))], 1
        )
        running = [self._driver.submit(prompt, 2 * STEPS) for prompt in batches[1]]
        for answer in running:
            await answer.begun.wait()
        await self._driver.finish([self._driver.submit(self._driver.tokens(self._sized(ALONE)), 1), *running])

    async def turn(self) -> dict[str, Any]:
        """First token of a next turn, by where the history's KV is. The engine must have room for four histories."""
        length, new = self._sized(ALONE), _TURN
        driver = self._driver
        cold, paths = [], []
        for _ in range(10):
            _, answers = await driver.generate([driver.tokens(length)], 1)
            cold.append(answers[0].first_token_ms)
            assert answers[0].path is not None
            paths.append(answers[0].path)
        await asyncio.sleep(1.0)  # for what is written through to the host

        async def first_ms(number: int) -> float:
            answer = driver.submit(driver.tokens(new), 1, base=paths[number])
            await driver.finish([answer])
            return answer.first_token_ms

        before = await self._loop_us()
        resident = [await first_ms(9) for _ in range(_RESIDENT_TURNS)]
        parts = {name: (us - before[name]) / _RESIDENT_TURNS / 1e3 for name, us in (await self._loop_us()).items()}
        host = [await first_ms(number) for number in range(6)]
        hinted = []
        for number in (6, 0, 1):
            driver.client.hint(Hint(user=USER, key=str(number), base=paths[number], token_ids=()))
            await asyncio.sleep(0.5)  # as long as somebody types
            hinted.append(await first_ms(number))
        gone = []
        for _ in range(3):
            _, answers = await driver.generate([driver.tokens(length + new)], 1)
            gone.append(answers[0].first_token_ms)
        times = {"resident": resident, "host": host, "hinted": hinted, "gone": gone, "cold": cold}
        medians = {name: statistics.median(values) for name, values in times.items()}
        print(f"  {new} new on {length:,}: " + ", ".join(f"{name} {value:.1f} ms" for name, value in medians.items()))
        told = ", ".join(f"{name} {value:.2f}" for name, value in parts.items())
        print(f"  of a resident one's {statistics.mean(resident):.2f} ms (mean) the engine's loop spent {told}")
        return {**medians, "all": times, "resident_parts_ms": parts}

    async def idle(self) -> dict[str, Any]:
        """What sessions cost that do nothing: a step of others before they were there and after, and CPU memory."""
        driver = self._driver
        awake = self._some(*map(self._sized, _AWAKE))
        sessions, length = self._sized(_IDLE[0]), _IDLE[1]
        before_ms, before_bytes = await self._step_ms(awake), driver.process.resident_bytes()
        for first in range(0, sessions, _AT_ONCE):
            prompts = [driver.tokens(length) for _ in range(min(_AT_ONCE, sessions - first))]
            await driver.generate(prompts, 1)
        taken = driver.process.resident_bytes() - before_bytes
        report = await driver.client.inspect()
        after_ms = await self._step_ms(awake)
        kept = {"device": report.device.cached, "host": report.host.cached}
        print(
            f"  {sessions:,} silent sessions of {length} tokens, {kept['device']:,} blocks on the device and "
            f"{kept['host']:,} on the host: a step takes {after_ms:.3f} ms (before {before_ms:.3f}); "
            f"{taken / sum(kept.values()):.0f} bytes a block"
        )
        return {"before_ms": before_ms, "after_ms": after_ms, "bytes": taken, "sessions": sessions, **kept}

    async def _loop_us(self) -> dict[str, int]:
        """Where the engine's loop has spent its time so far, in microseconds."""
        counters = (await self._driver.client.inspect()).counters
        return {name: counters[f"{name}_us"] for name in ("scheduling", "launching", "waiting")}
