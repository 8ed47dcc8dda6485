"""Executes step plans: transfers, then one packed batch through the model, then sampling.

Owns the rows of the batch, so that a plan names only what is new, and the order of all that is put on the device.
Decides nothing: which request computes what is the scheduler's business, which block is free the cache's.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from chatserve_kernels.staging import Readback

from chatserve.errors import StartupError
from chatserve.model.backends import check_device, choose_backend
from chatserve.model.background import BackgroundCopies
from chatserve.model.block_bytes import StorageBytes
from chatserve.model.block_tables import BlockTables
from chatserve.model.executor import HostExecutor
from chatserve.model.fingerprint import kv_identity
from chatserve.model.kv_dtype import choose_kv_dtype
from chatserve.model.kv_storage import KVStorage
from chatserve.model.loader import choose_device, load_model
from chatserve.model.rows import BatchRows
from chatserve.model.shapes import KVShape
from chatserve.model.sizing import available_memory, compute_threads, cuda_room, device_blocks, host_blocks
from chatserve.options import check_num_blocks, check_options
from chatserve.sched.plan import StepFailedError, StepResult, TransfersFailedError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from chatserve.config import EngineSettings
    from chatserve.model.executor import Executor
    from chatserve.model.shapes import CausalModel
    from chatserve.sched.plan import StepPlan


class LaunchedStep:
    """A step that is on the device; see `sched.plan.PendingStep`."""

    __slots__ = ("_sampled", "_step")

    def __init__(self, step: int, sampled: Readback) -> None:
        self._step = step
        self._sampled = sampled

    def is_done(self) -> bool:
        return self._sampled.is_done()

    def wait(self) -> StepResult:
        return StepResult(step=self._step, token_ids=tuple(self._sampled.wait()))


class ModelRunner:
    """A model, its KV pools, and the rows of the batch. Implements `sched.plan.Runner`.

    All of a step is put on one stream of the device; a CPU has computed it when `launch` returns.
    """

    def __init__(self, storage: KVStorage, executor: Executor, *, context_tokens: int) -> None:
        self.storage = storage
        self.executor = executor
        self.context_tokens = context_tokens
        self.vocab_size = executor.model.info.vocab_size
        self.device = storage.device_pool.device
        self.max_in_flight = 2 if self.device.type == "cuda" else 1
        self._rows = executor.rows
        self._background = BackgroundCopies(storage)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._nothing = torch.empty(0, dtype=torch.int64, device=self.device)

    @property
    def model(self) -> CausalModel:
        return self.executor.model

    @property
    def num_blocks(self) -> int:
        return self.storage.num_blocks

    @property
    def num_host_blocks(self) -> int:
        return self.storage.num_host_blocks

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Put one step on the device; see `StepPlan` for the order."""
        with self._on_stream():
            for request_id in plan.removed:
                self._rows.remove(request_id)
            try:
                self.storage.execute(plan.transfers)
                if plan.background:
                    self._background.start(plan.step, plan.background)
            except Exception as error:
                raise TransfersFailedError(f"step {plan.step}: {type(error).__name__}: {error}") from error
            for admitted in plan.admitted:
                self.executor.admit(self._rows.admit(admitted), admitted)
            try:
                sampled = self.executor.run(self._rows.lay_out(plan.rows)) if plan.rows else self._nothing
            except torch.OutOfMemoryError as error:
                first_line = next(iter(str(error).splitlines()), "")
                raise StepFailedError(f"the device's memory is too small for this step: {first_line}") from error
            return LaunchedStep(plan.step, Readback(sampled))

    def poll_background(self) -> tuple[int, ...]:
        return self._background.poll()

    def block_bytes(self) -> StorageBytes:
        """The bytes of its blocks, for a snapshot."""
        return StorageBytes(self.storage)

    def kv_identity(self, settings: EngineSettings) -> dict[str, str]:
        """All that these bytes depend on, by name."""
        return kv_identity(settings.model_dir, self.model.info, self.storage)

    def snapshot_blocks(self, settings: EngineSettings) -> int:
        """How many blocks `settings.kv_snapshot_limit` allows.

        Raises:
            StartupError: it has no room for a block.
        """
        return check_num_blocks(
            "--kv-snapshot-limit", settings.kv_snapshot_limit, self.storage.block_bytes, 1, has_auto=False
        )

    def check(self) -> None:
        self._rows.check(self.num_blocks)

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


