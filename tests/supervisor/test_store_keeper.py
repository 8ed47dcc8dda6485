"""The store is started again, for as long as it takes."""

from __future__ import annotations

import asyncio

from chatserve.errors import StartupError
from chatserve.supervisor.store_keeper import keep_store


class DyingStore:
    """Has died, and has no room for its next start; then it runs, and says once that its disk is full."""

    url = "unix:///nowhere"

    def __init__(self) -> None:
        self.starts = 0
        self.lines = ["the disk is full"]
        self.looked = asyncio.Event()

    def start(self) -> None:
        self.starts += 1
        if self.starts == 1:
            raise StartupError("no room")

    def stop(self) -> None:
        pass

    def poll(self) -> int | None:
        return None if self.starts > 1 else -9

    def watch_room(self) -> str | None:
        return self.lines.pop() if self.lines else None


async def test_a_store_that_cannot_be_started_again_is_tried_further() -> None:
    store, said, stopping = DyingStore(), [], asyncio.Event()

    def say(line: str) -> None:
        said.append(line)
        if "full" in line:
            stopping.set()

    async with asyncio.timeout(20):
        await keep_store(store, stopping, say)
    assert said == [
        "the store process ended; starting it again",
        "the store could not be started again, and is tried further: no room",
        "the disk is full",
    ]
