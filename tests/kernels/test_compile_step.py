"""The kernels around attention compile for a Hopper GPU, without one, and those of sampling for older ones too; none
spills registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "kernels"


def test_step_kernels_fit_their_registers():
    """In a process of its own, since this one may have chosen the interpreter."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(KERNELS)}
    command = [sys.executable, "-W", "ignore", "-m", "chatserve_kernels.compile", "--step", "--dtype", "bfloat16"]
    usages = json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
    assert {name.split()[0] for name in usages} == {"sampling", "RoPE"}
    assert sum(name.endswith("sm_80") for name in usages) == 8
    for name, usage in usages.items():
        assert usage["stack_bytes"] == 0, f"{name} spills"
