"""Requests on a session that another process holds: they are done there, and answered here.

The asker writes to the owner and asks again until it is answered, finds the owner dead, or may take the lease itself;
what arrives twice is done once, because requests are idempotent. An owner that has no use for a session gives it up
rather than work for others.

On a socket an answer comes before the events of its request, and after those that came before it. The write that does
a request names it on the feed, so its asker answers just before it publishes that write's events, and looks for an
answer in the store before it publishes what it had to read; one that comes by letter waits for the events before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from typing import TYPE_CHECKING, Any, Final, Protocol

from chatserve import errors
from chatserve.chat.feed import Feed
from chatserve.chat.following import Following
from chatserve.chat.leases import Leases
from chatserve.chat.letters import AnyLetter, Ask, Done, Moved, Refused, encode_letter
from chatserve.chat.requests import Request
from chatserve.chat.sessions import Sessions
from chatserve.chat.store import OwnedElsewhereError, Store
from chatserve.chat.workers import Owner
from chatserve.errors import ChatError, StoreUnavailableError
from chatserve.types import SessionId, UserId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

log = logging.getLogger(__name__)

ASK_AGAIN_S: Final = 1.0
UNHEARD_PAUSE_S: Final = 0.1
"""After a letter that nobody heard."""
PATIENCE_S: Final = 30.0


class Perform(Protocol):
    """Does a request of a kind with the fields that a client gave, here and nowhere else."""

    async def __call__(
        self, user: UserId, request_id: str, kind: str, fields: dict[str, Any], answer: Callable[[dict[str, Any]], None]
    ) -> None: ...


class Forwarding:
    """Both ends of it."""

    def __init__(self, store: Store, feed: Feed, leases: Leases, following: Following, sessions: Sessions) -> None:
        self._store = store
        self._feed = feed
        self._leases = leases
        self._following = following
        self._sessions = sessions
        self._asked: dict[int, asyncio.Future[Done | Refused | Moved]] = {}
        self._pending: dict[Request, tuple[SessionId, str]] = {}
        self._numbers = itertools.count(1)
        self._serving: set[asyncio.Task[None]] = set()
        self.perform: Perform
        following.on_answer = self._answered
        following.answer_first = self._answer_first

    # --- the asker's end ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def pending(self, request: Request, session: SessionId, kind: str) -> Iterator[None]:
        """While a request is tried here and there it may turn out to be done: then it is answered before the events
        that tell of it are published.
        """
        self._pending[request] = session, kind
        try:
            yield
        finally:
            del self._pending[request]

    async def ask(self, owner: Owner, request: Request, session: SessionId, kind: str, fields: dict[str, Any]) -> bool:
        """Have `owner` do a `pending` request. True: it is answered; False: the session is to be had, try it here.

        Raises:
            ChatError: what the owner says.
            StoreUnavailableError: it lives and does not answer.
        """
        number = next(self._numbers)
        awaited = self._asked[number] = asyncio.get_running_loop().create_future()
        body = encode_letter(
            Ask(
                number=number,
                reply_to=self._leases.owner,
                user=request.user,
                session=session,
                request_id=request.request_id,
                kind=kind,
                fields=fields,
            )
        )
        try:
            async with asyncio.timeout(PATIENCE_S):
                reply = await self._insist(owner, body, awaited)
        except TimeoutError:
            raise StoreUnavailableError("the server that has this conversation does not answer; try again") from None
        finally:
            del self._asked[number]
        match reply:
            case Done(fields=answer, seq=seq):
                if not request.is_answered:
                    await self._following.caught_up(request.user, session, seq)
                if not request.is_answered:
                    request.answer(answer)
                return True
            case Refused():
                raise _error(reply)
            case _:
                return request.is_answered

    async def _insist(
        self, owner: Owner, body: bytes, reply: asyncio.Future[Done | Refused | Moved]
    ) -> Done | Refused | Moved | None:
        """The owner's reply; None: it is dead."""
        while True:
            pause_s = ASK_AGAIN_S if await self._feed.send(owner, body) else UNHEARD_PAUSE_S
            await asyncio.wait([reply], timeout=pause_s)
            if reply.done():
                return reply.result()
            if await self._leases.is_dead(owner):
                return None

    def _answered(self, user: UserId, request_id: str, answer: bytes) -> None:
        for request in list(self._pending):
            if request.user == user and request.request_id == request_id:
                request.answer_earlier(answer)

    async def _answer_first(self, user: UserId, session: SessionId) -> None:
        # The answer to a stop follows the events of the end, some of which may not have been read yet.
        for request, (its_session, kind) in list(self._pending.items()):
            if request.user == user and its_session == session and kind != "generation.stop":
                try:
                    done = await self._store.answer(user, request.request_id)
                except StoreUnavailableError:
                    return
                if done is not None and done[0] == request.digest:
                    request.answer_earlier(done[1])

    # --- the owner's end ----------------------------------------------------------------------------------------------

    def take(self, letter: AnyLetter) -> None:
        match letter:
            case Ask():
                task = asyncio.create_task(self._serve(letter), name=f"forwarded request {letter.request_id}")
                self._serving.add(task)
                task.add_done_callback(self._served)
            case Done() | Refused() | Moved():
                awaited = self._asked.get(letter.number)
                if awaited is not None and not awaited.done():
                    awaited.set_result(letter)
            case _:
                self._sessions.tenure.doubt(letter.user, letter.session)

    async def drain(self, timeout_s: float) -> None:
        """Wait for what is being done for others."""
        if self._serving:
            _, late = await asyncio.wait(set(self._serving), timeout=timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def _serve(self, ask: Ask) -> None:
        reply: AnyLetter
        try:
            if await self._sessions.tenure.give_up(ask.user, ask.session):
                reply = Moved(ask.number)
            else:
                answers: list[dict[str, Any]] = []
                await self.perform(ask.user, ask.request_id, ask.kind, ask.fields, answers.append)
                live = self._sessions.peek(ask.user, ask.session)
                reply = Done(number=ask.number, fields=answers[0], seq=0 if live is None else live.seq)
        except OwnedElsewhereError:
            reply = Moved(ask.number)
        except ChatError as error:
            reply = Refused(number=ask.number, code=error.code, detail=error.detail, fields=error.fields)
        await self._feed.send(ask.reply_to, encode_letter(reply))

    def _served(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            is_known = isinstance(error, StoreUnavailableError)  # the asker asks again
            log.log(logging.INFO if is_known else logging.ERROR, "%s: %s", task.get_name(), error)


def _error(refused: Refused) -> ChatError:
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, ChatError) and kind.code == refused.code:
            if kind is ChatError:
                continue
            return kind(refused.detail, **refused.fields)
    return errors.InternalError(refused.detail, **refused.fields)
