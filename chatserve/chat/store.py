"""What the chat layer asks of a store, and the records that it keeps.

The truth of a session is a tree of messages with parent pointers. All changes go through `Store.commit` (one atomic
script: preconditions, writes, event numbers, idempotency) or `Store.append` (one pipelined write for all the text that
a step produced). A read that fails raises `StoreUnavailableError`; it is never answered as "empty".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from chatserve.chat.events import AnyEvent, Usage
from chatserve.types import MessageId, SessionId, UserId

if TYPE_CHECKING:
    from collections.abc import Sequence


class MessageRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message as stored.

    `token_ids` of a user message are what follows its parent's own ids in the prompt (the parent's closing, this turn,
    the opening of an answer); of an assistant message, what was generated, without the stop token. They are encoded
    once and never again; `encoded_for` names the system prompt and template that a root message's ids depend on.
    """

    message: MessageId
    parent: MessageId | None
    role: str
    text: str
    status: str
    created_at: float
    """Seconds since the epoch."""
    token_ids: tuple[int, ...] = ()
    encoded_for: str = ""
    child: MessageId | None = None
    """The chosen child at this fork; None: the newest."""
    usage: Usage = Usage()
    seed: int | None = None
    params: dict[str, Any] = {}
    attempt: int = 0
    """Counts the generations of this message (continue raises it)."""


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    session: SessionId
    user: UserId
    title: str
    system: str | None
    params: dict[str, Any]
    leaf: MessageId | None
    root_child: MessageId | None = None
    """The chosen one of the messages without a parent; None: the newest."""
    version: int
    created_at: float
    updated_at: float


class SessionState(msgspec.Struct, frozen=True, kw_only=True):
    """A whole session as of `seq`; messages in creation order, which puts parents before children."""

    record: SessionRecord
    seq: int
    messages: tuple[MessageRecord, ...]


class SessionSummary(msgspec.Struct, frozen=True):
    session: SessionId
    title: str
    updated_at: float
    messages: int


class SessionPage(msgspec.Struct, frozen=True):
    sessions: tuple[SessionSummary, ...]
    cursor: str | None


class Idempotency(msgspec.Struct, frozen=True):
    """A client's request `id` with a digest of its body, and the answer to give whoever sends it again."""

    request_id: str
    digest: str
    answer: bytes
    """JSON."""


class Transaction(msgspec.Struct, frozen=True, kw_only=True):
    """One atomic change of one session. Everything in it is done, or nothing.

    `create` demands a `record` and that the session does not exist (else `ConflictError`); its absence, that it does
    and is not deleted (else `NotFoundError`: a late write never brings a deleted session back). `deletes` remove
    messages, then `puts` insert or replace whole ones. Events are numbered in order and appended to the session's
    stream; those of a deletion are numbered only.

    While a message has the status `generating`, its text and token ids grow by `append` alone: a put that leaves it
    generating under the same attempt changes its other fields and keeps what was appended. A put with any other status
    ends that, and its text and token ids are final.
    """

    user: UserId
    session: SessionId
    create: bool = False
    delete: bool = False
    record: SessionRecord | None = None
    puts: tuple[MessageRecord, ...] = ()
    deletes: tuple[MessageId, ...] = ()
    events: tuple[AnyEvent, ...] = ()
    idempotency: Idempotency | None = None
    write_id: str = ""
    """A retry with the same id (of this session's last writes) returns the first result and changes nothing."""


class Committed(msgspec.Struct, frozen=True):
    """`first_seq` numbers the first event. If the request had been done before, `answer` is that answer, `first_seq` is
    0 and nothing was changed.
    """

    first_seq: int
    answer: bytes | None = None


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """Text and tokens to append to a message that is being generated, with one event.

    (message, attempt, `first_token`) is its write id: a repeat returns the first result, and must be unchanged: after a
    failure send the same deltas again, not a merger of them. `first_token` rises from delta to delta of an attempt, so
    each but the last has tokens.
    """

    user: UserId
    session: SessionId
    message: MessageId
    attempt: int
    first_token: int
    token_ids: tuple[int, ...]
    text: str


class Store(Protocol):
    """Raises `StoreUnavailableError` from every method when the store does not answer in time."""

    async def commit(self, change: Transaction) -> Committed:
        """Apply one change.

        Raises:
            NotFoundError: the session does not exist, or was deleted.
            ConflictError: the idempotency key was used with another body, or the session to create exists.
        """
        ...

    async def append(self, deltas: Sequence[Delta]) -> list[int | None]:
        """One pipelined write; each delta's event number, or None where its session or message is gone, or is no longer
        generating under that attempt.
        """
        ...

    async def answer(self, user: UserId, request_id: str) -> tuple[str, bytes] | None:
        """Digest and answer of a request of the last 20 minutes."""
        ...

    async def load(self, user: UserId, session: SessionId) -> SessionState | None:
        """A session as of one moment, with the text generated so far; None: it does not exist for this user."""
        ...

    async def events(self, user: UserId, session: SessionId, after: int) -> list[AnyEvent] | None:
        """Every event with a number above `after`, in order; None where that range is not whole (trimmed, or `after` is
        ahead of the session) or there is no such session.
        """
        ...

    async def list_sessions(self, user: UserId, limit: int, cursor: str | None, query: str | None) -> SessionPage:
        """Newest first. `query` is looked for in titles and texts, case ignored.

        Raises:
            BadParamsError: the cursor is not one of ours.
        """
        ...

    async def unfinished(self) -> list[tuple[UserId, SessionId]]:
        """Sessions with a message that was being generated when its server died."""
        ...

    async def ping(self) -> None:
        """Return if the store answers."""
        ...

    async def close(self) -> None: ...
