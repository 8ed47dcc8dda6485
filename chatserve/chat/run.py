"""One generation at the engine, as the chat layer knows it: token ids and how often it was tried, no text.

Plain state; `EngineLink` alone writes it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from chatserve.engine.messages import PathRef, Started
from chatserve.types import FinishReason, SamplingParams, UserId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatserve.types import RequestId


class RunEnd(msgspec.Struct, frozen=True, kw_only=True):
    """How a run ended. `path` covers the prompt and the kept output, where the engine still holds them."""

    reason: FinishReason
    path: PathRef | None = None
    code: str = ""
    detail: str = ""


class RunListener(Protocol):
    """Hears of one run, in order; after `on_end` nothing more. Called from the event loop; must not block."""

    def on_queued(self, position: int) -> None: ...

    def on_started(self, started: Started) -> None: ...

    def on_tokens(self, token_ids: tuple[int, ...]) -> None: ...

    def on_end(self, end: RunEnd) -> None: ...


class Run:
    """One generation at the engine."""

    def __init__(
        self,
        *,
        name: str,
        user: UserId,
        prompt_ids: tuple[int, ...],
        num_shared_tokens: int,
        sampling: SamplingParams,
        stop_token_ids: tuple[int, ...],
        base: PathRef | None,
        listener: RunListener,
        output_ids: Sequence[int] = (),
        has_started: bool = False,
        is_promised: bool = False,
    ) -> None:
        """`output_ids`: what another process has generated of it before. `is_promised`: it was acknowledged, so a full
        queue is waited for.
        """
        assert sampling.seed is not None, "the seed is drawn before"
        self.name = name
        self.user = user
        self.prompt_ids = prompt_ids
        self.num_shared_tokens = num_shared_tokens
        self.sampling = sampling
        self.stop_token_ids = stop_token_ids
        self.base = base
        self.listener = listener
        self.is_promised = is_promised
        self.output_ids = list(output_ids)
        self.request_id: RequestId | None = None
        """The engine's current name for it; None while the engine is away."""
        self.has_started = has_started
        """Its listener has heard so, or somebody before it."""
        self.is_queued = False
        """The present engine has said that it waits."""
        self.num_submitted_output = 0
        """Output tokens that the present engine was given rather than generated."""
        self.attempts = 0
        self.deaths = 0
        self.keep: int | None = None
        """Set once it was cancelled: how many output tokens stay; later ones are ignored."""
        self.has_ended = False
