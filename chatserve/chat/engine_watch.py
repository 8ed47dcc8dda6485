"""Notices an engine that is there and says nothing: stopped, swapped out, or hung in a step.

A connection that breaks is noticed by its client at once; a process that merely stands still keeps its socket open. So
an engine that has said nothing for a while is asked, and one that does not answer for `silence_s` counts as away until
it speaks again. Nothing is taken from it: what it was doing goes on where it stood. Knows nothing of runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final

from chatserve.errors import EngineUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from chatserve.chat.engine_link import EngineLink

log = logging.getLogger(__name__)

_TICKS: Final = 10
"""The silence is looked at so many times before it is too long, ..."""
_LONGEST_TICK_S: Final = 1.0
"""... and at least so often."""


class EngineWatch:
    """`run` watches for ever; `on_change` is called when `is_silent` changes."""

    def __init__(self, link: EngineLink, *, silence_s: float, on_change: Callable[[], None]) -> None:
        self._link = link
        self._silence_s = silence_s
        self._tick_s = min(silence_s / _TICKS, _LONGEST_TICK_S)
        self._on_change = on_change
        self._silent_for_s = 0.0
        self._heard = 0
        self._probe: asyncio.Task[None] | None = None
        self.is_silent = False
        """It is connected and has not answered for `silence_s`."""

    async def run(self) -> None:
        """Watch, until cancelled."""
        try:
            while True:
                await asyncio.sleep(self._tick_s)
                self.tick()
        finally:
            if self._probe is not None:
                self._probe.cancel()

    def tick(self) -> None:
        """One tick later. Time is counted in ticks, so that a pause of this process is not taken for the engine's."""
        if self._link.engine.info is None:
            self._silent_for_s = 0.0  # it is gone, which is somebody else's to tell
            return
        if self._link.num_heard != self._heard:
            self._heard = self._link.num_heard
            self._silent_for_s = 0.0
            self._tell(silent=False)
            return
        self._silent_for_s += self._tick_s
        if self._probe is None:
            self._probe = asyncio.create_task(self._ask(), name="engine probe")
        elif self._silent_for_s >= self._silence_s:
            self._tell(silent=True)

    async def _ask(self) -> None:
        try:
            with contextlib.suppress(EngineUnavailableError):
                await self._link.engine.inspect()
                self._link.num_heard += 1
        finally:
            self._probe = None

    def _tell(self, *, silent: bool) -> None:
        if silent == self.is_silent:
            return
        self.is_silent = silent
        if silent:
            log.error("the engine has not answered for %.0f s; what it was doing waits for it", self._silent_for_s)
        else:
            log.warning("the engine answers again")
        self._on_change()
