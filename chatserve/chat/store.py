"""What the chat layer asks of a store, and the records that it keeps.

The truth of a session is a tree of messages with parent pointers. All changes go through `Store.commit` (one atomic
script: preconditions, writes, event numbers, idempotency) or `Store.append` (one pipelined write for all the text that
a step produced). A read that fails raises `StoreUnavailableError`; it is never answered as "empty".

Who changes a session holds its lease: an owner (a web worker's process) and a fence, a number that rises with each new
owner. Every write names the fence that its writer was given, and one that is no longer the session's is refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from chatserve.chat.events import AnyEvent, Usage
from chatserve.chat.feed import Feed
from chatserve.chat.quotas import Quota
from chatserve.chat.workers import Owner, WorkerRegistry
from chatserve.errors import ChatError
from chatserve.types import MessageId, SessionId, UserId

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence


class OwnedElsewhereError(ChatError):
    """Another process holds the session's lease: what is asked of the session is to be asked there."""

    code = "store_unavailable"
    retryable = True
    http_status = 503

    def __init__(self, owner: Owner) -> None:
        super().__init__("another server has this conversation just now; try again in a moment")
        self.owner = owner


class LeaseLostError(ChatError):
    """The writer's lease was taken over: what it knows of the session is out of date, and nothing was written."""

    code = "store_unavailable"
    retryable = True
    http_status = 503

    def __init__(self) -> None:
        super().__init__("another server took this conversation over; try again in a moment")


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
    num_kept_tokens: int = 0
    """How many of its token ids were there before the present attempt."""


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
    fence: int = 0
    """Of the last lease; 0: nobody ever held one."""


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
    stream; those of a deletion are numbered only. Whoever follows the session (`Feed`) is told all of them.

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
    fence: int = 0
    """Of the writer's lease; that of a new session, where it creates one."""
    seq: int = 0
    """Of the last event that the writer knows. A store that has not got so far has lost something."""
    owner: Owner = Owner("")
    """Who gets the lease of a session that it creates."""
    quota: Quota = Quota()
    """What its user may have; a change that is not the user's wish (an answer ends) is bound by none."""
    announcement: bytes = b""
    """What those who follow the user's list of sessions are told."""


class Committed(msgspec.Struct, frozen=True):
    """`first_seq` numbers the first event. If the request had been done before, `answer` is that answer, `first_seq` is
    0 and nothing was changed.
    """

    first_seq: int
    answer: bytes | None = None


class Lease(msgspec.Struct, frozen=True):
    """The fence to write with, and the number of the session's last event."""

    fence: int
    seq: int


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """Text and tokens to append to a message that is being generated, with one event.

    (message, attempt, `first_token`) is its write id: a repeat returns the first result, and must be unchanged: after a
    failure send the same deltas again, not a merger of them. `first_token` counts the tokens that the attempt has had
    before, so each delta but the last has tokens; one that does not follow what is there is refused.
    """

    user: UserId
    session: SessionId
    message: MessageId
    attempt: int
    first_token: int
    token_ids: tuple[int, ...]
    text: str
    fence: int = 0


class Store(Protocol):
    """Raises `StoreUnavailableError` from every method when the store does not answer in time."""

    @property
    def workers(self) -> WorkerRegistry: ...

    def open_feed(self, owner: Owner) -> Feed:
        """A new way to hear what others write, for one process."""
        ...

    async def acquire(
        self, user: UserId, session: SessionId, owner: Owner, *, instead_of: Owner | None = None
    ) -> Lease:
        """Take a session's lease where it is free, is ours already, or is that of `instead_of`, whom the caller knows
        to be dead. Whoever held it before can write no more, and is told so.

        Raises:
            NotFoundError: the session does not exist, or was deleted.
            OwnedElsewhereError: somebody else has it.
        """
        ...

    async def release(self, user: UserId, session: SessionId, fence: int, *, lost_up_to: int = 0) -> None:
        """Give a lease back, so that anyone may take it. Does nothing where it is another's by now. Where the store has
        lost events up to a number, the next one gets a number that leaves a hole after it.
        """
        ...

    async def commit(self, change: Transaction) -> Committed:
        """Apply one change.

        Raises:
            NotFoundError: the session does not exist, or was deleted.
            ConflictError: the idempotency key was used with another body, or the session to create exists.
            QuotaExceededError, RateLimitedError: the user would have more than the change's `quota`.
            LeaseLostError: the fence is not that of the session's lease, or the store is behind `seq`.
        """
        ...

    async def append(self, deltas: Sequence[Delta]) -> list[int | None]:
        """One pipelined write; each delta's event number, or None where its session or message is gone, is no longer
        generating under that attempt, its lease is another's, or the text before it is not there.
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

    def untouched(self, before: float) -> AsyncIterator[tuple[UserId, SessionId]]:
        """The sessions of all users that were last changed before a time (seconds since the epoch)."""
        ...

    async def unfinished(self, sessions: Sequence[tuple[UserId, SessionId]]) -> list[tuple[UserId, SessionId]]:
        """Those of the sessions that have a message which is being generated, or was when its server died."""
        ...

    async def ping(self) -> None:
        """Return if the store answers and takes writes."""
        ...

    async def close(self) -> None: ...
