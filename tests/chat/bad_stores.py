"""Stores in memory that fail, lose replies, hold them back or are slow, as a test tells them to."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from chatserve.chat.store import Committed, Delta, SessionState, Transaction
from chatserve.errors import StoreUnavailableError
from chatserve.types import SessionId, UserId
from tests.fakes.memory_store import MemoryStore


class FlakyStore(MemoryStore):
    """Fails some calls, before or after it has done them: a caller cannot know which."""

    def __init__(self) -> None:
        super().__init__()
        self.plan: list[str] = []

    async def _flaky(self, work: object) -> object:
        fate = self.plan.pop(0) if self.plan else "ok"
        if fate == "lost":
            work.close()
            raise StoreUnavailableError("no answer")
        result = await work
        if fate == "done":
            raise StoreUnavailableError("no answer")
        return result

    async def commit(self, change: Transaction) -> Committed:
        return await self._flaky(super().commit(change))

    async def append(self, deltas: Sequence[Delta]) -> list[int | None]:
        return await self._flaky(super().append(deltas))


class LossyStore(MemoryStore):
    """Does what it is asked while `lossy` and keeps the replies until `lost`, when all of them fail at once."""

    def __init__(self) -> None:
        super().__init__()
        self.lossy = False
        self.num_kept = {"append": 0, "commit": 0}
        self.lost = asyncio.Event()
        self.may_append = asyncio.Event()
        self.may_append.set()

    async def commit(self, change: Transaction) -> Committed:
        lossy, committed = self.lossy, await super().commit(change)
        await self._reply("commit", lossy=lossy)
        return committed

    async def append(self, deltas: Sequence[Delta]) -> list[int | None]:
        await self.may_append.wait()
        lossy, seqs = self.lossy, await super().append(deltas)
        await self._reply("append", lossy=lossy)
        return seqs

    async def _reply(self, kind: str, *, lossy: bool) -> None:
        if lossy:
            self.num_kept[kind] += 1
            await self.lost.wait()
            raise StoreUnavailableError("no answer")


class GatedStore(MemoryStore):
    """Writes text only as often as it is told to, while there is a `gate_of_text`."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_of_text: asyncio.Semaphore | None = None
        self.waiting: Sequence[Delta] = ()

    async def append(self, deltas: Sequence[Delta]) -> list[int | None]:
        if self.gate_of_text is not None:
            self.waiting = deltas
            await self.gate_of_text.acquire()
            self.waiting = ()
        return await super().append(deltas)


class LosesAnEnd(MemoryStore):
    """Stores the end of `victim`, says so only by failing, and that not before `lost`."""

    def __init__(self) -> None:
        super().__init__()
        self.victim = ""
        self.lost = asyncio.Event()

    async def commit(self, change: Transaction) -> Committed:
        committed = await super().commit(change)
        if self.victim and change.write_id == f"end:{self.victim}:0":
            self.victim = ""
            await self.lost.wait()
            raise StoreUnavailableError("no answer")
        return committed


class SlowStore(MemoryStore):
    """Reads sessions when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[asyncio.Future[None]] = []

    async def load(self, user: UserId, session: SessionId) -> SessionState | None:
        self.reads.append(asyncio.get_running_loop().create_future())
        await self.reads[-1]
        return await super().load(user, session)
