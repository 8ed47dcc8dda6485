"""How the fetching of a model shows itself in a log."""

from __future__ import annotations

import pytest

from chatserve.progress import pull_progress


def test_a_log_gets_a_line_a_stage_and_sizes_of_bytes_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pull_progress("tiny") as report:
        for stage, total in (("download", 93_000_000), ("check", 93_000_000), ("convert", 4)):
            for done in (0, total):
                report(stage, done, total)
    assert capsys.readouterr().err.splitlines() == [
        "Downloading tiny (93 MB)",
        "Checking tiny (93 MB)",
        "Converting tiny",
    ]


def test_a_terminal_gets_bars_and_no_bytes_for_steps(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    with pull_progress("tiny") as report:
        report("download", 93_000_000, 93_000_000)
        report("convert", 1, 4)
    drawn = capsys.readouterr().err
    assert "93.0/93.0 MB" in drawn
    assert "Converting tiny" in drawn
    assert "/4 bytes" not in drawn
