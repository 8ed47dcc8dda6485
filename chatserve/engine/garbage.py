"""When Python's garbage collector may look at everything: while nobody waits for a token."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

COLLECT_S: Final = 30.0
"""At least this long between two looks at everything."""
_NEVER: Final = 1_000_000_000
_YOUNG_OBJECTS: Final = 10_000
_YOUNG_COLLECTIONS: Final = 20


class IdleCollector:
    """Lets the garbage collector walk over all objects only while nothing runs.

    A large cache is a million objects, none of them garbage; to look at each takes as long as ten steps of the model,
    in the midst of one. Young objects are collected as ever.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_s = 0.0
        gc.set_threshold(_YOUNG_OBJECTS, _YOUNG_COLLECTIONS, _NEVER)

    def collect(self) -> None:
        """Look at what has come since the last time, if that is a while ago; what is there now stays."""
        if self._clock() < self._next_s:
            return
        gc.collect()
        gc.freeze()
        self._next_s = self._clock() + COLLECT_S
