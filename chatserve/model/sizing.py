"""How much memory KV gets, and how many compute threads: what was asked for, held against what the machine has.

Reads the machine (memory, cgroup limits, processors); must not allocate anything.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from chatserve.errors import StartupError
from chatserve.options import MIN_BLOCKS, check_num_blocks, parse_size

if TYPE_CHECKING:
    from collections.abc import Iterator

_AUTO_CPU_SHARE = 0.25
_AUTO_CPU_BYTES = 2 << 30
_AUTO_HOST_BYTES = 16 << 30
_AUTO_BLOCKS = 1 << 17
"""Most blocks by default: tiny models have tiny blocks, and each costs the block tree a little."""


def cuda_room(device: torch.device, utilization: float, step_bytes: int) -> int:
    """Bytes that KV may take of a CUDA device, beside what is taken already and what steps will.

    Raises:
        StartupError: nothing is left.
    """
    free, total = torch.cuda.mem_get_info(device)
    room = int(total * utilization) - (total - free) - step_bytes
    if room <= 0:
        raise StartupError(
            f"{device} has no memory left for KV: of {total >> 20} MiB --gpu-memory-utilization {utilization:g} allows "
            f"{int(total * utilization) >> 20}, weights and others have {(total - free) >> 20}, steps need "
            f"{step_bytes >> 20}; a larger share or a smaller --max-batched-tokens would help"
        )
    return room


def device_blocks(setting: str, block_bytes: int, free: int, *, is_cuda: bool) -> int:
    """Blocks of the device pool for `--kv-cache-memory`, of `free` bytes.

    Raises:
        StartupError: the value is nonsense, too small for two blocks, or more than there is.
    """
    if setting == "auto":
        budget = free if is_cuda else min(int(free * _AUTO_CPU_SHARE), _AUTO_CPU_BYTES)
        blocks = min(budget // block_bytes, _AUTO_BLOCKS)
        if blocks < MIN_BLOCKS:
            raise StartupError(
                f"{free >> 20} MiB are free, which is too little for KV: {MIN_BLOCKS} blocks of {block_bytes} bytes"
            )
        return blocks
    blocks = check_num_blocks("--kv-cache-memory", setting, block_bytes, MIN_BLOCKS)
    _check_there_is("--kv-cache-memory", setting, blocks * block_bytes, free)
    return blocks


def host_blocks(setting: str, block_bytes: int, device: torch.device) -> int:
    """Blocks of the host pool for `--host-cache-memory`; 0 is allowed and means none.

    Raises:
        StartupError: the value is nonsense or more than there is.
    """
    free = available_memory()
    if setting == "auto":
        most = _AUTO_HOST_BYTES if device.type == "cuda" else _AUTO_CPU_BYTES
        return min(min(int(free * _AUTO_CPU_SHARE), most) // block_bytes, _AUTO_BLOCKS)
    blocks = parse_size("--host-cache-memory", setting, block_bytes)
    _check_there_is("--host-cache-memory", setting, blocks * block_bytes, free)
    return blocks


def available_memory() -> int:
    """Bytes that this process could still use, within its cgroups' limits."""
    limits = list(_cgroup_rooms())
    try:
        meminfo = Path("/proc/meminfo").read_text()
        limits.append(int(re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)[1]) << 10)  # type: ignore[index]
    except (OSError, TypeError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2)
    return min(limits)


def compute_threads(setting: int) -> int:
    """Threads on a CPU: what was asked for, else torch's count of physical cores within this process's share."""
    if setting:
        return setting
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            allowed = min(allowed, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass
    return max(1, min(torch.get_num_threads(), allowed))


def _cgroup_rooms() -> Iterator[int]:
    root = Path("/sys/fs/cgroup")
    for limit_name, usage_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            yield max(0, int((root / limit_name).read_text()) - int((root / usage_name).read_text()))
        except (OSError, ValueError):  # no such controller, or "max"
            continue


def _check_there_is(option: str, setting: str, wanted: int, free: int) -> None:
    if wanted > free:
        raise StartupError(
            f"{option} {setting} is {wanted >> 20} MiB, but only {free >> 20} MiB are free; ask for less"
        )
