"""The engine without a process: commands in, one turn at a time, events out.

Owns what a command does, and the paths; the scheduler owns the requests, `pipeline` the steps, `outbox` what is still
to be said. Each submit ends in exactly one `Finished` or `Rejected`, also where the runner fails. Knows no sockets, no
clients and no text; the process around it and the tests drive the same `handle` and `step`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, assert_never

from chatserve.engine.faults import fault_of, fault_of_hint
from chatserve.engine.messages import (
    AnyCommand,
    CacheReport,
    Cancel,
    Drain,
    EngineInfo,
    Hint,
    Inspect,
    PathRef,
    Rejected,
    Release,
    StepOutput,
    Submit,
)
from chatserve.engine.outbox import Outbox
from chatserve.engine.pace import FIRST_GUESS_S, Pace
from chatserve.engine.paths import PathTable, UnknownPathError
from chatserve.engine.pipeline import StepPipeline
from chatserve.errors import ContextOverflowError, OverloadedError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from chatserve.cache.kv_manager import KVManager
    from chatserve.engine.snapshot import Snapshot
    from chatserve.sched.plan import Runner
    from chatserve.sched.scheduler import Scheduler
    from chatserve.types import RequestId

COPY_POLL_S: Final = 0.0005
"""How often copies in the background are looked after while there is nothing else to do."""


class Engine:
    """`handle` takes a command at once; `step` runs one step of the model and says what came of both."""

    def __init__(
        self,
        kv: KVManager,
        scheduler: Scheduler,
        runner: Runner,
        info: EngineInfo,
        *,
        paths: PathTable | None = None,
        snapshot: Snapshot | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.info = info
        self._kv = kv
        self._scheduler = scheduler
        self._paths = PathTable() if paths is None else paths
        self._snapshot = snapshot
        self._clock = clock
        self._outbox = Outbox(info.epoch, self._paths)
        self._draining = False
        self._pipeline = StepPipeline(scheduler, runner, clock)
        self._stirred = False
        """Blocks may be on the move without any request."""
        self._pace = Pace()

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do or to say. Where not, nothing changes until the next command."""
        scheduler = self._scheduler
        return scheduler.has_work or scheduler.is_copying or self._stirred or bool(self._outbox)

    @property
    def patience_s(self) -> float | None:
        """How long may be waited for commands before the next `step`; None: for ever."""
        if not self.has_work:
            return 0.0 if self.has_background else None
        return COPY_POLL_S if self._pipeline.is_waiting else 0.0

    @property
    def has_background(self) -> bool:
        """Whether `background` has something to do when there is no work."""
        return self._snapshot is not None and self._snapshot.has_unread

    @property
    def is_drained(self) -> bool:
        """Asked to drain, and nothing runs or waits."""
        return self._draining and not self._scheduler.has_work

    def is_taken(self, request_id: RequestId) -> bool:
        """Whether the id cannot be used: its request waits or runs, or its end has still to be said."""
        return self._scheduler.is_taken(request_id)

    def report(self, command: Inspect) -> CacheReport:
        """The state of the cache, as it is now."""
        self._scheduler.settle()
        device, host = self._kv.counts()
        return CacheReport(
            inspect_tag=command.inspect_tag,
            block_size=self.info.block_size,
            device=device,
            host=host,
            running=self._scheduler.num_running,
            waiting=self._scheduler.num_waiting,
            counters={
                **self._outbox.counters,
                **self._pipeline.counters,
                **self._kv.counters,
                "hinted_tokens": self._scheduler.hints.num_computed,
                "wasted_slots": self._kv.wasted_slots(),
            },
            block_map=self._kv.block_map() if command.with_map else "",
        )

    # --- commands -----------------------------------------------------------------------------------------------------

    def handle(self, command: AnyCommand) -> None:
        """Take one command. Whatever it causes is said by the next `step`."""
        match command:
            case Submit():
                self._submit(command)
            case Cancel(request_id, keep):
                self._scheduler.cancel(request_id, keep)
            case Hint():
                self._hint(command)
            case Release():
                self._release(command)
            case Inspect():
                self._outbox.report(self.report(command))
            case Drain():
                self._draining = True
                self._scheduler.hints.drop_all()
            case _:
                assert_never(command)

    def _submit(self, submit: Submit) -> None:
        if self._draining:
            self._reject(submit, "overloaded", "the engine is about to stop", retry_after_s=FIRST_GUESS_S)
        elif self.is_taken(submit.request_id):
            self._reject(submit, "bad_params", f"request {submit.request_id} is running already")
        elif (token_ids := self._whole_sequence(submit)) is None:
            self._reject(submit, "need_tokens", "the engine does not hold the path that was named as base")
        elif (fault := fault_of(submit, len(token_ids), self.info.vocab_size)) is not None:
            self._reject(submit, "bad_params", fault)
        else:
            self._enqueue(submit, token_ids)

    def _whole_sequence(self, command: Submit | Hint) -> list[int] | None:
        """The base's ids and the new ones; None if the base is not known."""
        if command.base is None:
            return list(command.token_ids)
        token_ids = self._read(command.base, command)
        if token_ids is not None:
            token_ids += command.token_ids
        return token_ids

    def _enqueue(self, submit: Submit, token_ids: list[int]) -> None:
        try:
            self._scheduler.submit(
                request_id=submit.request_id,
                user=submit.user,
                token_ids=token_ids,
                num_shared_tokens=submit.num_shared_tokens,
                num_prompt_tokens=submit.num_prompt_tokens,
                sampling=submit.sampling,
                stop_token_ids=submit.stop_token_ids,
            )
        except ContextOverflowError as error:
            self._outbox.reject(
                Rejected(request_id=submit.request_id, code=error.code, detail=error.detail, **error.fields)
            )
        except OverloadedError as error:
            retry_after_s = self._pace.retry_after_s(self._scheduler.num_waiting)
            self._reject(submit, error.code, error.detail, retry_after_s=retry_after_s)
        else:
            self._outbox.note_base(submit)

    def _reject(self, submit: Submit, code: str, detail: str, retry_after_s: float | None = None) -> None:
        self._outbox.reject(
            Rejected(request_id=submit.request_id, code=code, detail=detail, retry_after_s=retry_after_s)
        )

    def _hint(self, hint: Hint) -> None:
        token_ids = self._whole_sequence(hint)
        if token_ids is None or self._draining:
            return
        if token_ids and fault_of_hint(hint, len(token_ids), self.info.vocab_size) is None:
            self._scheduler.hints.put(hint.user, hint.key, token_ids, hint.num_shared_tokens, hint.num_draft_tokens)
        else:
            self._scheduler.hints.drop(hint.user, hint.key)
        self._stirred = True

    def _release(self, release: Release) -> None:
        deleted: list[Sequence[int]] = [release.token_ids] if release.token_ids else []
        # The longest first: a handle that is named twice is read to its end before it is forgotten.
        for path in sorted(release.paths, key=lambda path: path.num_tokens, reverse=True):
            token_ids = self._read(path, release)
            if token_ids is not None:
                deleted.append(token_ids)
                self._paths.forget(path.handle)
        for each in deleted:
            self._scheduler.hints.drop_with(release.user, each, release.num_kept_tokens)
            self._kv.release(each, release.user, release.num_kept_tokens)
            self._stirred = True
        if self._snapshot is not None:
            self._snapshot.deleted(deleted, release.user, release.num_kept_tokens)

    def _read(self, path: PathRef, command: Submit | Hint | Release) -> list[int] | None:
        """The path's ids, if this engine still holds it for this user."""
        if path.epoch != self.info.epoch:
            return None
        try:
            return self._paths.read(command.user, path.handle, path.num_tokens)
        except UnknownPathError:
            return None

    # --- the snapshot -------------------------------------------------------------------------------------------------

    def background(self) -> None:
        """Do a little of what can wait, for when there is no work."""
        if self._snapshot is not None:
            self._snapshot.read(wanted_only=False)

    def save_snapshot(self) -> None:
        """End all that runs, and write what is cached, where a directory for that was given."""
        if self._snapshot is None:
            return
        self._draining = True
        self._scheduler.cancel_all()
        while self.has_work:
            self.step()
        self._snapshot.save()

    # --- steps --------------------------------------------------------------------------------------------------------

    def step(self) -> StepOutput | None:
        """One turn: launch the next step if there is one, then wait for the oldest in flight if no more may be, and say
        what happened since the last turn. None: nothing.

        Raises what the runner raises where only a new process can go on: when transfers fail, because what stands in
        blocks is unknown then, and when one step after the other fails.
        """
        if self._snapshot is not None:
            self._snapshot.read(wanted_only=True)
        self._stirred = self._pipeline.turn(may_launch=self._scheduler.has_work or self._stirred)
        outcome = self._scheduler.take_outcome()
        for _ in outcome.ended:
            self._pace.note_end(self._clock())
        return self._outbox.take(outcome)

    def check(self) -> None:
        """Assert what must hold between steps; where nothing runs, that nothing is held either."""
        self._scheduler.check()
        self._kv.check()
        self._paths.check()
        self._outbox.check(self._scheduler)
        if not self.has_work:
            device, host = self._kv.counts()
            for pool in (device, host):
                assert pool.pinned == 0, f"idle, and {pool} has pinned blocks"
                assert pool.private == 0, f"idle, and {pool} has private blocks"
                assert pool.transit == 0, f"idle, and {pool} has blocks on the move"
                assert pool.free + pool.cached == pool.total
