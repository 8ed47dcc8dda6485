"""Which request computes how many tokens in the next step.

Continuous batching (Orca, Yu et al. 2022) with chunked prefill (Sarathi-Serve, Agrawal et al. 2024): each step takes
one token of every request that decodes, and fills what is left of the token budget with chunks of prompts, oldest
first.

Owns the requests and their phases; the KV manager owns the blocks. The plan is a frozen value and a function of the
state alone: no clock, no randomness. Knows no text, no clients and nothing of how a plan is executed.

Why nothing starves and nothing locks up:
- `max_running` is at most the budget, so a step has room for everyone who decodes and for the oldest prompt.
- When blocks run out, the newest request gives its own back. The newest one itself waits in place, holding what it
  computed. One that is alone fits, because what does not is refused at `submit`; if it holds blocks twice (what it
  computed beside another that computed the same), it lets go and comes back to one of each.
- Preempted requests are readmitted before others are admitted, and only into room for all that they need.
- New requests are admitted round robin over users; nobody overtakes one for whom there is no room.
- A request that waits for another's prefix waits only while that one moves.
"""

from __future__ import annotations

from bisect import insort
from typing import TYPE_CHECKING

from chatserve.errors import ContextOverflowError, OverloadedError
from chatserve.sched.leaders import find_leader
from chatserve.sched.outcome import Begun, Ended, Journal, Outcome, Sampled, Waiting
from chatserve.sched.plan import Admitted, Row, StepPlan, StepResult
from chatserve.sched.queue import WaitingQueue, by_arrival
from chatserve.sched.request import Phase, Request
from chatserve.types import FinishReason, RequestId, SamplingParams, UserId

if TYPE_CHECKING:
    from collections.abc import Iterable

    from chatserve.cache.kv_manager import KVManager
    from chatserve.types import BlockId


class _Draft:
    """A plan in the making."""

    __slots__ = ("admitted", "budget", "pressed", "rows")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.rows: dict[RequestId, Row] = {}
        self.admitted: list[Admitted] = []
        self.pressed = False
        """Someone was preempted or had to wait for blocks: no time to let others in."""

    def add(self, request: Request, end: int, new_block_ids: tuple[BlockId, ...]) -> None:
        start = request.num_computed
        sample = end == len(request.token_ids)
        self.rows[request.request_id] = Row(request.request_id, start, end - start, new_block_ids, sample)
        self.budget -= end - start

    def discard(self, request: Request) -> None:
        row = self.rows.pop(request.request_id, None)
        if row is not None:
            self.budget += row.num_tokens


