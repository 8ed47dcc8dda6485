"""What is sent arrives as it was when it was sent, in order, however late the copies are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from chatserve_kernels.staging import BUFFERS, PinnedRing, Readback, send_once

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def hold_up() -> None:
    """What is queued ahead of the next copy takes its time."""
    if DEVICE.type == "cuda":
        torch.cuda._sleep(20_000_000)


@pytest.mark.parametrize("num_buffers", [1, BUFFERS, 6])
def test_a_ring_delivers_every_array_as_it_was_when_sent(num_buffers: int) -> None:
    target = torch.zeros(5, dtype=torch.int64, device=DEVICE)
    ring = PinnedRing(5, torch.int64, DEVICE, num_buffers)
    seen = []
    for number in range(3 * num_buffers):
        hold_up()
        ring.acquire(5)[:] = number
        ring.send(target[:4])
        seen.append(target.clone())
    assert [each.tolist() for each in seen] == [[number] * 4 + [0] for number in range(3 * num_buffers)]


def test_parts_arrive_one_after_the_other_however_long_they_are() -> None:
    target = torch.zeros(100, dtype=torch.int32, device=DEVICE)
    ring = PinnedRing(3, torch.int32, DEVICE)
    expected = np.zeros(100, dtype=np.int32)
    for length in (1, 2, 3, 40, 7, 90, 100):
        hold_up()
        parts = np.arange(length, dtype=np.int32) + 1000 * length
        ring.send_parts((parts[: length // 3], parts[length // 3 :]), target)
        expected[:length] = parts
        assert target.tolist() == expected.tolist()


def test_parts_that_the_target_cannot_hold_are_refused() -> None:
    target = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="at most 3 numbers, got 4"):
        PinnedRing(8, torch.int64, DEVICE).send_parts((np.ones(4, dtype=np.int64),), target)


def test_what_is_sent_once_and_read_back_is_what_it_was() -> None:
    array = np.arange(7, dtype=np.int64)
    on_device = send_once(array, DEVICE)
    assert on_device.device.type == DEVICE.type
    hold_up()
    readback = Readback(on_device)
    assert readback.wait() == array.tolist()
    assert readback.is_done()
