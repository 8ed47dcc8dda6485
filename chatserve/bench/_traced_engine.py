"""The engine's process with a profiler around some of its decode steps: `python -m chatserve.bench._traced_engine`.

Waits until as many plain decode steps of one size have followed each other as show that the batch is complete, records
the next ones on the device, and writes `trace.json` beside the settings' socket: how long the device was idle, and
which kernel takes how long a step. Everything else is the engine's own.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch._C._autograd import DeviceType

from chatserve.bench.gpu import TRACE_NAME
from chatserve.engine.process import read_settings, serve, start_logging
from chatserve.model.runner import ModelRunner, build_runner

if TYPE_CHECKING:
    from pathlib import Path

    from chatserve.config import EngineSettings
    from chatserve.model.runner import LaunchedStep
    from chatserve.sched.plan import StepPlan

SETTLED_STEPS = 12
TRACED_STEPS = 24


def idle_share(spans: list[tuple[float, float]]) -> float:
    """The part of the time from the first begin to the last end in which nothing ran; spans are (begin, end)."""
    spans = sorted(spans)
    begin = reached = spans[0][0]
    idle = 0.0
    for start, end in spans:
        idle += max(0.0, start - reached)
        reached = max(reached, end)
    return idle / (reached - begin)


class _Tracer:
    """Counts decode steps and traces some of them, once for each new batch size of at least `least_rows`."""

    def __init__(self, path: Path, least_rows: int = 1) -> None:
        self._path = path
        self._least_rows = least_rows
        self._rows = self._settled = self._traced = 0
        self._profile: Any = None
        self._reports: dict[int, dict[str, Any]] = {}

    def before_launch(self, plan: StepPlan) -> None:
        is_decode = all(row.num_tokens == 1 for row in plan.rows) and len(plan.rows) >= self._least_rows
        if self._profile is not None:
            self._traced += 1
            if self._traced > TRACED_STEPS or not is_decode:
                self._stop()
            return
        self._settled = self._settled + 1 if is_decode and len(plan.rows) == self._rows else 0
        self._rows = len(plan.rows)
        if self._settled >= SETTLED_STEPS and self._rows not in self._reports:
            self._traced = 0
            self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
            self._profile.start()

    def _stop(self) -> None:
        profile, self._profile, self._settled = self._profile, None, 0
        profile.stop()
        spans = [
            (event.time_range.start, event.time_range.end)
            for event in profile.events()
            if event.device_type == DeviceType.CUDA
        ]
        # Profiling itself slows the first steps: what lies before a third of the spans is left out.
        spans = sorted(spans)[len(spans) // 3 :]
        kernels = sorted(profile.key_averages(), key=lambda each: -each.self_device_time_total)
        self._reports[self._rows] = {
            "rows": self._rows,
            "idle": idle_share(spans),
            "kernels": [
                {"name": each.key, "us": each.self_device_time_total / self._traced, "count": each.count / self._traced}
                for each in kernels[:16]
                if each.self_device_time_total > 0
            ],
        }
        self._path.write_text(json.dumps(list(self._reports.values()), indent=1))


class TracedRunner(ModelRunner):
    """A `ModelRunner` whose steps are looked at."""

    def __init__(self, runner: ModelRunner, tracer: _Tracer) -> None:
        super().__init__(runner.storage, runner.executor, context_tokens=runner.context_tokens)
        self._tracer = tracer

    def launch(self, plan: StepPlan) -> LaunchedStep:
        self._tracer.before_launch(plan)
        return super().launch(plan)


def build_traced_runner(settings: EngineSettings) -> TracedRunner:
    return TracedRunner(build_runner(settings), _Tracer(settings.socket_path.with_name(TRACE_NAME)))


if __name__ == "__main__":
    start_logging()
    sys.exit(serve(read_settings(), build_traced_runner))
