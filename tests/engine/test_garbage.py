"""The garbage collector looks at everything while nothing runs, and not too often."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from chatserve.engine.garbage import COLLECT_S, IdleCollector


class Knot:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.self = self


@pytest.fixture(autouse=True)
def _collector_as_it_was() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def make_knot() -> weakref.ref[Knot]:
    return weakref.ref(Knot())


def test_garbage_is_collected_while_idle_at_most_once_in_a_while() -> None:
    now = [1000.0]
    collector = IdleCollector(clock=lambda: now[0])
    first = make_knot()
    collector.collect()
    assert first() is None
    second = make_knot()
    now[0] += COLLECT_S - 1
    collector.collect()
    assert second() is not None
    now[0] += 1
    collector.collect()
    assert second() is None


def test_what_stays_is_not_looked_at_again_and_nothing_makes_it_so() -> None:
    IdleCollector(clock=lambda: 0.0).collect()
    assert gc.get_freeze_count() > 1000
    assert gc.get_threshold()[2] >= 1_000_000
