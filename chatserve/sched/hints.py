"""What users are about to ask, computed ahead with what nobody else wants.

A *hint* is a sequence that a user's next prompt will begin with: a conversation, settled, and the draft of a message
after it. Its KV is brought to the device and what is missing is computed, for one hint at a time, oldest first. No
prompt and no answer waits for that or is slowed by it: bringing KV back is the copies' business, a hint has a row only
in steps in which nobody else has one, and it gives its blocks back before a request goes without. Such a step computes
at most a sixteenth of its budget, and a request that arrives waits for no more. What was computed is then in the cache,
private to its user, and goes before anything else that is cached.

Owns the hints and the one request that computes for them; the scheduler says when there is room.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from chatserve.sched.batch import Batch
from chatserve.sched.leaders import common_prefix_length
from chatserve.sched.request import Request
from chatserve.types import RequestId, SamplingParams, UserId

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatserve.cache.kv_manager import KVManager
    from chatserve.sched.draft import Draft
    from chatserve.sched.plan import Row

_SHARE: Final = 16
"""A step computes this part of its budget for a hint."""
MAX_HINTS: Final = 64
MAX_HINTS_PER_USER: Final = 4
_PREFIX: Final = "\0hint"
_NO_SAMPLING: Final = SamplingParams(temperature=0.0, seed=0)


class _Hint:
    """One sequence. `num_settled` of its tokens are the conversation or public, the rest is the draft."""

    __slots__ = ("is_done", "num_settled", "num_shared_tokens", "token_ids", "user")

    def __init__(self, user: UserId, token_ids: array[int], num_shared_tokens: int, num_draft_tokens: int) -> None:
        self.user = user
        self.token_ids = token_ids
        self.num_shared_tokens = num_shared_tokens
        self.num_settled = max(len(token_ids) - num_draft_tokens, num_shared_tokens)
        self.is_done = False
        """Computed, or there was no room for it."""


class Hints:
    """By user and key; the least recently renewed is forgotten where there are too many."""

    def __init__(self, kv: KVManager, *, max_batched_tokens: int, context_tokens: int) -> None:
        self._kv = kv
        self._step_tokens = max(1, max_batched_tokens // _SHARE)
        self._context_tokens = context_tokens
        self._hints: OrderedDict[tuple[UserId, str], _Hint] = OrderedDict()
        self._batch = Batch(kv)
        """At most one request, that of `_running`."""
        self._running: _Hint | None = None
        self._num_requests = 0
        self.num_computed = 0
        """Tokens computed ahead since the start."""

    def __len__(self) -> int:
        return len(self._hints)

    @property
    def has_work(self) -> bool:
        """Whether there is something to compute, or to have the runner forget."""
        return self._batch.has_left or any(not hint.is_done for hint in self._hints.values())

    # --- what is hinted -----------------------------------------------------------------------------------------------

    def put(
        self, user: UserId, key: str, token_ids: Sequence[int], num_shared_tokens: int, num_draft_tokens: int
    ) -> None:
        """A user's next prompt will begin with `token_ids`; it takes the place of what was hinted under `key`.

        What would fill the context is nothing that can be asked.
        """
        old = self._hints.pop((user, key), None)
        if len(token_ids) < self._context_tokens - 1:
            new = _Hint(user, array("I", token_ids), num_shared_tokens, num_draft_tokens)
            if old is not None:
                self._let_go(old, _num_common(old, new.token_ids))
            self._hints[user, key] = new
        elif old is not None:
            self._let_go(old, 0)
        own = [each for each in self._hints if each[0] == user]
        for rivals, most in ((own, MAX_HINTS_PER_USER), (self._hints, MAX_HINTS)):
            if len(rivals) > most:
                self.drop(*next(iter(rivals)))

    def drop(self, user: UserId, key: str) -> None:
        """Nobody is about to ask this: forget it, and the draft's KV."""
        hint = self._hints.pop((user, key), None)
        if hint is not None:
            self._let_go(hint, 0)

    def drop_all(self) -> None:
        for user, key in tuple(self._hints):
            self.drop(user, key)

    def overtake(self, user: UserId, token_ids: Sequence[int]) -> None:
        """A request has come: hints of the same conversation are over, and it finds what they have computed. What all
        users share makes no conversation.
        """
        for key, hint in tuple(self._hints.items()):
            if key[0] != user:
                continue
            num_common = _num_common(hint, token_ids)
            if num_common >= hint.num_settled and num_common > hint.num_shared_tokens:
                del self._hints[key]
                self._let_go(hint, num_common)

    def drop_with(self, user: UserId, token_ids: Sequence[int], num_kept_tokens: int = 0) -> None:
        """A conversation is deleted, all but its first tokens: drop what goes on from it, which would keep its KV."""
        for key, hint in tuple(self._hints.items()):
            if key[0] == user and _num_common(hint, token_ids) > max(hint.num_shared_tokens, num_kept_tokens):
                self.drop(*key)

    # --- steps --------------------------------------------------------------------------------------------------------

    def place(self, draft: Draft) -> None:
        """Have the next hint brought to the device, and add a row to a step in which nobody else has one."""
        if draft.pressed:
            return
        while (hint := self._running or self._next()) is not None:
            if self._running is None and not self._admit(hint):
                hint.is_done = True
                continue
            (request,) = self._batch
            if request.num_computed == len(hint.token_ids):
                self._finish()
                continue
            if self._batch.is_ready(request):
                self._add_row(draft, request, hint)
            return

    def commit(self, row: Row) -> None:
        """Book a row that has been computed, unless its hint has been given up since."""
        assert self.owns(row.request_id), f"{row.request_id} has a row and is not known"
        if not self._computes(row):
            return
        assert self._running is not None
        (request,) = self._batch
        request.num_computed = row.start + row.num_tokens
        self.num_computed += row.num_tokens
        self._batch.settle(request)
        if request.num_computed == len(self._running.token_ids):
            self._finish()

    def fail(self, row: Row) -> None:
        """Book a row that could not be computed: what was hinted is not tried again."""
        if self._computes(row):
            self._finish()

    def pause(self) -> bool:
        """Give back what the hint that is being computed holds; it goes on later. True if there was one."""
        hint = self._running
        if hint is None:
            return False
        self._finish()
        hint.is_done = False
        return True

    def take_left(self) -> tuple[RequestId, ...]:
        """Whom the next step tells the runner to forget."""
        return self._batch.take_left()

    @staticmethod
    def owns(request_id: RequestId) -> bool:
        """Whether a row's request is one of ours: no client's request is called like that."""
        return request_id.startswith(_PREFIX)

    def check(self) -> None:
        self._batch.check()
        assert (self._running is not None) == len(self._batch) <= 1
        assert self._running is None or self._running in self._hints.values()
        assert len(self._hints) <= MAX_HINTS

    # --- inside -------------------------------------------------------------------------------------------------------

    def _computes(self, row: Row) -> bool:
        """Whether the row is of the request that computes now."""
        return any(request.request_id == row.request_id for request in self._batch)

    def _next(self) -> _Hint | None:
        for hint in self._hints.values():
            if not hint.is_done and not self._kv.awaits_reading([*hint.token_ids, 0], hint.user):
                return hint
        return None

    def _admit(self, hint: _Hint) -> bool:
        """Pin the hint's path. False: there is no room for it, or nothing in it."""
        if not hint.token_ids:
            return False
        # With one token more than there is, all that there is can be matched and nothing is ever sampled.
        request = Request(
            request_id=RequestId(f"{_PREFIX}{self._num_requests}"),
            user=hint.user,
            token_ids=[*hint.token_ids, 0],
            num_shared_tokens=hint.num_shared_tokens,
            num_prompt_tokens=len(hint.token_ids),
            sampling=_NO_SAMPLING,
            stop_token_ids=frozenset(),
            context_tokens=self._context_tokens,
            arrival=self._num_requests,
        )
        admission = self._kv.admit(
            request.request_id, request.token_ids, hint.user, hint.num_shared_tokens, ahead=True, is_hint=True
        )
        if admission is None:
            return False
        self._num_requests += 1
        self._batch.enter(request, admission)
        self._running = hint
        return True

    def _add_row(self, draft: Draft, request: Request, hint: _Hint) -> None:
        if len(draft):
            return
        end = min(len(hint.token_ids), request.num_scheduled + min(self._step_tokens, draft.budget))
        if end == request.num_scheduled:
            return
        new_block_ids = self._batch.grow(request, end)
        if new_block_ids is None:
            self._finish()
        else:
            draft.add(request, end, new_block_ids)

    def _finish(self) -> None:
        """End the request that computes; what it has computed is cached."""
        hint = self._running
        assert hint is not None
        (request,) = self._batch
        self._batch.finish_hint(request, hint.num_settled)
        self._running = None
        hint.is_done = True

    def _let_go(self, hint: _Hint, num_kept_tokens: int) -> None:
        """The hint is over: free what it has computed of the draft past its first tokens."""
        if hint is self._running:
            self._finish()
        self._kv.release_hint(hint.token_ids, hint.user, num_kept_tokens)


def _num_common(hint: _Hint, token_ids: Sequence[int]) -> int:
    return common_prefix_length(list(hint.token_ids), list(token_ids), len(hint.token_ids))
