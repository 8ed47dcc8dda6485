"""The frames of `chat.v1` as typed values; the JSON schema is generated from them.

Owns the shape of every frame except the events of a session, which the chat layer defines. Knows no sockets and no
state. A field whose default is UNSET is left out on the wire.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

from chatserve.chat.events import AnyEvent, Usage
from chatserve.config import Limits

PROTOCOL: Final = "chat.v1"

RequestIdText = Annotated[str, Meta(min_length=1, max_length=64)]

# --- client to server -------------------------------------------------------------------------------------------------


class ClientFrame(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Unknown fields are ignored; a null in an optional field is its absence, but for `session.update.system`."""


class Resume(msgspec.Struct, frozen=True):
    session: str
    after: Annotated[int, Meta(ge=0)]


class Hello(ClientFrame, frozen=True, kw_only=True, tag="hello"):
    protocol: str
    token: str | None = None
    resume: Annotated[list[Resume], Meta(max_length=1000)] | None = None


class Typing(ClientFrame, frozen=True, kw_only=True, tag="typing"):
    session: str
    parent: str | None
    text: str | None = None


class Ping(ClientFrame, frozen=True, kw_only=True, tag="ping"):
    pass


class Pong(ClientFrame, frozen=True, kw_only=True, tag="pong"):
    pass


class Request(ClientFrame, frozen=True, kw_only=True):
    """Answered by exactly one `ack` or `error` with the same `id`."""

    id: RequestIdText


class SessionList(Request, frozen=True, kw_only=True, tag="session.list"):
    limit: Annotated[int, Meta(ge=1, le=100)] | None = None
    cursor: str | None = None
    query: str | None = None


class SessionCreate(Request, frozen=True, kw_only=True, tag="session.create"):
    title: str | None = None
    system: str | None = None
    params: dict[str, Any] | None = None


class SessionOpen(Request, frozen=True, kw_only=True, tag="session.open"):
    session: str


class SessionClose(Request, frozen=True, kw_only=True, tag="session.close"):
    session: str


class SessionUpdate(Request, frozen=True, kw_only=True, tag="session.update"):
    session: str
    title: str | None = None
    system: str | UnsetType | None = UNSET
    params: dict[str, Any] | None = None


class SessionDelete(Request, frozen=True, kw_only=True, tag="session.delete"):
    session: str


class SessionFork(Request, frozen=True, kw_only=True, tag="session.fork"):
    session: str
    message: str


class MessageSend(Request, frozen=True, kw_only=True, tag="message.send"):
    session: str
    parent: str | None
    text: str
    params: dict[str, Any] | None = None


class MessageEdit(Request, frozen=True, kw_only=True, tag="message.edit"):
    session: str
    message: str
    text: str
    params: dict[str, Any] | None = None


class MessageRegenerate(Request, frozen=True, kw_only=True, tag="message.regenerate"):
    session: str
    message: str
    params: dict[str, Any] | None = None


class MessageContinue(Request, frozen=True, kw_only=True, tag="message.continue"):
    session: str
    message: str
    params: dict[str, Any] | None = None


class MessageDelete(Request, frozen=True, kw_only=True, tag="message.delete"):
    session: str
    message: str


class BranchSelect(Request, frozen=True, kw_only=True, tag="branch.select"):
    session: str
    message: str


class GenerationStop(Request, frozen=True, kw_only=True, tag="generation.stop"):
    session: str
    message: str


AnyRequest = (
    SessionList
    | SessionCreate
    | SessionOpen
    | SessionClose
    | SessionUpdate
    | SessionDelete
    | SessionFork
    | MessageSend
    | MessageEdit
    | MessageRegenerate
    | MessageContinue
    | MessageDelete
    | BranchSelect
    | GenerationStop
)
AnyClientFrame = Hello | Typing | Ping | Pong | AnyRequest

CLIENT_FRAMES: Final[dict[str, type[ClientFrame]]] = {
    str(cls.__struct_config__.tag): cls for cls in AnyClientFrame.__args__
}

# --- server to client -------------------------------------------------------------------------------------------------


class ServerFrame(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    pass


class Welcome(ServerFrame, frozen=True, kw_only=True, tag="welcome"):
    protocol: str
    server: str
    model: str
    context_tokens: int
    user: str
    limits: Limits


class Ack(ServerFrame, frozen=True, kw_only=True, tag="ack"):
    """It also carries what its request promises, such as `session` or `reply`."""

    id: RequestIdText


class Error(ServerFrame, frozen=True, kw_only=True, tag="error"):
    """It also carries what its code promises, such as `field` or `retry_after_s`."""

    id: str | UnsetType = UNSET
    session: str | UnsetType = UNSET
    message: str | UnsetType = UNSET
    code: str
    detail: str
    retryable: bool


class SnapshotMessage(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    parent: str | None
    role: str
    text: str
    status: str
    created_at: float
    """Seconds since the epoch."""
    usage: Usage | UnsetType = UNSET
    append: bool | UnsetType = UNSET
    """True on the later pieces of a message too long for one frame: their `text` follows the earlier one's."""


class Snapshot(ServerFrame, frozen=True, kw_only=True, tag="snapshot"):
    session: str
    seq: int
    version: int
    title: str
    system: str | None
    params: dict[str, Any]
    leaf: str | None
    messages: list[SnapshotMessage]
    part: int
    last: bool


class SessionsChanged(ServerFrame, frozen=True, kw_only=True, tag="sessions.changed"):
    session: str
    title: str | UnsetType = UNSET
    deleted: bool | UnsetType = UNSET


class Degraded(ServerFrame, frozen=True, kw_only=True, tag="degraded"):
    component: str
    since: float
    """Seconds since the epoch."""


class Recovered(ServerFrame, frozen=True, kw_only=True, tag="recovered"):
    component: str


class ServerPing(ServerFrame, frozen=True, kw_only=True, tag="ping"):
    pass


class ServerPong(ServerFrame, frozen=True, kw_only=True, tag="pong"):
    pass


AnyServerFrame = (
    Welcome | Ack | Error | Snapshot | SessionsChanged | Degraded | Recovered | ServerPing | ServerPong | AnyEvent
)
