"""A few threads that users take turns at.

A thread pool serves whoever came first, so a user who pastes a hundred long texts keeps everyone else waiting for all
of them. Here each user has a queue, and a thread that becomes free takes the next user's oldest work: whoever comes
waits for one piece of work of each other user, however much anybody has queued. Called from one event loop; knows
nothing of the work.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from chatserve.types import UserId

T = TypeVar("T")


class FairPool:
    """`num_threads` threads, named after `name`."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix=name)
        self._num_free = num_threads
        self._turns: OrderedDict[UserId, deque[tuple[Callable[[], Any], asyncio.Future[Any]]]] = OrderedDict()
        """Users with work that waits, the next one first; each with theirs, oldest first."""

    @property
    def num_waiting(self) -> int:
        """Pieces of work that no thread has begun."""
        return sum(map(len, self._turns.values()))

    async def run(self, user: UserId, work: Callable[[], T]) -> T:
        """Do `work` in a thread at this user's turn. Whoever is cancelled while waiting gives up the turn."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._turns.setdefault(user, deque()).append((work, future))
        self._start()
        return await future

    def close(self) -> None:
        """Begin nothing more, and wait for nothing: what waits is cancelled."""
        turns, self._turns = self._turns, OrderedDict()
        for waiting in turns.values():
            for _, future in waiting:
                future.cancel()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        """Give each free thread the oldest work of the user whose turn it is."""
        while self._num_free and self._turns:
            user, waiting = self._turns.popitem(last=False)
            work, future = waiting.popleft()
            if waiting:
                self._turns[user] = waiting  # behind everyone else
            if not future.cancelled():
                self._num_free -= 1
                running = asyncio.get_running_loop().run_in_executor(self._executor, work)
                running.add_done_callback(partial(self._done, future))

    def _done(self, future: asyncio.Future[Any], done: asyncio.Future[Any]) -> None:
        self._num_free += 1
        error = asyncio.CancelledError() if done.cancelled() else done.exception()
        if not future.done():
            if isinstance(error, asyncio.CancelledError):
                future.cancel()
            elif error is not None:
                future.set_exception(error)
            else:
                future.set_result(done.result())
        self._start()
