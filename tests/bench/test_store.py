"""The store's bench prints what it is to be judged by, and its parts agree with each other."""

from __future__ import annotations

import re

import pytest

from chatserve.bench import store


@pytest.mark.parametrize("step_ms", ["0", "-1"])
def test_a_step_that_takes_no_time_is_refused(step_ms: str) -> None:
    with pytest.raises(SystemExit) as refused:
        store.main(["--step-ms", step_ms])
    assert refused.value.code == 2


def test_it_counts_calls_and_compares_with_a_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(store, "NUM_SESSIONS", 20)
    monkeypatch.setattr(store, "NUM_STEPS", 10)
    monkeypatch.setattr(store, "NUM_MESSAGES", 2)
    assert store.main(["--step-ms", "50"]) == 0
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in capsys.readouterr().out.splitlines()]
    rows = [(row[0], row[1]) for row in cells if len(row) == 3 and row[0]]
    many = next(i for i, (name, _) in enumerate(rows) if name == "append, 20 sessions")
    values = dict(rows[many + 1 : many + 9])
    calls, commands = (float(number) for number in values["calls, and commands in them"].split(", "))
    assert calls == 1
    assert 3 * 20 <= commands <= 8 * 20
    a_second = re.fullmatch(r"20\.0, ([\d,]+)", values["the same beside the engine"])
    assert a_second is not None
    assert float(a_second[1].replace(",", "")) == pytest.approx(20 * commands, abs=11)  # both are rounded
    wall_ms = float(rows[many][1])
    assert float(values["of the engine's 50 ms a step"].rstrip("%")) == pytest.approx(100 * wall_ms / 50, abs=0.02)
    assert re.fullmatch(r"\d+\.\d\d%", values["of the same"])
