"""Which request computes how many tokens in the next step.

Continuous batching (Orca, Yu et al. 2022) with chunked prefill (Sarathi-Serve, Agrawal et al. 2024): each step takes
one token of every request that decodes, and fills what is left of the token budget with chunks of prompts, oldest
first. While others decode, the chunks are small, so that a long prompt costs them a little of each of many steps and
not all of one; the more is waiting, the larger they are.

Steps may overlap: the next one is planned while others are in flight, as if each of their rows would go well and no
token would end a generation. An end is found a step late, and the row that was one too many is dropped with whatever it
computed. Nobody else sees that: KV is shared once the tokens that it is of are known, and blocks are given to others by
steps that come later on the device.

Owns what is taken and the plan of a step; `live` owns the requests from their submission to their one end, `batch` who
runs, `queue` the order of those who wait, `admission` who of them may join, `placement` who gets which row, `flights`
what is under way, `booking` what becomes of it, the KV manager the blocks. The plan is a frozen value and a function of
the state alone: no clock, no randomness. Knows no text, no clients and nothing of how a plan is executed.

Why nothing starves and nothing locks up:
- `max_running` is at most the budget, so a step has room for everyone who decodes and for the oldest prompt.
- When blocks run out, no step begins until none is in flight and nothing is copied in the background: what they hold
  may be enough. Then the newest request gives its own back. The newest one itself waits in place, holding what it
  computed. One that is alone fits, because what does not is refused at `submit`; if it holds blocks twice (what it
  computed beside another that computed the same), it lets go and comes back to one of each.
- Preempted requests are readmitted before others are admitted, and only into room for all that they need.
- New requests are admitted round robin over users; nobody overtakes one for whom there is no room.
- A request that waits for another's prefix waits only while that one moves.
- What is computed ahead (`hints`) has a row only where nobody waits, and gives its blocks back first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from chatserve.errors import ContextOverflowError, OverloadedError
from chatserve.sched.admission import AdmissionControl
from chatserve.sched.batch import Batch
from chatserve.sched.booking import Booking
from chatserve.sched.draft import Draft
from chatserve.sched.flights import Flights
from chatserve.sched.hints import Hints
from chatserve.sched.live import LiveRequests
from chatserve.sched.outcome import Journal, Outcome
from chatserve.sched.placement import Placement
from chatserve.sched.plan import StepPlan, StepResult, Transfers
from chatserve.sched.queue import WaitingQueue
from chatserve.sched.request import Request
from chatserve.types import FinishReason, RequestId, SamplingParams, UserId

if TYPE_CHECKING:
    from collections.abc import Iterable

    from chatserve.cache.kv_manager import KVManager


MIN_FETCHED_BLOCKS: Final = 8
"""Fewer blocks from the host than this are copied by the step that needs them, in less time than a turn of the loop."""


class Scheduler:
    """`submit` and `cancel` at any time; `schedule`, launch, then `commit` (or `fail`) for each step in its order.

    `max_batched_tokens` bounds the tokens of a step, `max_running` the rows, `max_queued` those never admitted yet, and
    `context_tokens` the length of one request with its output, which the pool must be able to hold alone. A request
    that needs at least `min_fetched_blocks` from the host while others run waits for them and holds up no step.
    """

    def __init__(
        self,
        kv: KVManager,
        *,
        max_batched_tokens: int,
        max_running: int,
        max_queued: int,
        context_tokens: int,
        min_fetched_blocks: int = MIN_FETCHED_BLOCKS,
    ) -> None:
        assert max_batched_tokens > 0
        assert max_running > 0
        assert context_tokens > 0
        self._kv = kv
        self._max_batched_tokens = max_batched_tokens
        self._max_running = min(max_running, max_batched_tokens)
        self._max_queued = max_queued
        self._context_tokens = context_tokens
        self._journal = Journal()
        self._queue = WaitingQueue()
        self._batch = Batch(kv)
        self._flights = Flights()
        self._live = LiveRequests(self._queue, self._batch, self._flights, self._journal)
        self._admission = AdmissionControl(
            kv,
            self._queue,
            self._batch,
            self._journal,
            max_running=self._max_running,
            min_fetched_blocks=min_fetched_blocks,
        )
        self.hints: Final = Hints(kv, max_batched_tokens=max_batched_tokens, context_tokens=context_tokens)
        self._booking = Booking(kv, self._live, self._batch, self._flights, self.hints, self._journal)
        self._placement = Placement(self._batch, self._queue, self._flights, self.hints)
        self._step = 0
        self._arrivals = 0

    # --- what callers ask ---------------------------------------------------------------------------------------------

    def __contains__(self, request_id: object) -> bool:
        """Whether the request waits or runs."""
        return request_id in self._live.by_id

    def is_taken(self, request_id: RequestId) -> bool:
        """Whether the id cannot be used: its request waits or runs, or has an end that is still in the journal."""
        return self._live.is_taken(request_id)

    @property
    def num_running(self) -> int:
        return len(self._batch)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def has_work(self) -> bool:
        """Whether `schedule` may do something, or `take_outcome` has an end to tell."""
        return bool(
            self._live.by_id or self._batch.has_left or self._journal.ended or len(self._flights) or self.hints.has_work
        )

    @property
    def is_copying(self) -> bool:
        """Whether anything is being copied in the background."""
        return self._flights.is_copying

    def submit(
        self,
        *,
        request_id: RequestId,
        user: UserId,
        token_ids: list[int],
        num_shared_tokens: int,
        num_prompt_tokens: int,
        sampling: SamplingParams,
        stop_token_ids: Iterable[int],
    ) -> None:
        """Take a request, whose fields are those of the engine's `Submit` with the base's tokens in `token_ids`, a list
        that is the scheduler's from now on.

        Raises:
            ContextOverflowError: the tokens leave no room for one more, now or ever.
            OverloadedError: the queue is full.
        """
        assert not self.is_taken(request_id), f"{request_id} is here already"
        assert 0 < num_prompt_tokens <= len(token_ids)
        assert 0 <= num_shared_tokens <= len(token_ids)
        if len(token_ids) >= self._context_tokens:
            raise ContextOverflowError.of(len(token_ids), self._context_tokens)
        if self._queue.num_new >= self._max_queued:
            raise OverloadedError(f"{self._queue.num_new} requests are waiting, which is all that the queue holds")
        request = Request(
            request_id=request_id,
            user=user,
            token_ids=token_ids,
            num_shared_tokens=num_shared_tokens,
            num_prompt_tokens=num_prompt_tokens,
            sampling=sampling,
            stop_token_ids=frozenset(stop_token_ids),
            context_tokens=self._context_tokens,
            arrival=self._arrivals,
        )
        self._arrivals += 1
        self._live.add(request)
        self.hints.overtake(user, token_ids)
        if request.num_submitted >= request.max_length:  # an earlier run already gave all the output it may have
            self._live.end(request, FinishReason.LENGTH)
        else:
            self._queue.push(request)

    def cancel(self, request_id: RequestId, keep: int | None = None) -> None:
        """End a request, if it is here, with `keep` of its output tokens (None: all) left in its path."""
        request = self._live.by_id.get(request_id)
        if request is not None:
            self._live.end(request, FinishReason.CANCELLED, keep=keep)

    def cancel_all(self) -> None:
        """End every request."""
        self.hints.drop_all()
        for request_id in tuple(self._live.by_id):
            self.cancel(request_id)

    def take_outcome(self) -> Outcome:
        """What happened since the last time."""
        return self._journal.take()

    def settle(self) -> None:
        """Tell the KV manager of all that is computed, for whoever wants to look at it."""
        for request in self._batch:
            self._batch.settle(request)

    # --- one step -----------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """The next step, which is in flight from now on. Falsy, and not in flight, where there is nothing to do now."""
        if self._placement.must_wait:
            return StepPlan(self._step, (), Transfers(), (), ())
        draft = Draft(self._max_batched_tokens)
        if self._queue:
            self.hints.pause()
        self._placement.place_all(draft)
        if self._queue:
            refused = None if draft.pressed else self._admission.let_in(draft)
            if refused is not None and self._flights.is_quiet:
                self._give_up(refused)
            self._admission.tell_positions()
        elif self.hints.has_work and not any(request.is_prefilling for request in self._batch):
            self.hints.place(draft)
        admitted, rows = draft.close()
        plan = StepPlan(
            step=self._step,
            removed=self._batch.take_left() + self.hints.take_left(),
            transfers=self._kv.take_transfers(),
            admitted=admitted,
            rows=rows,
            # Blocks on their way to the host cannot be had: not while somebody waits for blocks.
            background=self._kv.take_background(write_through=not draft.pressed and not self._queue),
        )
        if plan:
            self._flights.launch(plan)
            self._step += 1
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> None:
        """Book the oldest step in flight: KV is there, and each row with `sample` has one more token."""
        self._booking.commit(plan, result)

    def fail(self, plan: StepPlan, detail: str) -> None:
        """Book the oldest step in flight, whose transfers were made and whose rows were not computed: their requests
        end with `error`, and whatever later steps in flight compute for them is dropped.
        """
        self._booking.fail(plan, detail)

    def background_done(self, step: int) -> None:
        """What the plan of that number had copied in the background is there."""
        self._kv.transfers_done(self._flights.background_done(step))

    def _give_up(self, request: Request) -> None:
        """The pool is idle and refuses even so: say it rather than wait for ever."""
        num_blocks = self._kv.counts()[0].total
        detail = f"{len(request.token_ids)} tokens do not fit the idle pool of {num_blocks} blocks"
        self._live.end(request, FinishReason.ERROR, detail=detail)

    # --- invariants ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert what must hold between any two calls."""
        self._live.check()
        self.hints.check()
        assert len(self._batch) <= self._max_running
