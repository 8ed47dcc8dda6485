"""The chat service: everything that `chat.v1` can ask for, without a socket in sight.

The server above hands in requests, and gets their answers and events through the callbacks it passes. This is the face
of the package alone: `turns` and `session_requests` do the work, `runtime` keeps the parts going.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from chatserve.chat.completion import Chunk, complete
from chatserve.chat.dependencies import Dependencies
from chatserve.chat.events import AnyEvent
from chatserve.chat.expiry import Expiry
from chatserve.chat.requests import Requests
from chatserve.chat.routing import Router
from chatserve.chat.runtime import CLOSE_TIMEOUT_S, Runtime
from chatserve.chat.session_requests import SessionRequests
from chatserve.chat.store import SessionPage, SessionState
from chatserve.chat.turns import Turns
from chatserve.chat.typing import Typing
from chatserve.errors import StoreUnavailableError
from chatserve.types import MessageId, SessionId, UserId

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from chatserve.chat.requests import Answer


class ChatService:
    """One a process; several may share a store.

    Every request that changes something takes `answer`, which is called with the acknowledgement's fields before the
    events that it causes are published; a request that fails raises a `ChatError` instead.
    """

    def __init__(self, given: Dependencies) -> None:
        self._runtime = Runtime(given)
        self._core = self._runtime.core
        self._requests = Requests(self._core.store)
        self._session_requests = sessions = SessionRequests(self._core)
        self._turns = turns = Turns(self._core)
        self._expiry = None
        if given.expiry_s:
            self._expiry = Expiry(self._core.store, sessions, age_s=given.expiry_s, clock=given.clock)
        self._router = Router(self._requests, sessions, turns, self._runtime.forwarding, self._runtime.health)
        self._typing = Typing(self._core)

    async def start(self) -> None:
        """Go on with what dead processes left unfinished, then begin.

        Raises:
            StoreUnavailableError: the store is away; it may be tried again.
        """
        await self._runtime.start()
        if self._expiry is not None:
            self._runtime.run(self._expiry.run(), "expiry")

    async def drain(self, timeout_s: float) -> None:
        """Take no new turns from now on, and wait for those that are being answered to end."""
        self._router.is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._core.generations.all_ended()

    async def close(self) -> None:
        """Hand over what is being generated, or interrupt it, and stop."""
        self._router.is_draining = True
        await self._typing.close()
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
        await self._router.once("session.create", user, request_id, answer, fields)

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
        await self._router.once("session.update", user, request_id, answer, fields)

    async def delete_session(self, user: UserId, request_id: str, *, answer: Answer, session: SessionId) -> None:
        self._typing.deleted(user, session)
        fields = {"session": session}
        await self._router.once("session.delete", user, request_id, answer, fields)

    async def fork_session(
        self, user: UserId, request_id: str, *, answer: Answer, session: SessionId, message: MessageId
    ) -> None:
        fields = {"session": session, "message": message}
        await self._router.once("session.fork", user, request_id, answer, fields)

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
        self._typing.sent(user, session)
        fields = {"session": session, "parent": parent, "text": text, "params": params}
        await self._router.once("message.send", user, request_id, answer, fields)

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
        await self._router.once("message.edit", user, request_id, answer, fields)

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
        await self._router.once("message.regenerate", user, request_id, answer, fields)

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
        await self._router.once("message.continue", user, request_id, answer, fields)

    async def delete_message(
        self, user: UserId, request_id: str, *, answer: Answer, session: SessionId, message: MessageId
    ) -> None:
        fields = {"session": session, "message": message}
        await self._router.once("message.delete", user, request_id, answer, fields)

    async def select_branch(
        self, user: UserId, request_id: str, *, answer: Answer, session: SessionId, message: MessageId
    ) -> None:
        fields = {"session": session, "message": message}
        await self._router.once("branch.select", user, request_id, answer, fields)

    async def stop_generation(
        self, user: UserId, request_id: str, *, answer: Answer, session: SessionId, message: MessageId
    ) -> None:
        fields = {"session": session, "message": message}
        try:
            await self._router.once("generation.stop", user, request_id, answer, fields)
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
        return await self._core.state(user, session)

    async def replay(self, user: UserId, session: SessionId, after: int) -> list[AnyEvent] | None:
        """Every event later than `after` that has been published; None where a snapshot must be asked for instead."""
        return await self._core.replay(user, session, after)

    async def follow(self, user: UserId, session: SessionId) -> None:
        """From now on all events of a session are published here, whichever process writes them, until `unfollow`.
        To be called before the session is read.

        Raises:
            StoreUnavailableError: that cannot be promised now.
        """
        await self._core.following.follow(user, session)

    def unfollow(self, user: UserId, session: SessionId) -> None:
        self._core.following.unfollow(user, session)

    def user_came(self, user: UserId) -> None:
        """Somebody here wants to know of changes of a user's list of sessions, until `user_left`."""
        self._runtime.follow_user(user)

    def user_left(self, user: UserId) -> None:
        self._runtime.unfollow_user(user)

    def set_subscribers(self, session: SessionId, count: int) -> None:
        """How many sockets follow a session now."""
        if not count:
            self._typing.left(session)
        live = self._core.sessions.set_subscribers(session, count)
        if live is not None:
            self._runtime.orphans.subscribers_changed(live)

    def typing(self, user: UserId, session: SessionId, parent: MessageId | None, text: str | None = None) -> None:
        """A hint that a turn after `parent` may come, and what it begins with. Never fails."""
        self._typing.typed(user, session, parent, text)

    # --- files and the OpenAI API -------------------------------------------------------------------------------------

    async def export(self, user: UserId, session: SessionId) -> dict[str, Any]:
        return await self._session_requests.export(user, session)

    async def import_(self, user: UserId, data: bytes) -> list[SessionId]:
        return await self._session_requests.import_(user, data)

    def complete(
        self, user: UserId, messages: Sequence[Mapping[str, str]], params: object = None
    ) -> AsyncIterator[Chunk]:
        """One answer that is not stored; close the iterator to stop it."""
        self._router.refuse_turns()
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
