"""The web workers that share a store: who of them is alive, and which sessions each may hold.

An `Owner` is one process's name, `PLACE/NONCE`. A place (a server's id and a worker's number in it) has one process at
a time: a process that joins at a place proves that the one before it there is gone. A process that dies without a
successor is noticed because it no longer beats. Being judged dead is never trusted with data: what a living process
writes after its leases were taken over is refused by their fences.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final, NewType, Protocol

from chatserve.types import SessionId, UserId

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Owner = NewType("Owner", str)

BEAT_S: Final = 1.0
TTL_S: Final = 5.0
"""A process that has not been heard of for so long may be dead."""


def owner_name(place: str, nonce: str) -> Owner:
    assert "/" not in place, "a slash ends the place"
    return Owner(f"{place}/{nonce}")


def place_of(owner: Owner) -> str:
    return owner.partition("/")[0]


class Standing(enum.Enum):
    ALIVE = "alive"
    SILENT = "silent"
    """Not heard of for `TTL_S`: dead, or its server or store stood still."""
    GONE = "gone"
    """It left, another process took its place, or its sessions were taken over."""


class WorkerRegistry(Protocol):
    """Raises `StoreUnavailableError` from every method when the store does not answer in time."""

    async def join(self, owner: Owner) -> None:
        """Be alive from now on, in place of whoever was at this place."""
        ...

    async def beat(self, owner: Owner) -> Standing:
        """Stay alive. SILENT: the others took this process for dead and forgot it; GONE: another one has its place."""
        ...

    async def leave(self, owner: Owner) -> None:
        """Be gone from now on, for the others to take over what it held."""
        ...

    async def forget(self, owner: Owner) -> None:
        """It is gone, and nothing that it held is left to be taken over."""
        ...

    async def known(self) -> list[Owner]:
        """All that joined and were not forgotten."""
        ...

    async def standings(self, owners: Sequence[Owner]) -> list[Standing]: ...

    async def note(self, owner: Owner, user: UserId, session: SessionId) -> None:
        """Before a lease is taken: so that whoever finds the owner dead finds its sessions."""
        ...

    async def unnote(self, owner: Owner, sessions: Iterable[tuple[UserId, SessionId]]) -> None:
        """The owner holds them no longer."""
        ...

    async def noted(self, owner: Owner) -> list[tuple[UserId, SessionId]]:
        """What an owner may hold; some of it may be another's by now."""
        ...
