"""The host pool is whole from the start, and pinned slab by slab beside whoever uses it."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from chatserve.model.host_memory import HostMemory


def _wait(go: threading.Event) -> None:
    assert go.wait(10)


@pytest.mark.parametrize(("num_blocks", "ends"), [(1, [1]), (5, [5]), (6, [5, 6]), (12, [5, 10, 12])])
def test_slabs_are_pinned_in_order_until_all_blocks_are(num_blocks: int, ends: list[int]) -> None:
    pinned: list[int] = []
    memory = HostMemory(torch.zeros(num_blocks, 3), 5, pinned.append)
    memory.wait()
    assert pinned == ends
    assert memory.pinned_blocks == num_blocks


def test_blocks_can_be_written_before_they_are_pinned() -> None:
    go = threading.Event()
    memory = HostMemory(torch.zeros(40, 3), 40, lambda _: _wait(go))
    memory.pool[7] = 3.0
    assert memory.pinned_blocks == 0
    go.set()
    memory.wait()
    assert memory.pinned_blocks == 40
    assert bool((memory.pool[7] == 3.0).all())


def test_where_the_system_refuses_the_rest_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    def pin(end: int) -> None:
        if end > 5:
            raise RuntimeError("locked memory is limited")

    memory = HostMemory(torch.zeros(20, 3), 5, pin)
    memory.wait()
    assert memory.pinned_blocks == 5
    assert "only 5 of 20 host blocks are pinned; swapping the others is slower: locked memory" in caplog.text


def test_stopping_ends_it_with_the_slab_at_hand() -> None:
    go = threading.Event()
    memory = HostMemory(torch.zeros(20, 3), 5, lambda _: _wait(go))
    memory.stop()
    go.set()
    memory.wait()
    assert memory.pinned_blocks in {0, 5}


def test_what_was_pinned_is_unpinned_when_the_pool_goes() -> None:
    go, calls = threading.Event(), []

    def pin(end: int) -> None:
        _wait(go)
        calls.append(end)

    memory = HostMemory(torch.zeros(20, 3), 5, pin, lambda: calls.append(-1))
    memory.stop()
    go.set()
    del memory
    gc.collect()
    assert calls in ([-1], [5, -1])


def test_a_cpu_pins_nothing() -> None:
    memory = HostMemory(torch.zeros(4, 3), 4, None)
    memory.wait()
    assert memory.pinned_blocks == 0
