"""What a chaos run counted and measured."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


class Tally:
    """Plain counters that the parts of a run add to."""

    def __init__(self) -> None:
        self.faults: Counter[str] = Counter()
        """By kind, as they were done."""
        self.kills = 0
        """Processes killed."""
        self.recoveries_s: dict[str, list[float]] = defaultdict(list)
        """By kind of fault: from its end until a turn begun after its beginning was answered in full."""
        self.requests: Counter[str] = Counter()
        self.resent = 0
        """Times that a request was sent again because its answer was lost or retryable."""
        self.refusals: Counter[str] = Counter()
        """Retryable errors by code."""
        self.answers_s: list[float] = []
        """From the first sending of a request to its answer."""
        self.reconnects_s: list[float] = []
        self.closes: Counter[int] = Counter()
        self.snapshots = 0
        self.ends: Counter[str] = Counter()
        """Ended answers by status."""
        self.events = 0
        self.messages = 0
        self.characters = 0

    def answered(self, type_: str, seconds: float, sent: int) -> None:
        self.requests[type_] += 1
        self.answers_s.append(seconds)
        self.resent += sent - 1

    def refused(self, code: str) -> None:
        self.refusals[code] += 1

    def reconnected(self, seconds: float) -> None:
        self.reconnects_s.append(seconds)

    def socket_closed(self, code: int) -> None:
        self.closes[int(code)] += 1

    def summary(self) -> dict[str, Any]:
        """For a file."""
        return {
            "faults": dict(self.faults),
            "kills": self.kills,
            "recovery_s": {kind: spread(values) for kind, values in sorted(self.recoveries_s.items())},
            "requests": dict(self.requests),
            "resent": self.resent,
            "refusals": dict(self.refusals),
            "answer_s": spread(self.answers_s),
            "reconnects": len(self.reconnects_s),
            "reconnect_s": spread(self.reconnects_s),
            "closes": {str(code): count for code, count in self.closes.items()},
            "snapshots": self.snapshots,
            "ends": dict(self.ends),
            "events": self.events,
            "messages": self.messages,
            "characters": self.characters,
        }


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that a share `q` of all do not exceed; NaN of none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(q * len(values)) - 1)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """How many, and their median, 99th percentile and largest."""
    if not values:
        return {"count": 0}
    found = {"count": len(values), "p50": quantile(values, 0.5), "p99": quantile(values, 0.99), "max": max(values)}
    return {name: round(value, 4) for name, value in found.items()}
