"""The engine's promises about its own cost, by the same parts that `chatserve bench engine` measures."""

from __future__ import annotations

import cProfile
import gc
import tracemalloc

import pytest

from chatserve.bench.engine import Bench


def num_calls(num_idle: int) -> float:
    """Function calls a step with eight sessions that decode, over whole blocks of each."""
    bench = Bench(num_running=8, num_idle=num_idle, num_steps=200, idle_tokens=100)
    for number in range(8):
        bench.engine.handle(bench.submit(f"r{number}", 64, None))
    for _ in range(20):
        bench.engine.step()
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(160):
        bench.engine.step()
    profile.disable()
    return sum(entry.callcount for entry in profile.getstats()) / 160


@pytest.mark.usefixtures("_collector_as_it_was")
def test_sessions_that_are_silent_cost_no_step_anything() -> None:
    alone, few, many = (num_calls(num_idle) for num_idle in (0, 600, 1_800))
    assert alone < 8 * 40
    assert few < 2 * alone  # a full pool: every new block has to be taken from somebody, however many there are
    assert many < 1.05 * few + 5


@pytest.mark.usefixtures("_collector_as_it_was")
def test_what_is_remembered_of_a_block_takes_less_than_a_kilobyte() -> None:
    gc.collect()
    tracemalloc.start()
    try:
        bench = Bench(num_running=1, num_idle=300, num_steps=1, idle_tokens=256)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert bench.num_cached > 2000
    assert taken / bench.num_cached < 1024


@pytest.mark.usefixtures("_collector_as_it_was")
def test_the_bench_times_the_real_loop_with_a_real_client() -> None:
    times = Bench(num_running=3, num_idle=5, num_steps=20, idle_tokens=40).run()
    assert len(times.wall) == len(times.cpu) == 20
    assert min(times.wall) > 0