class Scheduler:
    """`submit` and `cancel` between steps; `schedule`, execute, then `commit` (or `fail`) for each step.

    `max_batched_tokens` bounds the tokens of a step, `max_running` the rows, `max_queued` those never admitted yet, and
    `context_tokens` the length of one request with its output, which the pool must be able to hold alone.
    """

    def __init__(
        self, kv: KVManager, *, max_batched_tokens: int, max_running: int, max_queued: int, context_tokens: int
    ) -> None:
        assert max_batched_tokens > 0
        assert max_running > 0
        assert context_tokens > 0
        self._kv = kv
        self._block_size = kv.block_size
        self._max_batched_tokens = max_batched_tokens
        self._max_running = min(max_running, max_batched_tokens)
        self._max_queued = max_queued
        self._context_tokens = context_tokens
        self._requests: dict[RequestId, Request] = {}
        self._running: list[Request] = []
        """Oldest first."""
        self._queue = WaitingQueue()
        self._removed: dict[RequestId, None] = {}
        """Requests that the runner still knows and that have left the batch."""
        self._journal = Journal()
        self._in_flight: StepPlan | None = None
        self._step = 0
        self._arrivals = 0

    # --- what callers ask ---------------------------------------------------------------------------------------------

    def __contains__(self, request_id: RequestId) -> bool:
        """Whether the request waits or runs."""
        return request_id in self._requests

    def is_taken(self, request_id: RequestId) -> bool:
        """Whether the id cannot be used: its request waits or runs, or has an end that is still in the journal."""
        return request_id in self._requests or any(ended.request_id == request_id for ended in self._journal.ended)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def has_work(self) -> bool:
        """Whether `schedule` may do something, or `take_outcome` has an end to tell."""
        return bool(self._requests or self._removed or self._journal.ended)

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
        self._requests[request_id] = request
        if request.num_submitted >= request.max_length:  # an earlier run already gave all the output it may have
            self._end(request, FinishReason.LENGTH)
        else:
            self._queue.push(request)

    def cancel(self, request_id: RequestId, keep: int | None = None) -> None:
        """End a request, if it is here, with `keep` of its output tokens (None: all) left in its path."""
        assert self._in_flight is None, "cancel comes between steps"
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request, FinishReason.CANCELLED, keep=keep)

    def take_outcome(self) -> Outcome:
        """What happened since the last `commit`, `fail` or `take_outcome`."""
        return self._journal.take()

    def settle(self) -> None:
        """Tell the KV manager of all that is computed, for whoever wants to look at it."""
        for request in self._running:
            self._settle(request)

    # --- one step -----------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """The next step. Falsy where there is nothing to do."""
        assert self._in_flight is None, "a step is committed before the next one is planned"
        draft = _Draft(self._max_batched_tokens)
        prefilling: list[Request] = []
        for request in tuple(self._running):
            if request.is_decoding:
                self._place(draft, request)
            else:
                prefilling.append(request)
        for request in prefilling:
            if draft.budget > 0:
                self._place(draft, request)
        if self._queue:
            if not draft.pressed:
                self._admit(draft)
            self._tell_positions()
        self._kv.reclaim()
        plan = StepPlan(
            step=self._step,
            removed=tuple(self._removed),
            transfers=self._kv.take_transfers(),
            admitted=tuple(draft.admitted),
            rows=tuple(draft.rows.values()),
        )
        self._step += 1
        self._removed.clear()
        self._in_flight = plan
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> Outcome:
        """Book an executed plan: KV is there, and each row with `sample` has one more token."""
        assert plan is self._in_flight, "a plan is committed once, and in order"
        assert result.step == plan.step, f"expected the result of step {plan.step}, got that of {result.step}"
        self._in_flight = None
        self._kv.transfers_done(plan.transfers)
        tokens = iter(result.token_ids)
        for row in plan.rows:
            request = self._requests[row.request_id]
            end = row.start + row.num_tokens
            request.num_computed = end
            # Output is of no use to others before it ends, so that half a block of it can wait.
            if end <= request.num_submitted or end % self._block_size == 0:
                self._settle(request)
            if row.sample:
                self._append(request, next(tokens))
        assert next(tokens, None) is None, "the runner gave more tokens than rows ask for"
        return self._journal.take()

    def fail(self, plan: StepPlan, detail: str) -> Outcome:
        """Book a plan whose computation failed after its transfers were made: its rows' requests end with `error`."""
        assert plan is self._in_flight
        self._in_flight = None
        self._kv.transfers_done(plan.transfers)
        failed = {row.request_id for row in plan.rows} | {admitted.request_id for admitted in plan.admitted}
        for request in [request for request in self._running if request.request_id in failed]:
            self._end(request, FinishReason.ERROR, detail=detail)
        self._removed.update(dict.fromkeys(plan.removed))  # who knows how far the runner came
        return self._journal.take()

    def _settle(self, request: Request) -> None:
        if request.num_committed < request.num_computed:
            self._kv.commit(request.request_id, request.token_ids[request.num_committed : request.num_computed])
            request.num_committed = request.num_computed

    # --- the running --------------------------------------------------------------------------------------------------

    def _place(self, draft: _Draft, request: Request) -> None:
        """Give a running request its row, preempting newer ones for the blocks, or leave it out of this step."""
        if request.phase is not Phase.RUNNING:  # preempted by an older one of this step
            return
        end = min(len(request.token_ids), request.num_computed + draft.budget)
        new_block_ids = self._grow(request, end)
        while new_block_ids is None:
            draft.pressed = True
            newest = self._running[-1]
            if newest is not request or len(self._running) == 1:
                self._preempt(draft, newest)
            if newest is request:
                return
            new_block_ids = self._grow(request, end)
        draft.add(request, end, new_block_ids)

    def _grow(self, request: Request, end: int) -> tuple[BlockId, ...] | None:
        if end <= request.capacity:
            return ()
        new_block_ids = self._kv.grow(request.request_id, end)
        if new_block_ids is not None:
            request.capacity += len(new_block_ids) * self._block_size
        return new_block_ids

    def _preempt(self, draft: _Draft, request: Request) -> None:
        draft.discard(request)
        self._settle(request)
        self._kv.preempt(request.request_id)
        self._leave_batch(request)
        request.phase = Phase.PREEMPTED
        self._queue.push_preempted(request)

    def _leave_batch(self, request: Request) -> None:
        self._running.remove(request)
        self._removed[request.request_id] = None
        request.num_computed = request.num_committed = request.capacity = 0

    # --- the waiting --------------------------------------------------------------------------------------------------

    def _admit(self, draft: _Draft) -> None:
        """Let requests in, in the queue's order, until the budget, the rows or the blocks run out."""
        leaders = [request for request in self._running if not request.is_decoding]
        for request in self._queue.in_order():
            if draft.budget <= 0 or draft.pressed or len(self._running) >= self._max_running:
                return
            if request.blocked_on is not None and request.blocked_on.holds():
                continue
            match = self._kv.match(request.token_ids, request.user)
            num_here = match.num_cached + match.num_swapped
            request.blocked_on = find_leader(request, num_here, leaders, self._block_size)
            if request.blocked_on is not None:
                continue
            if self._running and not self._has_room(request, match.num_cached):
                return
            if not self._enter(draft, request):
                if not self._running:
                    self._give_up(request)
                return
            if not request.is_decoding:
                leaders.append(request)

    def _has_room(self, request: Request, num_on_device: int) -> bool:
        """Whether everything that the request must hold to decode fits beside what others hold.

        A guess that saves swapping: blocks that match may or may not be held by others already. A preempted request's
        are its own, so all of them count; and it leaves one block to each of the others, lest it be thrown out again.
        """
        counts, _ = self._kv.counts()
        num_needed = -(-(len(request.token_ids) + 1) // self._block_size)
        if request.phase is Phase.PREEMPTED:
            num_needed += len(self._running)
        else:
            num_needed -= num_on_device // self._block_size
        return num_needed <= counts.total - counts.pinned

    def _enter(self, draft: _Draft, request: Request) -> bool:
        """Admit one request with its first chunk. False: there are not enough blocks, and nothing has changed."""
        admission = self._kv.admit(request.request_id, request.token_ids, request.user, request.num_shared_tokens)
        if admission is None:
            return False
        self._queue.take(request)
        request.phase = Phase.RUNNING
        request.num_computed = request.num_committed = admission.num_cached + admission.num_swapped_in
        request.capacity = len(admission.block_ids) * self._block_size
        insort(self._running, request, key=by_arrival)
        draft.admitted.append(
            Admitted(
                request_id=request.request_id,
                token_ids=tuple(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed=request.num_computed,
                block_ids=admission.block_ids,
                sampling=request.sampling,
            )
        )
        if not request.started:
            request.started = True
            self._journal.begun.append(
                Begun(request.request_id, request.num_submitted, admission.num_cached, admission.num_swapped_in)
            )
        end = min(len(request.token_ids), request.num_computed + draft.budget)
        new_block_ids = self._grow(request, end)
        if new_block_ids is None:
            draft.pressed = True  # it waits in the batch, holding its path
        else:
            draft.add(request, end, new_block_ids)
        return True

    def _give_up(self, request: Request) -> None:
        """The pool is idle and refuses even so: say it rather than wait for ever."""
        num_blocks = self._kv.counts()[0].total
        detail = f"{len(request.token_ids)} tokens do not fit the idle pool of {num_blocks} blocks"
        self._end(request, FinishReason.ERROR, detail=detail)

    def _tell_positions(self) -> None:
        for position, request in enumerate(self._queue.in_order()):
            told = request.told_position
            if not request.started and (told is None or position <= told // 2 < told):
                request.told_position = position
                self._journal.waiting.append(Waiting(request.request_id, position))

    # --- ends ---------------------------------------------------------------------------------------------------------

    def _append(self, request: Request, token_id: int) -> None:
        if token_id in request.stop_token_ids:
            self._end(request, FinishReason.STOP, stop_token_id=token_id)
            return
        self._journal.sampled.append(Sampled(request.request_id, request.num_output_tokens, token_id))
        request.token_ids.append(token_id)
        if len(request.token_ids) >= request.max_length:
            self._end(request, FinishReason.LENGTH)

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        *,
        keep: int | None = None,
        stop_token_id: int | None = None,
        detail: str = "",
    ) -> None:
        """The one end of every request. Its blocks stay cached, up to what is kept."""
        num_output_tokens = request.num_output_tokens
        kept = request.token_ids
        if keep is not None and keep < num_output_tokens:
            kept = kept[: request.num_submitted + max(keep, 0)]
        if request.phase is Phase.RUNNING:
            self._settle(request)
            self._kv.finish(request.request_id, len(kept))
            self._leave_batch(request)
        elif request in self._queue:
            self._queue.remove(request)
        request.phase = Phase.FINISHED
        del self._requests[request.request_id]
        self._journal.ended.append(
            Ended(
                request_id=request.request_id,
                user=request.user,
                reason=reason,
                token_ids=kept,
                num_output_tokens=num_output_tokens,
                stop_token_id=stop_token_id,
                detail=detail,
            )
        )

    # --- invariants ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Assert what must hold between any two calls."""
        self._queue.check()
        assert self._running == sorted(self._running, key=by_arrival)
        assert len(self._running) <= self._max_running
        assert len(self._requests) == len(self._running) + len(self._queue)
        for request in self._running:
            assert request.phase is Phase.RUNNING
            assert self._requests[request.request_id] is request
            assert request.num_committed <= request.num_computed <= request.capacity
            assert request.num_computed < len(request.token_ids) < request.max_length
            assert request.request_id not in self._removed
