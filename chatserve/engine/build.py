"""Puts an engine together around a runner, with sizes that fit each other."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Final, Protocol

from chatserve.cache.kv_manager import KVManager
from chatserve.engine.engine import Engine
from chatserve.engine.messages import EngineInfo
from chatserve.engine.snapshot import BlockBytes, Snapshot
from chatserve.errors import StartupError
from chatserve.sched.plan import Runner
from chatserve.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from chatserve.config import EngineSettings

_LEAST_BLOCKS: Final = 2


class SizedRunner(Runner, Protocol):
    """A runner that knows its model's limits and how many blocks it has room for."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_host_blocks(self) -> int: ...
    @property
    def context_tokens(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def device(self) -> object: ...

    def block_bytes(self) -> BlockBytes:
        """The bytes of its blocks, for a snapshot."""

    def kv_identity(self, settings: EngineSettings) -> dict[str, str]:
        """All that these bytes depend on, by name."""

    def snapshot_blocks(self, settings: EngineSettings) -> int:
        """How many blocks `settings.kv_snapshot_limit` allows."""


def build_engine(settings: EngineSettings, runner: SizedRunner) -> Engine:
    """An engine of a new epoch.

    One block of the pool is set aside in the longest request's reckoning: while it copies a block on write, it holds
    both.

    Raises:
        StartupError: the pool is too small for anything.
    """
    if runner.num_blocks < _LEAST_BLOCKS:
        raise StartupError(
            f"the KV cache has room for {runner.num_blocks} blocks of {settings.block_size} tokens and at least "
            f"{_LEAST_BLOCKS} are needed: raise --kv-cache-memory"
        )
    context_tokens = min(runner.context_tokens, (runner.num_blocks - 1) * settings.block_size)
    if settings.context_tokens:
        context_tokens = min(context_tokens, settings.context_tokens)
    device = str(runner.device)
    kv = KVManager(num_blocks=runner.num_blocks, num_host_blocks=runner.num_host_blocks, block_size=settings.block_size)
    scheduler = Scheduler(
        kv,
        max_batched_tokens=settings.batched_tokens(device.partition(":")[0]),
        max_running=settings.max_running,
        max_queued=settings.max_queued,
        context_tokens=context_tokens,
    )
    info = EngineInfo(
        epoch=secrets.token_hex(8),
        model=settings.model_name,
        context_tokens=context_tokens,
        block_size=settings.block_size,
        vocab_size=runner.vocab_size,
        max_queued=settings.max_queued,
        device=device,
    )
    return Engine(kv, scheduler, runner, info, snapshot=_restore_snapshot(settings, runner, kv))


def _restore_snapshot(settings: EngineSettings, runner: SizedRunner, kv: KVManager) -> Snapshot | None:
    if settings.kv_snapshot is None:
        return None
    snapshot = Snapshot(
        kv,
        runner.block_bytes(),
        settings.kv_snapshot,
        runner.kv_identity(settings),
        max_blocks=runner.snapshot_blocks(settings),
    )
    snapshot.restore()
    return snapshot
