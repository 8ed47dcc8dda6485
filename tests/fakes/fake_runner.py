"""A runner without a model, in which every wrong block shows as wrong text.

It keeps device and host storage of real shape: a slot holds the token id written there and a digest of all tokens
before it, as a layer's KV depends on its whole context. Transfers are executed literally and fresh blocks are poisoned.
The next token is a hash of everything read back through the block table, so a block that was freed, overwritten, copied
too early or taken from another sequence changes the text.
"""

from __future__ import annotations

import random
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from chatserve.config import EngineSettings
from chatserve.sched.plan import CompletedStep, PendingStep, StepPlan, StepResult, Transfers
from chatserve.types import RequestId, SamplingParams

POISON = 0xDEAD_BEEF
_MASK = 0xFFFF_FFFF

Script = Callable[[Sequence[int]], int]
"""From all token ids of the sequence, as read back through the blocks, to the next one."""


def digest_of(previous: int, token_id: int) -> int:
    """What a slot holds besides its token: a chain over all tokens up to it."""
    return (previous * 0x9E37_79B1 + token_id * 0x85EB_CA77 + 0x1656_67B1) & _MASK


def next_token(digests: np.ndarray, sampling: SamplingParams, vocab_size: int) -> int:
    """A token as a hash of all slots, and of the seed where it is sampled at random."""
    seed = 0 if sampling.temperature == 0 or sampling.seed is None else sampling.seed & _MASK
    return zlib.crc32(digests.astype(np.uint32).tobytes(), seed) % vocab_size


class _Sequence:
    """What a runner keeps of one request between steps."""

    def __init__(self, token_ids: Sequence[int], block_ids: Sequence[int], sampling: SamplingParams) -> None:
        self.token_ids = list(token_ids)
        self.block_ids = list(block_ids)
        self.sampling = sampling


class FakeBytes:
    """The storage's bytes; implements `engine.snapshot.BlockBytes`."""

    def __init__(self, device: np.ndarray, host: np.ndarray) -> None:
        self._device = device
        self._host = host
        self.block_bytes = int(device[0].nbytes)

    def device_blocks(self, block_ids: Sequence[int]) -> list[memoryview]:
        return [memoryview(self._device[block_id]).cast("B") for block_id in block_ids]

    def host_block(self, host_block_id: int) -> memoryview:
        return memoryview(self._host[host_block_id]).cast("B")

    def settle(self) -> None:
        pass


