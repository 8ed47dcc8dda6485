"""Steps on their way through the runner: planned, launched, waited for, booked.

A runner that allows it has the next step launched before the last one's tokens are there, so that the device never
waits for what is done here. Owns the order, what becomes of a step that fails, and how the loop's time is spent.
"""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Final

from chatserve.sched.plan import StepFailedError, StepPlan, TransfersFailedError

if TYPE_CHECKING:
    from collections.abc import Callable

    from chatserve.sched.plan import PendingStep, Runner
    from chatserve.sched.scheduler import Scheduler

_log: Final = logging.getLogger(__name__)

_MOST_FAILURES: Final = 3
"""After so many failed steps in a row it is the process that is broken, not the requests."""


class StepPipeline:
    """Takes steps from `scheduler` to `runner` and back. `clock` is in seconds and never goes back."""

    def __init__(self, scheduler: Scheduler, runner: Runner, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._in_flight: deque[tuple[StepPlan, PendingStep]] = deque()
        """Oldest first."""
        self._num_failures = 0
        """Steps that failed one after the other, for reasons unknown."""
        self.is_waiting = False
        """The last turn found nothing to do before copies in the background have ended."""
        self.counters = {"steps": 0, "late_steps": 0, "scheduling_us": 0, "launching_us": 0, "waiting_us": 0}
        """See `CacheReport`."""

    def turn(self, *, may_launch: bool) -> bool:
        """Launch the next step if there is one, then wait for the oldest in flight if no more may be, and book it.

        Returns whether the scheduler may have something to do though nobody asked for anything since. Raises what the
        runner raises where only a new process can go on: when transfers fail, because what stands in blocks is unknown
        then, and when one step after the other fails.
        """
        launched = may_launch and self._launch()
        if self._in_flight and (not launched or len(self._in_flight) >= self._runner.max_in_flight):
            self._land()
        done: tuple[int, ...] = ()
        if self._scheduler.is_copying:
            done = self._runner.poll_background()
            for number in done:
                self._scheduler.background_done(number)
        self.is_waiting = not launched and not self._in_flight and self._scheduler.is_copying
        return launched or bool(done)

    def _launch(self) -> bool:
        """Launch the next step. False: there is none now."""
        began_s = self._clock()
        plan = self._scheduler.schedule()
        planned_s = self._clock()
        self.counters["scheduling_us"] += round((planned_s - began_s) * 1e6)
        if not plan:
            return False
        if self._in_flight and self._in_flight[-1][1].is_done():
            self.counters["late_steps"] += 1
        try:
            pending = self._runner.launch(plan)
        except TransfersFailedError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the end of this step's requests alone
            while self._in_flight:
                self._land()
            self._fail(plan, error)
        else:
            self._in_flight.append((plan, pending))
            self.counters["launching_us"] += round((self._clock() - planned_s) * 1e6)
        return True

    def _land(self) -> None:
        """Wait for the oldest step in flight and book it."""
        plan, pending = self._in_flight.popleft()
        began_s = self._clock()
        try:
            result = pending.wait()
        except TransfersFailedError:
            raise
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(plan, error)
        else:
            self._num_failures = 0
            self.counters["steps"] += bool(plan.rows)
            self.counters["waiting_us"] += round((self._clock() - began_s) * 1e6)
            self._scheduler.commit(plan, result)

    def _fail(self, plan: StepPlan, error: Exception) -> None:
        """Raises the error again if it is one too many."""
        if isinstance(error, StepFailedError):
            detail = str(error)
        else:
            self._num_failures += 1
            if self._num_failures == _MOST_FAILURES:
                raise error
            detail = f"{type(error).__name__}: {error}"
        _log.error("step %d failed, and its %d requests with it: %s", plan.step, len(plan.rows), detail)
        self._scheduler.fail(plan, detail)
