"""Keeps the embedded store running: started again when it dies, and stopped from taking more than its disk holds.

Owns no process; the store is the supervisor's to start first and to end.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

from chatserve.errors import StartupError
from chatserve.supervisor.children import RestartPolicy, pause

if TYPE_CHECKING:
    from collections.abc import Callable

    from chatserve.supervisor.parts import EmbeddedStoreLike

LOOK_S: Final = 0.2
"""Within this time a full disk and a death are noticed."""


async def keep_store(store: EmbeddedStoreLike, stopping: asyncio.Event, say: Callable[[str], None]) -> None:
    """Look after a store that runs, until `stopping`. Where it cannot be started again it is tried further, because
    what is missing may come back, such as room on its disk; the engine and what it generates are kept meanwhile.
    """
    policy = RestartPolicy()
    is_there = True
    while not stopping.is_set():
        await pause(stopping, LOOK_S)
        if stopping.is_set():
            return
        if is_there and store.poll() is None:
            if line := await asyncio.to_thread(store.watch_room):
                say(line)
            continue
        delay_s = policy.died(time.monotonic())
        if is_there:
            say("the store process ended; starting it again")
        await pause(stopping, delay_s)
        if stopping.is_set():
            return
        await asyncio.to_thread(store.stop)
        try:
            await asyncio.to_thread(store.start)
            is_there = True
        except StartupError as error:
            is_there = False
            say(f"the store could not be started again, and is tried further: {error}")