class FakeRunner:
    """Implements `sched.plan.Runner`.

    `gate` is called with each plan before its rows are computed, so that a test can hold a step or fail it.
    `stop_token_id` comes up about once in `stop_one_in` tokens, by the same hash (0: only by chance).
    `script` replaces the hash, for tests that need a certain text.
    """

    device = "fake"
    max_in_flight = 1

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        num_host_blocks: int = 64,
        block_size: int = 16,
        vocab_size: int = 1000,
        context_tokens: int = 4096,
        stop_token_id: int = 0,
        stop_one_in: int = 0,
        script: Script | None = None,
        gate: Callable[[StepPlan], None] | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.context_tokens = context_tokens
        self.gate = gate
        self.plans: list[StepPlan] = []
        """Every plan launched, for tests to look at."""
        self.keep_plans = True
        self._stop_token_id = stop_token_id
        self._stop_one_in = stop_one_in
        self._script = script
        # [num_blocks, 2, block_size]: token ids and digests
        self._device = np.full((num_blocks, 2, block_size), POISON, dtype=np.int64)
        self._host = np.full((num_host_blocks, 2, block_size), POISON, dtype=np.int64)
        self._sequences: dict[RequestId, _Sequence] = {}
        self._background_done: list[int] = []

    def block_bytes(self) -> FakeBytes:
        return FakeBytes(self._device, self._host)

    def kv_identity(self, settings: EngineSettings) -> dict[str, str]:
        return {"model": settings.model_name, "layout": f"{self.block_size}"}

    def snapshot_blocks(self, settings: EngineSettings) -> int:
        return int(settings.kv_snapshot_limit.removesuffix("blocks").replace("16G", "1000000"))

    @property
    def num_sequences(self) -> int:
        """Requests that the runner knows of."""
        return len(self._sequences)

    def launch(self, plan: StepPlan) -> PendingStep:
        if self.keep_plans:
            self.plans.append(plan)
        return CompletedStep(self._execute(plan))

    def poll_background(self) -> tuple[int, ...]:
        done, self._background_done = tuple(self._background_done), []
        return done

    def _execute(self, plan: StepPlan) -> StepResult:
        """All that a step does on the device. Where its rows fail, those who have one go on with garbage."""
        for request_id in plan.removed:
            self._sequences.pop(request_id, None)
        self._transfer(plan.transfers)
        self._begin_background(plan)
        for admitted in plan.admitted:
            assert admitted.request_id not in self._sequences, f"{admitted.request_id} is in the batch already"
            assert 0 <= admitted.num_computed < len(admitted.token_ids)
            assert admitted.num_computed <= len(admitted.block_ids) * self.block_size
            self._sequences[admitted.request_id] = _Sequence(admitted.token_ids, admitted.block_ids, admitted.sampling)
        error: Exception | None = None
        try:
            if self.gate is not None:
                self.gate(plan)
        except Exception as raised:
            error = raised
        token_ids: list[int] = []
        for row in plan.rows:
            sequence = self._sequences[row.request_id]
            for block_id in row.new_block_ids:
                self._device[block_id] = POISON
            sequence.block_ids.extend(row.new_block_ids)
            if error is None:
                self._compute(sequence, row.start, row.start + row.num_tokens)
            if row.sample:
                assert row.start + row.num_tokens == len(sequence.token_ids)
                token_id = self._sample(sequence) if error is None else 0
                sequence.token_ids.append(token_id)
                token_ids.append(token_id)
        if error is not None:
            raise error
        return StepResult(plan.step, tuple(token_ids))

    def _begin_background(self, plan: StepPlan) -> None:
        if plan.background:
            self._transfer(plan.background)
            self._background_done.append(plan.step)

    def _transfer(self, transfers: Transfers) -> None:
        for out in transfers.swap_out:
            self._host[out.dst] = self._device[out.src]
        for back in transfers.swap_in:
            self._device[back.dst] = self._host[back.src]
            assert (self._device[back.dst, :, 0] != POISON).all(), "brings back what was never taken out"
        for copy in transfers.copies:
            assert 0 < copy.num_tokens <= self.block_size
            kept = self._device[copy.src, :, : copy.num_tokens].copy()
            self._device[copy.dst] = POISON
            self._device[copy.dst, :, : copy.num_tokens] = kept

    def _compute(self, sequence: _Sequence, start: int, end: int) -> None:
        """Write KV of tokens `start` to `end`, from what is read back of the token before."""
        assert end <= len(sequence.block_ids) * self.block_size, "no slot for the row's last token"
        previous = 0
        if start > 0:
            block, slot = divmod(start - 1, self.block_size)
            previous = int(self._device[sequence.block_ids[block], 1, slot])
        for index in range(start, end):
            token_id = sequence.token_ids[index]
            previous = digest_of(previous, token_id)
            block, slot = divmod(index, self.block_size)
            self._device[sequence.block_ids[block], :, slot] = (token_id, previous)

    def _sample(self, sequence: _Sequence) -> int:
        length = len(sequence.token_ids)
        read = self._device[sequence.block_ids]  # [num_blocks, 2, block_size]
        read = read.transpose(1, 0, 2).reshape(2, -1)[:, :length]
        if self._script is not None:
            return self._script([int(token_id) for token_id in read[0]])
        return self._choose(read[1], sequence.sampling)

    def _choose(self, digests: np.ndarray, sampling: SamplingParams) -> int:
        if self._stop_one_in and zlib.crc32(digests.astype(np.uint32).tobytes(), 1) % self._stop_one_in == 0:
            return self._stop_token_id
        return next_token(digests, sampling, self.vocab_size)

    def oracle(
        self,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        num_output_tokens: int,
        stop_token_ids: Sequence[int] = (),
    ) -> list[int]:
        """What a run without any cache gives after `token_ids`: at most so many tokens, up to a stop token."""
        assert self._script is None
        digests: list[int] = []
        previous = 0
        for token_id in token_ids:
            previous = digest_of(previous, token_id)
            digests.append(previous)
        output: list[int] = []
        while len(output) < num_output_tokens:
            token_id = self._choose(np.array(digests, dtype=np.int64), sampling)
            if token_id in stop_token_ids:
                break
            output.append(token_id)
            previous = digest_of(previous, token_id)
            digests.append(previous)
        return output


