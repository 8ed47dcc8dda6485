"""How long work shows itself on a terminal, and in a log.

Owns the look; knows only stage names and numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_TITLES = {
    "download": "Downloading",
    "check": "Checking",
    "convert": "Converting",
    "wait": "Waiting for another process that fetches it",
    "repair": "Repairing",
}


@contextlib.contextmanager
def pull_progress(name: str) -> Iterator[Callable[[str, int, int], None]]:
    """A function of (stage, done, total), in bytes, that draws one bar a stage on a terminal's stderr, and elsewhere
    writes one line a stage.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _line_a_stage(name, console)
        return
    bars: dict[str, TaskID] = {}
    with Progress(
        TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=console
    ) as progress:

        def report(stage: str, done: int, total: int) -> None:
            if stage not in bars:
                bars[stage] = progress.add_task(f"{_TITLES.get(stage, stage)} {name}", total=total or None)
            progress.update(bars[stage], completed=done, total=total or None)

        yield report


def _line_a_stage(name: str, console: Console) -> Callable[[str, int, int], None]:
    seen: set[str] = set()

    def report(stage: str, _done: int, total: int) -> None:
        if stage not in seen:
            seen.add(stage)
            size = f" ({total / 1e6:.0f} MB)" if total else ""
            console.print(f"{_TITLES.get(stage, stage)} {name}{size}", highlight=False, soft_wrap=True)

    return report
