"""The host pool is whole from the start, and pinned in slabs that end where a page and a block do."""

from __future__ import annotations

import mmap
import threading

import pytest
import torch

from chatserve.model.host_memory import HostMemory

SHAPE = (3, 2, 5)  # 120 bytes in float32: a page and a block end together every 512 blocks


@pytest.mark.parametrize("num_blocks", [1, 511, 512, 513, 2000])
def test_slabs_cover_every_block_once_and_end_with_a_page(num_blocks: int) -> None:
    pinned: list[tuple[int, int]] = []
    memory = HostMemory(
        num_blocks, SHAPE, torch.float32, pin=lambda at, size: pinned.append((at, size)) is None, slab_bytes=64 << 10
    )
    memory.wait()
    assert memory.slab_blocks == 512
    assert memory.pinned_blocks == num_blocks
    next_address = memory.pool.data_ptr()
    for address, size in pinned:
        assert address == next_address
        assert address % mmap.PAGESIZE == 0
        assert size % 120 == 0
        next_address += size
    assert next_address == memory.pool.data_ptr() + num_blocks * 120


def test_blocks_can_be_written_before_and_after_they_are_pinned() -> None:
    go = threading.Event()
    memory = HostMemory(40, SHAPE, torch.float32, pin=lambda *_: go.wait(10))
    memory.pool[7] = 3.0
    assert memory.pinned_blocks == 0
    go.set()
    memory.wait()
    assert memory.pinned_blocks == 40
    assert bool((memory.pool[7] == 3.0).all())


def test_where_the_system_refuses_the_rest_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    answers = iter([True, False])
    memory = HostMemory(2000, SHAPE, torch.float32, pin=lambda *_: next(answers), slab_bytes=64 << 10)
    memory.wait()
    assert memory.pinned_blocks == 512
    assert "only 512 of 2000 host blocks could be pinned" in caplog.text


def test_stopping_ends_it_with_the_slab_at_hand() -> None:
    go = threading.Event()
    memory = HostMemory(2000, SHAPE, torch.float32, pin=lambda *_: go.wait(10), slab_bytes=64 << 10)
    memory.stop()
    go.set()
    memory.wait()
    assert memory.pinned_blocks in {0, 512}


def test_a_cpu_pins_nothing() -> None:
    assert HostMemory(4, SHAPE, torch.bfloat16, pin=None).pool.shape == (4, *SHAPE)
