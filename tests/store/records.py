"""Records and changes as plain as can be, for whatever a test is not about."""

from __future__ import annotations

import msgspec

from chatserve.chat.events import (
    BranchSelected,
)
from chatserve.chat.store import Delta, MessageRecord, SessionRecord, Transaction
from chatserve.types import MessageId, SessionId, UserId

SESSION = SessionId("s1")


def record(user: UserId, session: SessionId = SESSION, **changes: object) -> SessionRecord:
    plain = SessionRecord(
        session=session,
        user=user,
        title="",
        system=None,
        params={},
        leaf=None,
        version=1,
        created_at=1.5,
        updated_at=1.5,
    )
    return msgspec.structs.replace(plain, **changes)


def message(name: str, **changes: object) -> MessageRecord:
    plain = MessageRecord(
        message=MessageId(name), parent=None, role="user", text=f"text of {name}", status="done", created_at=2.0
    )
    return msgspec.structs.replace(plain, **changes)


def generating(name: str, **changes: object) -> MessageRecord:
    return message(name, role="assistant", status="generating", **{"text": "", **changes})


def create(user: UserId, session: SessionId = SESSION, *puts: MessageRecord, **changes: object) -> Transaction:
    return Transaction(user=user, session=session, create=True, record=record(user, session, **changes), puts=puts)


def change(user: UserId, session: SessionId = SESSION, **fields: object) -> Transaction:
    return Transaction(user=user, session=session, **fields)


def delta(user: UserId, name: str, first_token: int, text: str, attempt: int = 0, **changes: object) -> Delta:
    plain = Delta(
        user=user,
        session=SESSION,
        message=MessageId(name),
        attempt=attempt,
        first_token=first_token,
        token_ids=(first_token,),
        text=text,
    )
    return msgspec.structs.replace(plain, **changes)


def selected(leaf: str | None = None) -> BranchSelected:
    return BranchSelected(session=SESSION, leaf=None if leaf is None else MessageId(leaf))
