"""Every specialisation compiles for a Hopper GPU, without one; those of decode spill no registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "kernels"
KEPT_ACROSS_WARPGROUPS = {"hopper wide: bfloat16 128 window softcap": 32}
"""Bytes that hold arguments, read once an item, outside of the loop over tiles."""


def compiled(*arguments: str) -> dict[str, dict[str, int]]:
    """In a process of its own, since this one may have chosen the interpreter."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(KERNELS)}
    command = [sys.executable, "-W", "ignore", "-m", "chatserve_kernels.compile", *arguments]
    return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


def test_decode_kernels_fit_their_registers():
    usages = compiled("--head-dim", "128", "--dtype", "bfloat16")
    assert len(usages) == 22
    for name, usage in usages.items():
        if "prefill" not in name:
            assert usage["stack_bytes"] <= KEPT_ACROSS_WARPGROUPS.get(name, 0), f"{name} spills"
    narrow = usages["hopper beside: bfloat16 128"]
    assert 2 * narrow["registers"] * 256 <= 65_536
    assert 2 * (narrow["shared_bytes"] + 1024) <= 228 * 1024, "two do not fit a multiprocessor"


def test_other_heads_and_types_compile_and_fit_shared_memory():
    usages = compiled("--head-dim", "64", "256", "--dtype", "bfloat16", "--plain")
    usages |= compiled("--head-dim", "128", "256", "--dtype", "float32", "--plain")
    assert len(usages) == 9 + 6 + 2 * 6
    for name, usage in usages.items():
        assert usage["shared_bytes"] <= 227 * 1024, f"{name} does not fit"
        if "prefill" not in name:
            assert usage["stack_bytes"] == 0, f"{name} spills"
