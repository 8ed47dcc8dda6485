"""Early launches: a kernel begins while the one before it still runs, and waits before it reads what that one writes.

CUDA's programmatic dependent launch, by Hopper's griddepcontrol instructions, which no older GPU assembles.
"""

from __future__ import annotations

from functools import cache

import torch

FIRST_CAPABILITY = (9, 0)


@cache
def can_launch_early(device: torch.device) -> bool:
    """Whether kernels on `device`, a tensor's, may wait for their predecessor by themselves."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FIRST_CAPABILITY


def early_launch(device: torch.device) -> dict[str, bool]:
    """The launch option, for kernels that wait."""
    return {"launch_pdl": True} if can_launch_early(device) else {}
