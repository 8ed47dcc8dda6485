"""From a kind of request to what does it, once, in whichever process has its session.

Owns the table of kinds, and the tries that it takes while a lease moves from one process to another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from msgspec import UNSET

from chatserve.chat.forwarding import Forwarding
from chatserve.chat.health import StoreHealth
from chatserve.chat.requests import Request, Requests
from chatserve.chat.session_requests import SessionRequests
from chatserve.chat.store import LeaseLostError, OwnedElsewhereError
from chatserve.chat.turns import Turns
from chatserve.errors import ChatError, OverloadedError
from chatserve.types import UserId

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from chatserve.chat.requests import Answer

MOST_TRIES: Final = 8
"""Of a request whose session is taken each time by others, who are always faster."""
RETRY_AFTER_S: Final = 1.0
_TURNS: Final = frozenset({"message.send", "message.edit", "message.regenerate", "message.continue"})


class Router:
    """All requests that change something."""

    def __init__(
        self, requests: Requests, sessions: SessionRequests, turns: Turns, forwarding: Forwarding, health: StoreHealth
    ) -> None:
        self._requests = requests
        self._forwarding = forwarding
        self._health = health
        self.is_draining = False
        """New turns are refused."""
        self._kinds: dict[str, tuple[Callable[..., Awaitable[None]], tuple[str, ...]]] = {
            "session.create": (sessions.create, ("title", "system", "params")),
            "session.update": (sessions.update, ("session", "title", "system", "params")),
            "session.delete": (sessions.delete, ("session",)),
            "session.fork": (sessions.fork, ("session", "message")),
            "message.send": (turns.send, ("session", "parent", "text", "params")),
            "message.edit": (turns.edit, ("session", "message", "text", "params")),
            "message.regenerate": (turns.regenerate, ("session", "message", "params")),
            "message.continue": (turns.continue_, ("session", "message", "params")),
            "message.delete": (turns.delete, ("session", "message")),
            "branch.select": (turns.select, ("session", "message")),
            "generation.stop": (turns.stop, ("session", "message")),
        }
        forwarding.perform = self._here

    async def once(self, kind: str, user: UserId, request_id: str, answer: Answer, fields: dict[str, Any]) -> None:
        """Do a request with these fields, unless it was done, wherever its session is held.

        Raises:
            ChatError: why it is not done.
        """
        given = {name: value for name, value in fields.items() if value is not UNSET}

        async def work(request: Request) -> None:
            with self._forwarding.pending(request, given.get("session", ""), kind):
                try:
                    await self._somewhere(request, kind, given)
                except ChatError as error:
                    if request.is_answered:
                        return
                    # What was done is often not possible a second time, and a first attempt at it, elsewhere, may have
                    # been done after we looked for its answer. Who is to try again finds it then.
                    if error.retryable or not await self._requests.is_done(request):
                        raise

        await self._begin(kind, user, request_id, answer, given, work)

    def refuse_turns(self) -> None:
        """Raises:
        OverloadedError: this server is being stopped.
        """
        if self.is_draining:
            raise OverloadedError("this server is being stopped; try again in a moment", retry_after_s=RETRY_AFTER_S)

    async def _here(self, user: UserId, request_id: str, kind: str, fields: dict[str, Any], answer: Answer) -> None:
        """Do what another process asks for."""
        await self._begin(kind, user, request_id, answer, fields, lambda request: self._perform(request, kind, fields))

    async def _begin(
        self,
        kind: str,
        user: UserId,
        request_id: str,
        answer: Answer,
        given: dict[str, Any],
        work: Callable[[Request], Awaitable[None]],
    ) -> None:
        self._health.require()
        await self._requests.once(user, request_id, (kind, given), answer, work)

    async def _somewhere(self, request: Request, kind: str, given: dict[str, Any]) -> None:
        for _ in range(MOST_TRIES):
            try:
                await self._perform(request, kind, given)
                return
            except LeaseLostError:
                if request.is_answered:
                    return
            except OwnedElsewhereError as elsewhere:
                if await self._forwarding.ask(elsewhere.owner, request, given["session"], kind, given):
                    return
        raise LeaseLostError

    async def _perform(self, request: Request, kind: str, given: dict[str, Any]) -> None:
        if kind in _TURNS:
            self.refuse_turns()
        do, names = self._kinds[kind]
        await do(request, request.user, **{name: given.get(name, UNSET) for name in names})
