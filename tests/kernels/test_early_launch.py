"""Kernels wait by themselves on GPUs that have the instructions for it, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from chatserve_kernels.early_launch import can_launch_early, early_launch


@pytest.mark.parametrize(("capability", "can"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((12, 0), True)])
def test_hopper_and_later_launch_early(capability, can, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    can_launch_early.cache_clear()
    device = torch.device("cuda", 0)
    assert can_launch_early(device) == can
    assert early_launch(device) == ({"launch_pdl": True} if can else {})
    can_launch_early.cache_clear()


def test_nothing_launches_early_off_cuda():
    assert not can_launch_early(torch.device("cpu"))
    assert early_launch(torch.device("cpu")) == {}
