"""The chat service: everything that `chat.v1` can ask for, without a socket in sight.

The server above hands in requests, and gets their answers and events through the callbacks it passes. This is the face
of the package alone: `turns` and `session_requests` do the work, `runtime` keeps the parts going.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from chatserve.chat.completion import Chunk, complete
from chatserve.chat.core import PublishChanged
from chatserve.chat.engine_link import EngineClient
from chatserve.chat.events import AnyEvent
from chatserve.chat.prompt import PromptEncoder
from chatserve.chat.requests import Requests
from chatserve.chat.runtime import CLOSE_TIMEOUT_S, Runtime
from chatserve.chat.session_requests import SessionRequests
from chatserve.chat.store import SessionPage, SessionState, Store
from chatserve.chat.turns import Turns
from chatserve.config import Limits
from chatserve.errors import EngineUnavailableError, StoreUnavailableError
from chatserve.types import MessageId, SessionId, UserId

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from chatserve.chat.requests import Answer
    from chatserve.chat.sessions import Publish


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
        engine_patience_s: float = 300.0,
        engine_silence_s: float = 10.0,
        on_crash: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    ) -> None:
        """`publish` gets the events of one session in the order of their numbers; `publish_health` a component and the
        time since which it has been away, None when it is back. What waits for an engine longer than
        `engine_patience_s` is interrupted; one that says nothing for `engine_silence_s` counts as away. `on_crash` is
        called when one of the service's own tasks dies of a bug (None: the process is told to end). `clock` is in
        seconds since the epoch.
        """
        self._runtime = Runtime(
            store=store,
            engine=engine,
            encoder=encoder,
            limits=limits,
            publish=publish,
            publish_changed=publish_changed,
            publish_health=publish_health,
            orphan_grace_s=orphan_grace_s,
            engine_patience_s=engine_patience_s,
            engine_silence_s=engine_silence_s,
            on_crash=on_crash,
            clock=clock,
            monotonic=monotonic,
            new_id=new_id,
        )
        self._core = self._runtime.core
        self._requests = Requests(self._core.store)
        self._session_requests = SessionRequests(self._core)
        self._turns = Turns(self._core)

    async def start(self) -> None:
        """Mark what a dead process left unfinished as interrupted, then begin.

        Raises:
            StoreUnavailableError: the store is away.
        """
        await self._runtime.start()

    async def close(self) -> None:
        """Interrupt what is being generated, store that, and stop."""
        await self._requests.drain(CLOSE_TIMEOUT_S)
        await self._runtime.close()

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
        fields = {"title": title, "system": system, "params": params}
        await self._once("session.create", self._session_requests.create, user, request_id, answer, fields)

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
        fields = {"session": session, "title": title, "system": system, "params": params}
        await self._once("session.update", self._session_requests.update, user, request_id, answer, fields)

    async def delete_session(self, user: UserId, request_id: str, *, answer: Answer, session: SessionId) -> None:
        fields = {"session": session}
        await self._once("session.delete", self._session_requests.delete, user, request_id, answer, fields)

    async def fork_session(
        self, user: UserId, request_id: str, *, answer: Answer, session: SessionId, message: MessageId
    ) -> None:
        fields = {"session": session, "message": message}
        await self._once("session.fork", self._session_requests.fork, user, request_id, answer, fields)

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
        fields = {"session": session, "parent": parent, "text": text, "params": params}
        await self._once("message.send", self._turns.send, user, request_id, answer, fields)

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
        fields = {"session": session, "message": message, "text": text, "params": params}
        await self._once("message.edit", self._turns.edit, user, request_id, answer, fields)

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
        fields = {"session": session, "message": message, "params": params}
        await self._once("message.regenerate", self._turns.regenerate, user, request_id, answer, fields)

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
        fields = {"session": session, "message": message, "params": params}
        await self._once("message.continue", self._turns.continue_, user, request_id, answer, fields)

    async def delete_message(
        self, user: UserId, request_id: str, *, answer: Answer, session: SessionId, message: MessageId
    ) -> None:
        fields = {"session": session, "message": message}
        await self._once("message.delete", self._turns.delete, user, request_id, answer, fields)

    async def select_branch(
        self, user: UserId, request_id: str, *, answer: Answer, session: SessionId, message: MessageId
    ) -> None:
        fields = {"session": session, "message": message}
        await self._once("branch.select", self._turns.select, user, request_id, answer, fields)

    async def stop_generation(
        self, user: UserId, request_id: str, *, answer: Answer, session: SessionId, message: MessageId
    ) -> None:
        fields = {"session": session, "message": message}
        try:
            await self._once("generation.stop", self._turns.stop, user, request_id, answer, fields)
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
        if live is not None and path is not None and live.may_hint(self._core.clock()):
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
    def engine_is_silent(self) -> bool:
        """It is connected, and has not answered for too long."""
        return self._runtime.engine_watch.is_silent

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
        kind: str,
        do: Callable[..., Awaitable[None]],
        user: UserId,
        request_id: str,
        answer: Answer,
        fields: dict[str, Any],
    ) -> None:
        """Do a request with these fields, unless it was done."""
        self._runtime.health.require()
        given = {name: value for name, value in fields.items() if value is not UNSET}
        await self._requests.once(user, request_id, (kind, given), answer, lambda request: do(request, user, **fields))
