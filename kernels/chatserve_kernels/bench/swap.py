"""Moving blocks between the device and pinned host memory, each way and both at once, and what that costs a step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from chatserve_kernels.bench.tables import DTYPE, Bench, Row, free, table
from chatserve_kernels.host_pool import HostPool
from chatserve_kernels.swap import BlockMover

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

POOL_BYTES = 2**31
BLOCK_KIB = (2048, 512, 360, 256, 64)
PLAIN_BYTES = 64 * 2**20


@table("swap")
def measure(bench: Bench) -> Iterator[Row]:
    """A row a block size, of scattered blocks; one of plain copies of 64 MiB; one of a step beside them. The time is
    that of swapping out."""
    del bench
    device = torch.randint(2**40, (POOL_BYTES // 8,), device="cuda")
    host = HostPool(POOL_BYTES // PLAIN_BYTES, (PLAIN_BYTES // 8,), torch.int64)
    host.pin(len(host.blocks))
    host.blocks.random_()
    flat = host.blocks.view(-1)
    for kib in (PLAIN_BYTES // 1024, *BLOCK_KIB):
        words = kib * 128
        num_blocks = min(1024, POOL_BYTES // (8 * words))
        half = num_blocks // 2
        mover = BlockMover(*(pool[: num_blocks * words].view(num_blocks, words) for pool in (device, flat)))
        order = np.random.default_rng(0).permutation(half)
        moves: dict[str, list[Callable[[], object]]] = {
            "out": [lambda mover=mover, order=order: mover.out(order, order[::-1])],
            "into": [lambda mover=mover, order=order, half=half: mover.into(half + order, half + order[::-1])],
        }
        moves["both"] = moves["out"] + moves["into"]
        name = "plain copies of 64 MiB" if kib == PLAIN_BYTES // 1024 else f"blocks of {kib} KiB"
        seconds = {way: _seconds(calls) for way, calls in moves.items()}
        moved = half * words * 8
        rates = {f"{way} GB/s": len(moves[way]) * moved / taken / 1e9 for way, taken in seconds.items()}
        yield Row("swap", name, seconds["out"] * 1e6, more=rates)
        if kib == BLOCK_KIB[0]:
            yield _beside(moves)
    torch.cuda.synchronize()
    host.close()
    del device, mover, moves
    free()


def _seconds(calls: Sequence[Callable[[], object]], repeats: int = 5) -> float:
    """The best of some times, from before the first call until the last copy is done."""
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for done in [call() for call in calls]:
            torch.cuda.current_stream().wait_event(done)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return min(times)


def _beside(moves: dict[str, list[Callable[[], object]]]) -> Row:
    """A replayed step that reads weights and KV as a decode does, alone and beside copies that outlast it."""
    weights = torch.randn(28672, 4096, device="cuda", dtype=DTYPE)
    hidden = torch.randn(64, 4096, device="cuda", dtype=DTYPE)
    kv = torch.randn(2**25, device="cuda", dtype=DTYPE)

    def step() -> None:
        for _ in range(16):
            torch.nn.functional.linear(hidden, weights)
            torch.sum(kv)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replays() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(8):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 8 * 1e3

    us = {}
    for name, calls in {"alone": [], **moves}.items():
        times = []
        for _ in range(5):
            for call in calls:
                call()
            times.append(replays())
        us[name] = float(np.median(times))
    beside = {f"beside {way} us": taken for way, taken in us.items() if way != "alone"}
    return Row("swap", "a step, and beside copies of 2 MiB", us["alone"], more=beside)
