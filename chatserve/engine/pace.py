"""How fast requests end of late, and so when a place in a full queue may be expected."""

from __future__ import annotations

from typing import Final

FIRST_GUESS_S: Final = 1.0
"""Time between two ends of requests, before any was seen."""
_WINDOW: Final = 16
"""Ends over which the mean is taken, exponentially weighted."""
_LEAST_S: Final = 1.0
_MOST_S: Final = 60.0


class Pace:
    """A running mean of the time between two ends."""

    __slots__ = ("_last_end_s", "_mean_gap_s")

    def __init__(self) -> None:
        self._last_end_s: float | None = None
        self._mean_gap_s = FIRST_GUESS_S

    def note_end(self, now_s: float) -> None:
        """A request has ended, by a clock that never goes back."""
        if self._last_end_s is not None:
            self._mean_gap_s += (now_s - self._last_end_s - self._mean_gap_s) / _WINDOW
        self._last_end_s = now_s

    def retry_after_s(self, num_waiting: int) -> float:
        """About the time in which a tenth of the queue is served, from 1 to 60 seconds."""
        return min(_MOST_S, max(_LEAST_S, self._mean_gap_s * num_waiting / 10))
