"""Every specialisation for the main shape compiles for a Hopper GPU, without one, and spills no registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "kernels"


def test_decode_kernels_fit_their_registers():
    """In a process of its own, since this one may have chosen the interpreter."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(KERNELS)}
    command = [sys.executable, "-W", "ignore", "-m", "chatserve_kernels.compile", "--head-dim", "128"]
    listing = subprocess.run(
        [*command, "--dtype", "bfloat16"], env=environment, check=True, capture_output=True, text=True
    ).stdout
    usages = json.loads(listing)
    assert len(usages) == 14
    for name, usage in usages.items():
        assert usage["stack_bytes"] == 0, f"{name} spills"
    two_small_and_one_wide = 2 * usages["beside bfloat16 128 up to 256 rows"]["shared_bytes"]
    two_small_and_one_wide += usages["wide bfloat16 128 up to 256 rows"]["shared_bytes"]
    assert two_small_and_one_wide + 3 * 1024 <= 228 * 1024, "they do not fit a multiprocessor together"
