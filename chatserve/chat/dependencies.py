"""What a chat service is built on: its store, its engine, whom it tells of what, and how patient it is."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from chatserve.chat.core import PublishChanged
from chatserve.chat.engine_client import EngineClient
from chatserve.chat.live_session import Publish
from chatserve.chat.prompt import PromptEncoder
from chatserve.chat.store import Store
from chatserve.chat.workers import BEAT_S, Owner
from chatserve.config import Limits
from chatserve.types import SessionId, UserId


@dataclass(frozen=True, kw_only=True, slots=True)
class Dependencies:
    """Times ending in `_s` are in seconds."""

    store: Store
    engine: EngineClient
    encoder: PromptEncoder
    limits: Limits
    owner: Owner
    """Names this process among those that share the store."""
    publish: Publish
    """Gets the events of one session in the order of their numbers."""
    publish_relayed: Publish
    """Gets those that another process wrote, some of them perhaps twice."""
    break_off: Callable[[UserId, SessionId], None]
    """Called when a session's events cannot be had any more, and whoever follows must come back for a snapshot."""
    publish_changed: PublishChanged
    publish_health: Callable[[str, float | None], None]
    """Gets a component and the time since which it has been away, None when it is back."""
    resumes: bool = True
    """Unfinished answers of a process that dies are gone on with; else they are marked as interrupted."""
    beat_s: float = BEAT_S
    expiry_s: float = 0.0
    """Sessions that nobody changed for so long are deleted, where that is not 0."""
    orphan_grace_s: float = 60.0
    engine_patience_s: float = 300.0
    """What waits for an engine longer is interrupted."""
    engine_silence_s: float = 10.0
    """An engine that says nothing for so long counts as away."""
    on_crash: Callable[[], None] | None = None
    """Called when one of the service's own tasks dies of a bug; None: the process is told to end."""
    clock: Callable[[], float] = time.time
    """Seconds since the epoch."""
    monotonic: Callable[[], float] = time.monotonic
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex
