"""The events of a session, exactly as `chat.v1` sends them.

The service makes them, the store numbers and keeps them, the hub sends them; so they are defined once. An event without
its number has `seq` 0. Fields that are UNSET are left out on the wire.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from chatserve.types import MessageId, SessionId


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Empty where a generation ended before it started. `prompt = cached + swapped_in + computed`, as they stood at
    first admission.
    """

    prompt_tokens: int | UnsetType = UNSET
    cached_tokens: int | UnsetType = UNSET
    swapped_in_tokens: int | UnsetType = UNSET
    computed_tokens: int | UnsetType = UNSET
    completion_tokens: int | UnsetType = UNSET
    ttft_ms: float | UnsetType = UNSET
    tokens_per_s: float | UnsetType = UNSET


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    session: SessionId
    seq: int = 0


class MessageAdded(Event, frozen=True, kw_only=True, tag="message.added"):
    message: MessageId
    parent: MessageId | None
    role: str
    text: str
    status: str


class MessageUpdated(Event, frozen=True, kw_only=True, tag="message.updated"):
    message: MessageId
    status: str


class MessageDeleted(Event, frozen=True, kw_only=True, tag="message.deleted"):
    message: MessageId
    deleted: int


class BranchSelected(Event, frozen=True, kw_only=True, tag="branch.selected"):
    leaf: MessageId | None


class SessionUpdated(Event, frozen=True, kw_only=True, tag="session.updated"):
    title: str | UnsetType = UNSET
    system: str | UnsetType | None = UNSET
    params: dict[str, Any] | UnsetType = UNSET


class SessionDeleted(Event, frozen=True, kw_only=True, tag="session.deleted"):
    pass


class GenerationQueued(Event, frozen=True, kw_only=True, tag="generation.queued"):
    message: MessageId
    position: int


class GenerationStarted(Event, frozen=True, kw_only=True, tag="generation.started"):
    message: MessageId
    prompt_tokens: int
    cached_tokens: int
    swapped_in_tokens: int
    computed_tokens: int


class GenerationDelta(Event, frozen=True, kw_only=True, tag="generation.delta"):
    """Covers events `from_seq` to `seq`; `from_seq` is left out where they are one."""

    message: MessageId
    text: str
    from_seq: int | UnsetType = UNSET


class GenerationEnd(Event, frozen=True, kw_only=True, tag="generation.end"):
    message: MessageId
    reason: str
    status: str
    usage: Usage
    seed: int
    code: str | UnsetType = UNSET
    detail: str | UnsetType = UNSET


AnyEvent = (
    MessageAdded
    | MessageUpdated
    | MessageDeleted
    | BranchSelected
    | SessionUpdated
    | SessionDeleted
    | GenerationQueued
    | GenerationStarted
    | GenerationDelta
    | GenerationEnd
)
