from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def _collector_as_it_was() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()
