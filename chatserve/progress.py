"""How long work shows itself on a terminal, and in a log.

Owns the look; knows only stage names and numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

_TITLES = {
    "download": "Downloading",
    "check": "Checking",
    "convert": "Converting",
    "wait": "Waiting for another process that fetches it",
    "repair": "Repairing",
}
_COUNTED_IN_BYTES = frozenset({"download", "check"})


class _Bytes(DownloadColumn):
    """Bytes done and to do; nothing beside a bar that counts steps."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.fields["stage"] in _COUNTED_IN_BYTES else Text()


class _Time(TimeElapsedColumn):
    """Time left where bytes tell it, else time gone: a long step shows that it lives."""

    _left = TimeRemainingColumn()

    def render(self, task: Task) -> Text:
        return self._left.render(task) if task.fields["stage"] in _COUNTED_IN_BYTES else super().render(task)


@contextlib.contextmanager
def pull_progress(name: str) -> Iterator[Callable[[str, int, int], None]]:
    """A function of (stage, done, total), in bytes or in a few long steps, that draws one bar a stage on a terminal's
    stderr, and elsewhere writes one line a stage.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _line_a_stage(name, console)
        return
    bars: dict[str, TaskID] = {}
    with Progress(TextColumn("{task.description}"), BarColumn(), _Bytes(), _Time(), console=console) as progress:

        def report(stage: str, done: int, total: int) -> None:
            if stage not in bars:
                bars[stage] = progress.add_task(f"{_TITLES.get(stage, stage)} {name}", total=total or None, stage=stage)
            progress.update(bars[stage], completed=done, total=total or None)

        yield report


def _line_a_stage(name: str, console: Console) -> Callable[[str, int, int], None]:
    seen: set[str] = set()

    def report(stage: str, _done: int, total: int) -> None:
        if stage not in seen:
            seen.add(stage)
            size = f" ({total / 1e6:.0f} MB)" if total and stage in _COUNTED_IN_BYTES else ""
            console.print(f"{_TITLES.get(stage, stage)} {name}{size}", highlight=False, soft_wrap=True)

    return report
