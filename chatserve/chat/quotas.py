"""What one user may have: sessions, stored bytes, answers at once.

The store counts, in the script that makes the change, so that the numbers hold over all servers and after any crash.
What no user asked for (an answer's end, whatever its length) is bound by nothing here. Knows no store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from chatserve.errors import ChatError, QuotaExceededError, RateLimitedError

if TYPE_CHECKING:
    from chatserve.config import Limits

RETRY_AFTER_S: Final = 2.0
"""When an answer may have ended."""


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """What a user may have after a change; None: as much as they like."""

    sessions: int | None = None
    stored_bytes: int | None = None
    """Of records, texts and token ids. Text that is being generated counts from its end on."""
    generations: int | None = None
    """That have not ended, the one that the change begins included."""


def quota_of(limits: Limits, *, starts: bool = False) -> Quota:
    """Of a change that adds something, and perhaps starts an answer."""
    return Quota(
        sessions=limits.max_sessions_per_user,
        stored_bytes=limits.max_bytes_per_user,
        generations=limits.max_generations_per_user if starts else None,
    )


def over_quota(quota: Quota, which: str, used: int) -> ChatError:
    """What says that a user's quota of `which` (sessions, bytes or generations) is full with `used`."""
    limits = {"sessions": quota.sessions, "bytes": quota.stored_bytes, "generations": quota.generations}
    limit = limits[which]
    assert limit is not None, f"nothing limits {which}"
    if which == "generations":
        return RateLimitedError.of(used, limit, RETRY_AFTER_S)
    return QuotaExceededError.of(which, used, limit)