class LateRunner(FakeRunner):
    """A device that lags behind by up to `max_in_flight` steps, each of which it executes at some time of its own.

    Steps run in the order of their launches, the latest when they are waited for. Copies in the background run one
    block at a time, anywhere between the transfers of the step that brought them and the time they are said to be done;
    until then their targets are poisoned.
    """

    def __init__(self, *, seed: int, max_in_flight: int = 2, fails_early: bool = False, **options: Any) -> None:
        """With `fails_early`, a step that fails does so when it is launched."""
        super().__init__(**options)
        self._fails_early = fails_early
        self.max_in_flight = max_in_flight
        self._random = random.Random(seed)
        self._laziness = self._random.choice([0.0, 0.3, 0.7, 1.0])
        self._queue: deque[StepPlan] = deque()
        self._results: dict[int, StepResult | Exception] = {}
        self._copies: dict[int, list[Transfers]] = {}
        """What is still to be copied, by the number of the step that brought it; each one block."""
        self.num_waiting = 0

    def launch(self, plan: StepPlan) -> PendingStep:
        if self.keep_plans:
            self.plans.append(plan)
        self._queue.append(plan)
        self.num_waiting += 1
        assert self.num_waiting <= self.max_in_flight
        self._advance()
        if self._fails_early:
            while self._queue:
                self._run_next()
            if isinstance(self._results[plan.step], Exception):
                self.result(plan.step)
        return _LateStep(self, plan.step)

    def poll_background(self) -> tuple[int, ...]:
        self._advance()
        for copies in self._copies.values():
            self._copy_some(copies)
        done = [step for step, copies in self._copies.items() if not copies and self._random.random() < 0.7]
        for step in done:
            del self._copies[step]
        return tuple(done)

    def has_result(self, step: int) -> bool:
        self._advance()
        return step in self._results

    def result(self, step: int) -> StepResult:
        """Execute whatever has to be executed for it."""
        while step not in self._results:
            self._run_next()
        self.num_waiting -= 1
        result = self._results.pop(step)
        if isinstance(result, Exception):
            raise result
        return result

    def _advance(self) -> None:
        while self._queue and self._random.random() > self._laziness:
            self._run_next()

    def _run_next(self) -> None:
        for copies in self._copies.values():
            self._copy_some(copies)
        plan = self._queue.popleft()
        try:
            self._results[plan.step] = self._execute(plan)
        except AssertionError:
            raise
        except Exception as error:
            self._results[plan.step] = error

    def _begin_background(self, plan: StepPlan) -> None:
        if not plan.background:
            return
        assert not plan.background.copies
        for swap in plan.background.swap_in:
            self._device[swap.dst] = POISON
        copies = [Transfers(swap_out=(out,)) for out in plan.background.swap_out]
        copies += [Transfers(swap_in=(swap,)) for swap in plan.background.swap_in]
        self._random.shuffle(copies)
        self._copies[plan.step] = copies

    def _copy_some(self, copies: list[Transfers]) -> None:
        while copies and self._random.random() > self._laziness / 2:
            self._transfer(copies.pop())


class _LateStep:
    """Implements `sched.plan.PendingStep`."""

    def __init__(self, runner: LateRunner, step: int) -> None:
        self._runner = runner
        self._step = step

    def is_done(self) -> bool:
        return self._runner.has_result(self._step)

    def wait(self) -> StepResult:
        return self._runner.result(self._step)
