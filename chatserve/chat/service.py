"""The chat service: everything that `chat.v1` can ask for, without a socket in sight.

Owns the parts (sessions, generations, the link to the engine) and the two tasks that keep them going: one takes in what
the engine says, one writes what it produced. The server above hands in requests and gets their answers and events
through the callbacks it passes; the store and the engine below are reached through their interfaces alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from msgspec import UNSET

from chatserve.chat import recovery
from chatserve.chat.completion import Chunk, complete
from chatserve.chat.core import Core, PublishChanged
from chatserve.chat.engine_link import EngineClient, EngineLink
from chatserve.chat.events import AnyEvent
from chatserve.chat.generations import Generations
from chatserve.chat.health import StoreHealth
from chatserve.chat.prompt import PromptEncoder
from chatserve.chat.requests import Request, Requests
from chatserve.chat.session_requests import SessionRequests
from chatserve.chat.sessions import Sessions
from chatserve.chat.store import SessionPage, SessionState, Store
from chatserve.chat.turns import Turns
from chatserve.chat.watched_store import WatchedStore
from chatserve.config import Limits
from chatserve.errors import EngineUnavailableError, StoreUnavailableError
from chatserve.types import MessageId, SessionId, UserId

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from chatserve.chat.requests import Answer
    from chatserve.chat.sessions import Publish

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S: Final = 3.0
"""How long a stopping server waits for the ends of its generations to be stored."""


class ChatService:
    """One a process. Every request that changes something takes `answer`, which is called with the acknowledgement's
    fields before the events that it causes are published; a request that fails raises a `ChatError` instead.
    """

    def __init__(
        self,
        *,
        store: Store,
        engine: EngineClient,
        encoder: PromptEncoder,
        limits: Limits,
        publish: Publish,
        publish_changed: PublishChanged,
        publish_health: Callable[[str, float | None], None],
        orphan_grace_s: float = 60.0,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        """`publish` gets the events of one session in the order of their numbers; `publish_health` a component and the
        time since which it has been away, None when it is back. `clock` is in seconds since the epoch.
        """
        self._publish_health = publish_health
        self._clock = clock
        self._engine_down_since: float | None = None
        self._health = StoreHealth(store, publish=self._store_health, clock=clock)
        store = WatchedStore(store, self._health.report_down)
        sessions = Sessions(store, self._health, publish)
        link = EngineLink(engine, on_up=self._engine_up, on_down=self._engine_down)
        generations = Generations(
            store=store,
            sessions=sessions,
            link=link,
            encoder=encoder,
            health=self._health,
            orphan_grace_s=orphan_grace_s,
            clock=clock,
            monotonic=monotonic,
        )
        sessions.on_reloaded = generations.adopt
        self._core = Core(
            store=store,
            sessions=sessions,
            link=link,
            generations=generations,
            encoder=encoder,
            limits=limits,
            executor=ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenizer"),
            clock=clock,
            monotonic=monotonic,
            new_id=new_id,
            publish_changed=publish_changed,
        )
        self._requests = Requests(store)
        self._session_requests = SessionRequests(self._core)
        self._turns = Turns(self._core)
        self._tasks: list[asyncio.Task[None]] = []
        self._settling: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Mark what a dead process left unfinished as interrupted, then begin.

        Raises:
            StoreUnavailableError: the store is away.
        """
        await recovery.interrupt_unfinished(self._core.store)
        self._tasks = [
            asyncio.create_task(self._core.link.listen(), name="engine events"),
            asyncio.create_task(self._core.generations.write(), name="text writer"),
        ]
        for task in self._tasks:
            task.add_done_callback(_log_crash)

    async def close(self) -> None:
        """Interrupt what is being generated, store that, and stop."""
        await self._requests.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._core.generations.close()
        self._core.generations.abandon()
        for task in (*self._tasks, *self._settling):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._settling, return_exceptions=True)
        await self._health.close()
        self._core.executor.shutdown(wait=False, cancel_futures=True)

    # --- sessions -----------------------------------------------------------------------------------------------------

    async def list_sessions(
        self, user: UserId, *, limit: object = 50, cursor: object = None, query: object = None
    ) -> SessionPage:
        return await self._session_requests.page(user, limit=limit, cursor=cursor, query=query)

    async def create_session(
        self,
        user: UserId,
        request_id: str,
        *,
        answer: Answer,
        title: object = None,
        system: object = None,
        params: object = None,
    ) -> None:
        async def work(request: Request) -> None:
            await self._session_requests.create(request, user, title=title, system=system, params=params)

        await self._once(user, request_id, ("session.create", title, system, params), answer, work)

    async def update_session(
        self,
        user: UserId,
        request_id: str,
        *,
        answer: Answer,
        session: SessionId,
        title: object = UNSET,
        system: object = UNSET,
        params: object = UNSET,
    ) -> None:
        given = {k: v for k, v in (("title", title), ("system", system), ("params", params)) if v is not UNSET}

        async def work(request: Request) -> None:
            await self._session_requests.update(request, user, session, title=title, system=system, params=params)

        await self._once(user, request_id, ("session.update", session, given), answer, work)

    async def delete_session(self, user: UserId, request_id: str, *, answer: Answer, session: SessionId) -> None:
        async def work(request: Request) -> None:
            await self._session_requests.delete(request, user, session)

        await self._once(user, request_id, ("session.delete", session), answer, work)

    async def fork_session(
        self, user: UserId, request_id: str, *, answer: Answer, session: SessionId, message: MessageId
    ) -> None:
        async def work(request: Request) -> None:
            await self._session_requests.fork(request, user, session, message)

        await self._once(user, request_id, ("session.fork", session, message), answer, work)

    # --- messages -----------------------------------------------------------------------------------------------------

    async def send_message(
        self,
        user: UserId,
        request_id: str,
        *,
        answer: Answer,
        session: SessionId,
        parent: MessageId | None,
        text: str,
        params: object = None,
    ) -> None:
        async def work(request: Request) -> None:
            await self._turns.send(request, user, session, parent, text, params)

        await self._once(user, request_id, ("message.send", session, parent, text, params), answer, work)

    async def edit_message(
        self,
        user: UserId,
        request_id: str,
        *,
        answer: Answer,
        session: SessionId,
        message: MessageId,
        text: str,
        params: object = None,
    ) -> None:
        async def work(request: Request) -> None:
            await self._turns.edit(request, user, session, message, text, params)

        await self._once(user, request_id, ("message.edit", session, message, text, params), answer, work)

    async def regenerate_message(
        self,
        user: UserId,
        request_id: str,
        *,
        answer: Answer,
        session: SessionId,
        message: MessageId,
        params: object = None,
    ) -> None:
        async def work(request: Request) -> None:
            await self._turns.regenerate(request, user, session, message, params)

        await self._once(user, request_id, ("message.regenerate", session, message, params), answer, work)

    async def continue_message(
        self,
        user: UserId,
        request_id: str,
        *,
        answer: Answer,
        session: SessionId,
        message: MessageId,
        params: object = None,
    ) -> None:
        async def work(request: Request) -> None:
            await self._turns.continue_(request, user, session, message, params)

        await self._once(user, request_id, ("message.continue", session, message, params), answer, work)

    async def delete_message(
        self, user: UserId, request_id: str, *, answer: Answer, session: SessionId, message: MessageId
    ) -> None:
        async def work(request: Request) -> None:
            await self._turns.delete(request, user, session, message)

        await self._once(user, request_id, ("message.delete", session, message), answer, work)

    async def select_branch(
        self, user: UserId, request_id: str, *, answer: Answer, session: SessionId, message: MessageId
    ) -> None:
        async def work(request: Request) -> None:
            await self._turns.select(request, user, session, message)

        await self._once(user, request_id, ("branch.select", session, message), answer, work)

    async def stop_generation(
        self, user: UserId, request_id: str, *, answer: Answer, session: SessionId, message: MessageId
    ) -> None:
        async def work(request: Request) -> None:
            await self._turns.stop(request, user, session, message)

        try:
            await self._once(user, request_id, ("generation.stop", session, message), answer, work)
        except StoreUnavailableError:
            # Its end cannot be stored now, but nobody wants the text either.
            self._turns.stop_unheard(user, session, message)
            raise

    # --- following ----------------------------------------------------------------------------------------------------

    async def snapshot(self, user: UserId, session: SessionId) -> SessionState:
        """The session as of its last published event. Nothing is published between the moment that it shows and the
        moment that the caller goes on.

        Raises:
            NotFoundError: there is no such session for this user.
        """
        return (await self._core.sessions.get(user, session)).state()

    async def replay(self, user: UserId, session: SessionId, after: int) -> list[AnyEvent] | None:
        """Every event later than `after` that has been published; None where a snapshot must be sent instead.

        Raises:
            NotFoundError: there is no such session for this user.
        """
        live = await self._core.sessions.get(user, session)
        if after == live.seq:
            return []
        events = await self._core.store.events(user, session, after)
        if events is None or live.seq < after:
            return None
        return [event for event in events if event.seq <= live.seq]

    def set_subscribers(self, session: SessionId, count: int) -> None:
        """How many sockets follow a session now."""
        live = self._core.sessions.set_subscribers(session, count)
        if live is not None:
            self._core.generations.subscribers_changed(live)

    def typing(self, user: UserId, session: SessionId, parent: MessageId | None, text: str | None = None) -> None:
        """A hint that a turn after `parent` may come."""
        del text  # drafts are not prefilled
        live = self._core.sessions.peek(user, session)
        path = None if live is None or parent is None else live.paths.get(parent)
        if path is not None:
            with contextlib.suppress(EngineUnavailableError):
                self._core.link.engine.hint(user, path)

    # --- files and the OpenAI API -------------------------------------------------------------------------------------

    async def export(self, user: UserId, session: SessionId) -> dict[str, Any]:
        return await self._session_requests.export(user, session)

    async def import_(self, user: UserId, data: bytes) -> list[SessionId]:
        return await self._session_requests.import_(user, data)

    def complete(
        self, user: UserId, messages: Sequence[Mapping[str, str]], params: object = None
    ) -> AsyncIterator[Chunk]:
        """One answer that is not stored; close the iterator to stop it."""
        return complete(self._core, user, messages, params)

    @property
    def num_generations(self) -> int:
        """Stored messages being generated now."""
        return len(self._core.generations)

    def check(self) -> None:
        """Assert the invariants of every session in memory."""
        for live in self._core.sessions:
            live.check()

    # --- inside -------------------------------------------------------------------------------------------------------

    async def _once(
        self,
        user: UserId,
        request_id: str,
        body: tuple[Any, ...],
        answer: Answer,
        work: Callable[[Request], Awaitable[None]],
    ) -> None:
        self._health.require()
        await self._requests.once(user, request_id, body, answer, work)

    def _store_health(self, component: str, since: float | None) -> None:
        self._publish_health(component, since)
        if since is None:
            task = asyncio.create_task(self._settle(), name="settle uncertain writes")
            self._settling.add(task)
            task.add_done_callback(self._settling.discard)

    async def _settle(self) -> None:
        await self._health.persist(self._core.sessions.settle)

    def _engine_up(self) -> None:
        if self._engine_down_since is not None:
            self._engine_down_since = None
            self._publish_health("engine", None)

    def _engine_down(self) -> None:
        if self._engine_down_since is None:
            self._engine_down_since = self._clock()
            log.warning("the engine is away; what it was generating goes on when it is back")
            self._publish_health("engine", self._engine_down_since)


def _log_crash(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("%s has crashed", task.get_name(), exc_info=error)
