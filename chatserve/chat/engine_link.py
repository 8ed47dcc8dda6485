"""The chat layer's end of the engine: one `Run` a generation, whatever happens to the engine meanwhile.

Owns the loop over the engine's events and the map from engine requests to runs. A run is submitted with a base that the
engine may still hold, again with all ids if it does not, and again after the engine died, going on at the token where
it was; it ends exactly once. Knows token ids only, no text, no messages.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import TYPE_CHECKING, Final, assert_never

import msgspec

from chatserve.chat.engine_client import EngineClient
from chatserve.chat.quotas import RETRY_AFTER_S
from chatserve.chat.run import Run, RunEnd
from chatserve.engine.messages import (
    Drained,
    EngineDown,
    EngineEvent,
    EngineInfo,
    Finished,
    Hello,
    Rejected,
    Started,
    StepOutput,
    Submit,
    TokenDelta,
)
from chatserve.errors import EngineUnavailableError, OverloadedError
from chatserve.types import FinishReason, RequestId, UserId

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

MOST_DEATHS: Final = 2
"""A run that was on the engine at so many of its deaths is suspected of causing them and is not submitted again. So is
one of which the engine said nothing: it may have died of the very step that was its first.
"""


class EngineLink:
    """All runs of this process."""

    def __init__(
        self,
        engine: EngineClient,
        *,
        on_up: Callable[[], None],
        on_down: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._on_up = on_up
        self._on_down = on_down
        self._runs: dict[RequestId, Run] = {}
        self._stranded: list[Run] = []
        """Without an engine, to be submitted to the next one; or refused by a full queue, to be submitted again."""
        self._resubmission: asyncio.TimerHandle | None = None
        self._waiting: set[RequestId] = set()
        self._num_runs: Counter[UserId] = Counter()
        self.num_heard = 0
        """Signs of life."""

    @property
    def engine(self) -> EngineClient:
        return self._engine

    @property
    def num_waiting(self) -> int:
        """Runs that the engine has not admitted yet."""
        return len(self._waiting) + len(self._stranded)

    def num_runs(self, user: UserId) -> int:
        """A user's runs that have not ended."""
        return self._num_runs[user]

    def info(self) -> EngineInfo:
        """The engine's facts.

        Raises:
            EngineUnavailableError: it is away.
        """
        info = self._engine.info
        if info is None:
            raise EngineUnavailableError("the model is being started; try again in a moment")
        return info

    def start(self, run: Run) -> None:
        """Submit a run, now or as soon as there is an engine."""
        self._num_runs[run.user] += 1
        self._submit(run)

    def cancel(self, run: Run, keep: int) -> None:
        """End a run, of whose output the first `keep` tokens stay. Its `on_end` follows, at once or later."""
        if run.has_ended or run.keep is not None:
            return
        run.keep = keep
        if run.request_id is None:
            self._stranded.remove(run)
            self._end(run, RunEnd(reason=FinishReason.CANCELLED))
            return
        try:
            self._engine.cancel(run.request_id, max(0, keep - run.num_submitted_output))
        except EngineUnavailableError:
            log.debug("the engine went away while %s was being cancelled", run.name)  # EngineDown will end it

    def abandon_stranded(self) -> None:
        """No engine came back in time: give up what waits for one."""
        stranded, self._stranded = self._stranded, []
        detail = "the model did not come back in time"
        for run in stranded:
            self._end(run, RunEnd(reason=FinishReason.INTERRUPTED, code=EngineUnavailableError.code, detail=detail))

    async def listen(self) -> None:
        """Run the loop over the engine's events, until they end."""
        async for event in self._engine.events():
            self.handle(event)

    def handle(self, event: EngineEvent) -> None:
        """Take in one event."""
        self.num_heard += 1
        match event:
            case StepOutput():
                self._take_step(event)
            case Hello():
                stranded, self._stranded = self._stranded, []
                for run in stranded:
                    self._submit(run)
                self._on_up()
            case EngineDown():
                self._take_down()
                self._on_down()
            case Drained():
                pass
            case _:
                assert_never(event)

    # --- inside -------------------------------------------------------------------------------------------------------

    def _submit(self, run: Run) -> None:
        info = self._engine.info
        base = run.base if info is not None and run.base is not None and run.base.epoch == info.epoch else None
        all_ids = run.prompt_ids + tuple(run.output_ids)
        run.attempts += 1
        run.request_id = RequestId(f"{run.name}.{run.attempts}")
        run.num_submitted_output = len(run.output_ids)
        run.is_queued = False
        request = Submit(
            request_id=run.request_id,
            user=run.user,
            base=base,
            token_ids=all_ids[base.num_tokens :] if base is not None else all_ids,
            num_shared_tokens=run.num_shared_tokens,
            num_prompt_tokens=len(run.prompt_ids),
            sampling=run.sampling,
            stop_token_ids=run.stop_token_ids,
        )
        try:
            self._engine.submit(request)
        except EngineUnavailableError:
            self._strand(run)
            return
        self._runs[run.request_id] = run
        self._waiting.add(run.request_id)

    def _strand(self, run: Run) -> None:
        run.request_id = None
        run.base = None
        self._stranded.append(run)

    def _take_step(self, step: StepOutput) -> None:
        for rejected in step.rejected:
            self._take_rejected(rejected)
        for queued in step.queued:
            if (run := self._runs.get(queued.request_id)) is not None:
                run.is_queued = True
                if not run.has_started:
                    run.listener.on_queued(queued.position)
        for started in step.started:
            self._take_started(started)
        for delta in step.deltas:
            self._take_delta(delta)
        for finished in step.finished:
            self._take_finished(finished)

    def _take_started(self, started: Started) -> None:
        run = self._runs.get(started.request_id)
        if run is None:
            return
        self._waiting.discard(started.request_id)
        run.is_queued = False
        if not run.has_started:
            run.has_started = True
            run.listener.on_started(started)

    def _take_delta(self, delta: TokenDelta) -> None:
        run = self._runs.get(delta.request_id)
        if run is None or run.keep is not None:
            return
        assert delta.first + run.num_submitted_output == len(run.output_ids), "deltas come in order"
        run.output_ids += delta.token_ids
        run.listener.on_tokens(delta.token_ids)

    def _take_rejected(self, rejected: Rejected) -> None:
        run = self._runs.get(rejected.request_id)
        if run is None:
            return
        if rejected.code == "need_tokens" and run.keep is None:
            self._forget(run)
            run.base = None
            self._submit(run)
            return
        if rejected.code == OverloadedError.code and run.keep is None and (run.is_promised or run.has_started):
            self._hold_back(run, rejected.retry_after_s or RETRY_AFTER_S)
            return
        reason = FinishReason.ERROR if run.keep is None else FinishReason.CANCELLED
        self._end(run, RunEnd(reason=reason, code=rejected.code, detail=rejected.detail))

    def _hold_back(self, run: Run, retry_after_s: float) -> None:
        """The engine's queue is full: after a death all is submitted again at once, and other processes submit too."""
        self._forget(run)
        run.request_id = None
        self._stranded.append(run)
        if self._resubmission is None:
            loop = asyncio.get_running_loop()
            self._resubmission = loop.call_later(retry_after_s, self._resubmit)

    def _resubmit(self) -> None:
        self._resubmission = None
        if self._engine.info is None:
            return  # the next engine gets them
        stranded, self._stranded = self._stranded, []
        for run in stranded:
            self._submit(run)

    def _take_finished(self, finished: Finished) -> None:
        run = self._runs.get(finished.request_id)
        if run is None:
            return
        reason = FinishReason(finished.reason)
        total = run.num_submitted_output + finished.num_output_tokens
        kept = total
        if run.keep is not None and run.keep < total:
            # It ran on before the cancel reached it: what came after is no part of the message.
            reason, kept = FinishReason.CANCELLED, run.keep
        path = finished.path
        if path is not None:
            path = msgspec.structs.replace(path, num_tokens=min(path.num_tokens, len(run.prompt_ids) + kept))
        code = "internal" if reason is FinishReason.ERROR else ""
        self._end(run, RunEnd(reason=reason, path=path, code=code, detail=finished.detail))

    def _take_down(self) -> None:
        runs, self._runs = list(self._runs.values()), {}
        self._waiting.clear()
        for run in runs:
            if run.keep is not None:
                self._end(run, RunEnd(reason=FinishReason.CANCELLED))
                continue
            run.deaths += not run.is_queued
            if run.deaths >= MOST_DEATHS:
                detail = f"the engine died {run.deaths} times while it was generating this; it is not tried again"
                self._end(run, RunEnd(reason=FinishReason.ERROR, code=EngineUnavailableError.code, detail=detail))
            else:
                self._strand(run)

    def _end(self, run: Run, end: RunEnd) -> None:
        assert not run.has_ended, "a run ends once"
        self._forget(run)
        run.has_ended = True
        self._num_runs[run.user] -= 1
        if not self._num_runs[run.user]:
            del self._num_runs[run.user]
        run.listener.on_end(end)

    def _forget(self, run: Run) -> None:
        if run.request_id is not None:
            self._runs.pop(run.request_id, None)
            self._waiting.discard(run.request_id)
