"""One generation as the scheduler sees it: token ids, how far their KV is computed, and when it has to end.

Plain state without policy; only the scheduler writes it. Knows no blocks, but how many and those it was admitted with.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from chatserve.sched.leaders import Blocker
    from chatserve.types import BlockId, RequestId, SamplingParams, UserId


class Phase(enum.Enum):
    """Where a request is. It starts `WAITING`, and `FINISHED` is final."""

    WAITING = enum.auto()
    FETCHING = enum.auto()
    """Admitted; its blocks are on their way from the host, and until they are there it has no row."""
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


class Request:
    """Token ids of prompt and output in one list, of which KV of the first `num_computed` stands in blocks.

    Steps in flight are ahead of that: they compute KV up to `num_scheduled`, and sample `num_pending` tokens that will
    follow those in the list.

    `max_length` is the length in tokens at which the generation ends with reason `length`. `arrival` orders requests
    by age and is unique. Tokens from `num_submitted` on are this run's output.
    """

    __slots__ = (
        "admitted_with",
        "arrival",
        "awaits_reading",
        "blocked_on",
        "capacity",
        "max_length",
        "num_committed",
        "num_computed",
        "num_leaders",
        "num_pending",
        "num_prompt_tokens",
        "num_scheduled",
        "num_shared_tokens",
        "num_submitted",
        "phase",
        "refused_at",
        "request_id",
        "sampling",
        "started",
        "stop_token_ids",
        "token_ids",
        "told_position",
        "user",
    )

    def __init__(
        self,
        *,
        request_id: RequestId,
        user: UserId,
        token_ids: list[int],
        num_shared_tokens: int,
        num_prompt_tokens: int,
        sampling: SamplingParams,
        stop_token_ids: frozenset[int],
        context_tokens: int,
        arrival: int,
    ) -> None:
        self.request_id = request_id
        self.user = user
        self.token_ids = token_ids
        self.num_shared_tokens = num_shared_tokens
        self.num_prompt_tokens = num_prompt_tokens
        self.num_submitted = len(token_ids)
        self.sampling = sampling
        self.stop_token_ids = stop_token_ids
        self.arrival = arrival
        self.max_length = context_tokens
        if sampling.max_tokens is not None:
            self.max_length = min(context_tokens, num_prompt_tokens + sampling.max_tokens)
        self.phase = Phase.WAITING
        self.started = False
        self.num_scheduled = 0
        self.num_pending = 0
        self.num_computed = 0
        self.num_committed = 0
        """Of the computed ones, those that the KV manager has been told of."""
        self.capacity = 0
        """Slots in the request's blocks: KV of so many tokens fits before it must grow."""
        self.admitted_with: tuple[BlockId, ...] | None = None
        """The blocks it was admitted with, until its first row tells the runner of them."""
        self.blocked_on: Blocker | None = None
        self.awaits_reading = True
        """Some of its path may have to be read from a snapshot."""
        self.num_leaders = 0
        """How many others it has waited for in its life."""
        self.refused_at: tuple[int, int] | None = None
        """Unpinned blocks and running requests when it last found no room."""
        self.told_position: int | None = None

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of this run."""
        return len(self.token_ids) - self.num_submitted

    @property
    def is_prefilling(self) -> bool:
        """More than the newest token's KV has still to be computed."""
        return self.num_computed < len(self.token_ids) - 1

    def __repr__(self) -> str:
        return f"<{self.request_id} {self.phase.name.lower()} {self.num_computed}/{len(self.token_ids)}>"
