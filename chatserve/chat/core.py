"""What the requests of the chat service share: its parts, and the checks and encodings that all of them need."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import msgspec

from chatserve.chat.engine_link import EngineLink
from chatserve.chat.events import AnyEvent
from chatserve.chat.fair_pool import FairPool
from chatserve.chat.following import Following
from chatserve.chat.forgetting import Forgetting
from chatserve.chat.generations import Generations
from chatserve.chat.leases import Leases
from chatserve.chat.prompt import PromptEncoder
from chatserve.chat.quotas import RETRY_AFTER_S
from chatserve.chat.sessions import Sessions
from chatserve.chat.store import MessageRecord, SessionState, Store
from chatserve.chat.tree import USER
from chatserve.chat.workers import Owner
from chatserve.config import Limits
from chatserve.errors import (
    BadParamsError,
    NotFoundError,
    OverloadedError,
    RateLimitedError,
    TooLargeError,
)
from chatserve.types import MessageId, SessionId, UserId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

log = logging.getLogger(__name__)

SMALL_TEXT_CHARS: Final = 2048
"""Encoded on the event loop: handing it to a thread would take longer."""

T = TypeVar("T")


class Announcement(msgspec.Struct, frozen=True):
    """A change of a user's list of sessions, as processes tell each other."""

    origin: Owner
    session: SessionId
    title: str | None
    deleted: bool


class PublishChanged(Protocol):
    """Tells every socket of a user here that the list of sessions changed; `title` is None where it did not."""

    def __call__(self, user: UserId, session: SessionId, title: str | None, *, deleted: bool) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """The parts."""

    store: Store
    leases: Leases
    following: Following
    sessions: Sessions
    link: EngineLink
    forgetting: Forgetting
    generations: Generations
    encoder: PromptEncoder
    limits: Limits
    pool: FairPool
    """Where tokenising is done that would keep the event loop from serving others."""
    clock: Callable[[], float]
    """Seconds since the epoch."""
    new_id: Callable[[], str]
    publish_changed: PublishChanged

    def new_message_id(self) -> MessageId:
        return MessageId(self.new_id())

    def new_session_id(self) -> SessionId:
        return SessionId(self.new_id())

    def announce(self, session: SessionId, title: str | None, *, deleted: bool = False) -> bytes:
        """What goes with a change that the other processes are to tell their sockets of."""
        return msgspec.msgpack.encode(Announcement(self.leases.owner, session, title, deleted))

    async def state(self, user: UserId, session: SessionId) -> SessionState:
        """A session as of the last event that was published here, whoever holds it. Between the moment that it shows
        and the moment that the caller goes on nothing of it is published here.

        Raises:
            NotFoundError: there is no such session for this user.
            StoreUnavailableError: that cannot be known now.
        """
        while True:
            if (live := self.sessions.peek(user, session)) is not None:
                return live.state()
            epoch = self.following.epoch(user, session)
            state = await self.store.load(user, session)
            if self.sessions.peek(user, session) is not None:
                continue
            if state is None:
                raise NotFoundError("there is no such session")
            if self.following.note_read(user, session, state.seq, epoch):
                return state

    async def replay(self, user: UserId, session: SessionId, after: int) -> list[AnyEvent] | None:
        """Every event later than `after` that has been published here; None where that range is not whole."""
        while True:
            if (live := self.sessions.peek(user, session)) is not None:
                if after == live.seq:
                    return []
                events = await self.store.events(user, session, after)
                if events is None or live.seq < after:
                    return None
                return [event for event in events if event.seq <= live.seq]
            epoch = self.following.epoch(user, session)
            events = await self.store.events(user, session, after)
            if self.sessions.peek(user, session) is not None:
                continue
            if events is None:
                return None
            if self.following.note_read(user, session, events[-1].seq if events else after, epoch):
                return events

    def check_load(self, user: UserId) -> None:
        """Whether one more answer of this user may begin here. What they have running on other servers the store knows.

        Raises:
            RateLimitedError: they have as many as one user may.
            OverloadedError: too many wait for the engine.
            EngineUnavailableError: nobody can say.
        """
        running, most = self.link.num_runs(user), self.limits.max_generations_per_user
        if running >= most:
            raise RateLimitedError.of(running, most, RETRY_AFTER_S)
        waiting, most = self.link.num_waiting, self.link.info().max_queued
        if waiting >= most:
            detail = f"{waiting} requests are waiting for the model; at most {most} may"
            raise OverloadedError(detail, retry_after_s=RETRY_AFTER_S)

    def check_text(self, field: str, text: object) -> None:
        """Raises:
        BadParamsError: it is no text.
        TooLargeError: it is longer than `limits` allow.
        """
        most = {
            "text": self.limits.max_text_bytes,
            "title": self.limits.max_title_bytes,
            "system": self.limits.max_system_bytes,
        }[field]
        if not isinstance(text, str):
            raise BadParamsError.of(field, text, "a string")
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError:
            raise BadParamsError.of(field, text, "Unicode text without lone surrogates") from None
        if num_bytes > most:
            raise TooLargeError.of(field, num_bytes, most)

    async def in_thread(self, user: UserId, num_chars: int, work: Callable[[], T]) -> T:
        """Run tokenising where it does not keep the event loop from serving others, at this user's turn."""
        if num_chars <= SMALL_TEXT_CHARS:
            return work()
        return await self.pool.run(user, work)

    async def encode(
        self, user: UserId, system: str | None, path: Sequence[MessageRecord]
    ) -> dict[MessageId, MessageRecord]:
        """The messages of a path from the root whose ids are missing or belong to another system prompt, encoded."""
        encoded_for = self.encoder.encoded_for(system)
        todo = [
            m
            for m in path
            if (m.encoded_for != encoded_for if m.parent is None else not m.token_ids and (m.text or m.role == USER))
        ]

        def work() -> dict[MessageId, MessageRecord]:
            encoded: dict[MessageId, MessageRecord] = {}
            for m in todo:
                changes: dict[str, Any]
                if m.parent is None:
                    changes = {"token_ids": self.encoder.encode_root(system, m.text), "encoded_for": encoded_for}
                elif m.role == USER:
                    changes = {"token_ids": self.encoder.encode_turn(m.text)}
                else:
                    changes = {"token_ids": self.encoder.encode_answer(m.text)}
                encoded[m.message] = msgspec.structs.replace(m, **changes)
            return encoded

        num_chars = sum(len(m.text) for m in todo) + (len(system or "") if todo else 0)
        return await self.in_thread(user, num_chars, work)
