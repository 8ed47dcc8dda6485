"""Whether the store answers, and telling everyone when that changes.

Owns the one prober that runs while the store is away. Whoever has something to write waits for `up`; new turns are
refused meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final, TypeVar

from chatserve.chat.store import Store
from chatserve.errors import StoreUnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

log = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 0.5
_RELAPSE_S: Final = 10.0
"""A store that fails again so soon answers pings but not writes: it is asked less and less often."""
_LONGEST_RELAPSE_PAUSE_S: Final = 5.0

T = TypeVar("T")


class StoreHealth:
    """Up until an operation says otherwise."""

    def __init__(
        self,
        store: Store,
        *,
        publish: Callable[[str, float | None], None],
        watch: Callable[[asyncio.Task[None]], None],
        clock: Callable[[], float],
    ) -> None:
        self._store = store
        self._publish = publish
        self._watch = watch
        self._clock = clock
        self._up = asyncio.Event()
        self._up.set()
        self._down = asyncio.Event()
        self._prober: asyncio.Task[None] | None = None
        self._recovered_at = float("-inf")
        self._pause_s = _FIRST_PAUSE_S

    @property
    def is_up(self) -> bool:
        return self._up.is_set()

    def require(self) -> None:
        """Refuse at once what the store could not keep.

        Raises:
            StoreUnavailableError: it is away.
        """
        if not self.is_up:
            raise _away()

    def report_down(self, error: StoreUnavailableError) -> None:
        """An operation has failed with `error`."""
        if self.is_up:
            self._up.clear()
            self._down.set()
            relapsed = asyncio.get_running_loop().time() - self._recovered_at < _RELAPSE_S
            self._pause_s = min(2 * self._pause_s, _LONGEST_RELAPSE_PAUSE_S) if relapsed else _FIRST_PAUSE_S
            log.error("%s; new turns are refused, what is generated is kept in memory", error)
            self._publish("store", self._clock())
            self._prober = asyncio.create_task(self._probe(), name="store prober")
            self._prober.add_done_callback(self._watch)

    async def persist(self, write: Callable[[], Awaitable[T]]) -> T:
        """Write what must not be lost: again and again until the store takes it. `write` must be idempotent."""
        while True:
            await self._up.wait()
            try:
                return await write()
            except StoreUnavailableError as error:
                self.report_down(error)

    async def while_up(self, waiting: Coroutine[Any, Any, Any]) -> None:
        """Wait for something that needs the store.

        Raises:
            StoreUnavailableError: it went away first.
        """
        tasks = [asyncio.ensure_future(waiting), asyncio.ensure_future(self._down.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not tasks[0].done():
                raise _away()  # even if it is back by now: what was waited for has not happened
        finally:
            for task in tasks:
                task.cancel()

    async def close(self) -> None:
        if self._prober is not None:
            self._prober.cancel()
            await asyncio.gather(self._prober, return_exceptions=True)

    async def _probe(self) -> None:
        pause_s = self._pause_s
        while True:
            await asyncio.sleep(pause_s)
            pause_s = max(pause_s, min(2 * pause_s, _LONGEST_PAUSE_S))
            try:
                await self._store.ping()
            except StoreUnavailableError:
                continue
            log.warning("the store answers again")
            self._recovered_at = asyncio.get_running_loop().time()
            self._down.clear()
            self._up.set()
            self._publish("store", None)
            return


def _away() -> StoreUnavailableError:
    return StoreUnavailableError("the conversation store is away; try again in a moment")