def build_runner(settings: EngineSettings) -> ModelRunner:
    """Load a model and give it memory, as the settings say.

    Raises:
        StartupError: one line: what cannot be used, and what to do.
    """
    check_options(settings)
    device = choose_device(settings.device)
    check_device(settings.attention, device)
    if device.type == "cpu":
        torch.set_num_threads(compute_threads(settings.threads))
    # TF32 keeps 10 bits of the mantissa; float32 is asked for where equality matters.
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    return _build_on_cuda(settings, device) if device.type == "cuda" else _build_on_cpu(settings, device)


def _build_on_cpu(settings: EngineSettings, device: torch.device) -> ModelRunner:
    model, dtype = _load(settings, device)
    storage = _make_storage(settings, model, dtype, device, available_memory())
    context_tokens = min(_context_tokens(settings, model), storage.num_blocks * settings.block_size)
    rows = BatchRows(BlockTables(settings.max_running, -(-context_tokens // settings.block_size), device))
    backend = choose_backend(settings.attention, storage, model.info.num_heads)
    return ModelRunner(storage, HostExecutor(model, backend, rows), context_tokens=context_tokens)


def _build_on_cuda(settings: EngineSettings, device: torch.device) -> ModelRunner:
    try:
        from chatserve.model.cuda_setup import CudaSetup, out_of_memory  # noqa: PLC0415 - imports triton
    except ImportError as error:
        raise StartupError(f"{device} needs triton, which cannot be imported ({error}); choose --device cpu") from error

    doing = "the model's weights"
    try:
        model, dtype = _load(settings, device)
        setup = CudaSetup(
            model=model,
            shape=_kv_shape(settings, model),
            dtype=dtype,
            kv_dtype=choose_kv_dtype(settings.kv_cache_dtype, dtype, device),
            device=device,
            attention=settings.attention,
            max_running=settings.max_running,
            max_tokens=settings.batched_tokens(device.type),
            context_tokens=_context_tokens(settings, model),
            graphs=settings.graphs,
        )
        doing = f"steps of {setup.max_tokens} tokens"
        room = cuda_room(device, settings.gpu_memory_utilization, setup.step_bytes())
        doing = "KV"
        storage = _make_storage(settings, model, dtype, device, room)
        executor = setup.executor(storage)
    except torch.OutOfMemoryError as error:
        raise out_of_memory(device, doing) from error
    context_tokens = min(setup.context_tokens, storage.num_blocks * settings.block_size)
    return ModelRunner(storage, executor, context_tokens=context_tokens)


def _load(settings: EngineSettings, device: torch.device) -> tuple[CausalModel, torch.dtype]:
    return load_model(settings.model_dir, device, settings.model_impl, settings.dtype, settings.load_format)


def _kv_shape(settings: EngineSettings, model: CausalModel) -> KVShape:
    info = model.info
    return KVShape(
        num_layers=info.num_layers,
        num_kv_heads=info.num_kv_heads,
        head_dim=info.head_dim,
        block_size=settings.block_size,
    )


def _make_storage(
    settings: EngineSettings, model: CausalModel, dtype: torch.dtype, device: torch.device, free: int
) -> KVStorage:
    shape = _kv_shape(settings, model)
    kv_dtype = choose_kv_dtype(settings.kv_cache_dtype, dtype, device)
    block_bytes = shape.block_elements * kv_dtype.itemsize
    return KVStorage(
        shape,
        num_blocks=device_blocks(settings.kv_cache_memory, block_bytes, free, is_cuda=device.type == "cuda"),
        num_host_blocks=host_blocks(settings.host_cache_memory, block_bytes, device),
        dtype=kv_dtype,
        device=device,
        compute_dtype=dtype,
        scales=model.info.kv_scales,
    )


def _context_tokens(settings: EngineSettings, model: CausalModel) -> int:
    return min(model.info.context_tokens, settings.context_tokens or model.info.context_tokens)
