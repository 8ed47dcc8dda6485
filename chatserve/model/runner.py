"""Executes step plans: transfers, then one packed batch through the model, then sampling.

Owns the state of running requests (token ids, block tables, penalties' histories), so that a plan names only what is
new. Decides nothing: which request computes what is the scheduler's business, which block is free the cache's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from chatserve.errors import StartupError
from chatserve.model import sampler
from chatserve.model.attention import AttentionBackend, PackedBatch
from chatserve.model.backends import check_choice, choose_backend
from chatserve.model.block_bytes import StorageBytes
from chatserve.model.fingerprint import kv_identity
from chatserve.model.kv_storage import KVStorage
from chatserve.model.loader import choose_device, load_model
from chatserve.model.shapes import CausalModel, KVShape
from chatserve.model.sizing import compute_threads, device_blocks, host_blocks, parse_size
from chatserve.sched.plan import CompletedStep, StepResult, TransfersFailedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from chatserve.config import EngineSettings
    from chatserve.sched.plan import Admitted, Row, StepPlan
    from chatserve.types import RequestId, SamplingParams


@dataclass(slots=True)
class _Running:
    """One request. Both arrays have room to spare; the numbers say how much of them is in use."""

    token_ids: NDArray[np.int64]
    num_tokens: int
    table: NDArray[np.int64]
    num_blocks: int
    sampling: SamplingParams
    history: sampler.TokenHistory | None

    def append_token(self, token_id: int) -> None:
        self.token_ids = _with_room(self.token_ids, self.num_tokens + 1)
        self.token_ids[self.num_tokens] = token_id
        self.num_tokens += 1
        if self.history is not None:
            self.history.append(token_id)

    def append_blocks(self, block_ids: Sequence[int]) -> None:
        end = self.num_blocks + len(block_ids)
        self.table = _with_room(self.table, end)
        self.table[self.num_blocks : end] = block_ids
        self.num_blocks = end


class ModelRunner:
    """A model, its KV pools, and the rows of the batch. Implements `sched.plan.Runner`."""

    max_in_flight = 1

    def __init__(self, model: CausalModel, storage: KVStorage, backend: AttentionBackend, context_tokens: int) -> None:
        self.model = model
        self.storage = storage
        self.context_tokens = context_tokens
        self.vocab_size = model.info.vocab_size
        self.device = storage.device_pool.device
        self._backend = backend
        self._running: dict[RequestId, _Running] = {}
        self._background_done: list[int] = []

    @property
    def num_blocks(self) -> int:
        return self.storage.num_blocks

    @property
    def num_host_blocks(self) -> int:
        return self.storage.num_host_blocks

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> CompletedStep:
        """Run one step to its end, background transfers included; see `StepPlan` for the order."""
        for request_id in plan.removed:
            self._running.pop(request_id, None)
        try:
            self.storage.execute(plan.transfers)
            self.storage.execute(plan.background)
        except Exception as error:
            raise TransfersFailedError(f"step {plan.step}: {type(error).__name__}: {error}") from error
        if plan.background:
            self._background_done.append(plan.step)
        for admitted in plan.admitted:
            self._running[admitted.request_id] = self._admit(admitted)
        return CompletedStep(StepResult(step=plan.step, token_ids=self._run(plan.rows) if plan.rows else ()))

    def poll_background(self) -> tuple[int, ...]:
        done = tuple(self._background_done)
        self._background_done.clear()
        return done

    def block_bytes(self) -> StorageBytes:
        """The bytes of its blocks, for a snapshot."""
        return StorageBytes(self.storage)

    def kv_identity(self, settings: EngineSettings) -> dict[str, str]:
        """All that these bytes depend on, by name."""
        return kv_identity(settings.model_dir, self.model.info, self.storage.shape, self.storage.device_pool.dtype)

    def snapshot_blocks(self, settings: EngineSettings) -> int:
        """How many blocks `settings.kv_snapshot_limit` allows.

        Raises:
            StartupError: it is nonsense.
        """
        return parse_size("kv-snapshot-limit", settings.kv_snapshot_limit, self.storage.block_bytes, has_auto=False)

    def check(self) -> None:
        """Every table names blocks that exist, and none holds more tokens than its ids."""
        for running in self._running.values():
            table = running.table[: running.num_blocks]
            assert ((table >= 0) & (table < self.num_blocks)).all()
            assert running.num_tokens <= len(running.token_ids)

    def _admit(self, admitted: Admitted) -> _Running:
        token_ids = np.array(admitted.token_ids, dtype=np.int64)
        return _Running(
            token_ids=token_ids,
            num_tokens=len(token_ids),
            table=np.array(admitted.block_ids, dtype=np.int64),
            num_blocks=len(admitted.block_ids),
            sampling=admitted.sampling,
            history=sampler.TokenHistory.of(
                admitted.token_ids, admitted.num_prompt_tokens, self.vocab_size, self.device
            )
            if sampler.has_penalties(admitted.sampling)
            else None,
        )

    def _run(self, rows: Sequence[Row]) -> tuple[int, ...]:
        states = [self._running[row.request_id] for row in rows]
        for row, state in zip(rows, states, strict=True):
            if row.new_block_ids:
                state.append_blocks(row.new_block_ids)
            assert row.num_tokens > 0
            end = row.start + row.num_tokens
            assert end == state.num_tokens if row.sample else end <= state.num_tokens
        starts = np.array([row.start for row in rows], dtype=np.int64)
        lengths = np.array([row.num_tokens for row in rows], dtype=np.int64)
        batch = PackedBatch(starts, lengths, _pad([state.table[: state.num_blocks] for state in states]))
        input_ids = np.concatenate(
            [state.token_ids[row.start : row.start + row.num_tokens] for row, state in zip(rows, states, strict=True)]
        )
        ends = np.cumsum(lengths)
        positions = np.arange(len(input_ids)) + np.repeat(starts - (ends - lengths), lengths)
        sampled = [index for index, row in enumerate(rows) if row.sample]
        logits = self.model.forward(
            torch.from_numpy(input_ids).to(self.device),
            torch.from_numpy(positions).to(self.device),
            self._backend.prepare(batch),
            torch.from_numpy(ends[sampled] - 1).to(self.device),
        )
        if not sampled:
            return ()
        token_ids = sampler.sample(
            logits,
            [states[index].sampling for index in sampled],
            [states[index].num_tokens for index in sampled],
            [states[index].history for index in sampled],
        )
        for index, token_id in zip(sampled, token_ids, strict=True):
            states[index].append_token(token_id)
        return tuple(token_ids)


def build_runner(settings: EngineSettings) -> ModelRunner:
    """Load a model and give it memory, as the settings say.

    Raises:
        StartupError: one line: what cannot be used, and what to do.
    """
    device = choose_device(settings.device)
    if device.type == "cpu":
        torch.set_num_threads(compute_threads(settings.threads))
    # TF32 keeps 10 bits of the mantissa; float32 is asked for where equality matters.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    if settings.block_size < 1:
        raise StartupError(f"block-size must be at least 1 token, not {settings.block_size}")
    check_choice(settings.attention)
    model, dtype = load_model(settings.model_dir, device, settings.model_impl, settings.dtype)
    shape = KVShape(
        num_layers=model.info.num_layers,
        num_kv_heads=model.info.num_kv_heads,
        head_dim=model.info.head_dim,
        block_size=settings.block_size,
    )
    block_bytes = shape.block_elements * dtype.itemsize
    num_blocks = device_blocks(settings.kv_cache_memory, block_bytes, device)
    num_host_blocks = host_blocks(settings.host_cache_memory, block_bytes, device)
    storage = KVStorage(shape, num_blocks=num_blocks, num_host_blocks=num_host_blocks, dtype=dtype, device=device)
    limits = [model.info.context_tokens, num_blocks * settings.block_size]
    if settings.context_tokens:
        limits.append(settings.context_tokens)
    backend = choose_backend(settings.attention, storage, model.info.num_heads)
    return ModelRunner(model, storage, backend, min(limits))


def _with_room(array: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """The array, or a copy of at least twice its length."""
    if size <= len(array):
        return array
    grown = np.zeros(max(size, 2 * len(array), 16), dtype=np.int64)
    grown[: len(array)] = array
    return grown


def _pad(tables: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    """[num_rows, widest]; the padding is never read."""
    padded = np.zeros((len(tables), max(map(len, tables))), dtype=np.int64)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded
