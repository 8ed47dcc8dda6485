"""Requests that change something are done once, however often they are sent.

Owns the requests in flight of this process: a second one with the same (user, id) waits for the first and gets its
answer. What was done before is remembered by the store. A request runs in a task of its own, so that a client that
hangs up in the middle leaves nothing half done; a user's requests begin in the order in which they came, however long
the store takes to say of each whether it is new.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from typing import TYPE_CHECKING, Any

import msgspec

from chatserve.chat.store import Idempotency, Store
from chatserve.errors import ConflictError
from chatserve.types import UserId

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Answer = Callable[[dict[str, Any]], None]


class Request:
    """One request being done."""

    def __init__(self, user: UserId, request_id: str, digest: str) -> None:
        self.user = user
        self.request_id = request_id
        self.digest = digest
        self._waiting: list[Answer] = []
        self._answered: dict[str, Any] | None = None

    @property
    def is_answered(self) -> bool:
        return self._answered is not None

    def listen(self, answer: Answer) -> None:
        if self._answered is None:
            self._waiting.append(answer)
        else:
            answer(self._answered)

    def answer(self, fields: dict[str, Any]) -> None:
        """Acknowledge it to everyone who sent it; exactly once, before its events are published."""
        assert self._answered is None, "a request is answered once"
        self._answered = fields
        for answer in self._waiting:
            answer(fields)

    def answer_earlier(self, answer: bytes) -> None:
        """Acknowledge it as the store says that it was, unless that has been done since."""
        if self._answered is None:
            self.answer(msgspec.json.decode(answer))

    def idempotency(self, fields: dict[str, Any]) -> Idempotency:
        """What the store is to remember, together with what the request changes."""
        return Idempotency(self.request_id, self.digest, msgspec.json.encode(fields))


class Requests:
    """All requests in flight."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._in_flight: dict[tuple[UserId, str], tuple[Request, asyncio.Task[None]]] = {}
        self._last_begun: dict[UserId, asyncio.Event] = {}
        """Of each user's latest request: set when it begins."""

    async def once(
        self,
        user: UserId,
        request_id: str,
        body: tuple[Any, ...],
        answer: Answer,
        work: Callable[[Request], Awaitable[None]],
    ) -> None:
        """Do `work` unless it was done, and call `answer` with the acknowledgement.

        Raises:
            ConflictError: `request_id` was used with another body.
            ChatError: whatever `work` raises.
        """
        digest = _digest(body)
        key = (user, request_id)
        if (in_flight := self._in_flight.get(key)) is not None:
            request, task = in_flight
            if request.digest != digest:
                raise _used_before(request_id)
        else:
            request = Request(user, request_id, digest)
            before, self._last_begun[user] = self._last_begun.get(user), asyncio.Event()
            task = asyncio.create_task(
                self._do(request, work, before, self._last_begun[user]), name=f"request {request_id}"
            )
            self._in_flight[key] = request, task
            task.add_done_callback(lambda done: self._forget(key, done))
        request.listen(answer)
        await asyncio.shield(task)

    async def is_done(self, request: Request) -> bool:
        """Whether a request that is refused now was done elsewhere meanwhile; then it is answered.

        Raises:
            ConflictError: as `once`.
            StoreUnavailableError: that cannot be known now.
        """
        done = await self._store.answer(request.user, request.request_id)
        if done is not None:
            _answer_as_before(request, *done)
        return done is not None

    async def drain(self, timeout_s: float) -> None:
        """Wait for what is in flight, and cancel what does not end in time: its store may be away for ever."""
        tasks = [task for _, task in self._in_flight.values()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _do(
        self,
        request: Request,
        work: Callable[[Request], Awaitable[None]],
        before: asyncio.Event | None,
        begun: asyncio.Event,
    ) -> None:
        try:
            done = await self._store.answer(request.user, request.request_id)
            if before is not None:
                await before.wait()
        finally:
            begun.set()
            if self._last_begun.get(request.user) is begun:
                del self._last_begun[request.user]
        # Nothing is awaited from here to the session's lock, which is first come, first served.
        if done is None:
            await work(request)
        else:
            _answer_as_before(request, *done)

    def _forget(self, key: tuple[UserId, str], task: asyncio.Task[None]) -> None:
        del self._in_flight[key]
        if not task.cancelled():
            task.exception()  # seen: whoever still waits gets it, and nobody may be left to


def _digest(body: tuple[Any, ...]) -> str:
    # Escaped: it is checked only later whether a text is one that UTF-8 can hold.
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:32]


def _answer_as_before(request: Request, digest: str, answer: bytes) -> None:
    if digest != request.digest:
        raise _used_before(request.request_id)
    request.answer_earlier(answer)


def _used_before(request_id: str) -> ConflictError:
    return ConflictError(f"the request id {request_id!r} was used before with another body")
