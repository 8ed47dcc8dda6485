"""What the benchmark says of a row follows from what it measured, and its plot is well-formed."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET

import pytest
from chatserve_kernels.bench import rivals
from chatserve_kernels.bench.__main__ import measure_rivals, summary
from chatserve_kernels.bench.plot import svg
from chatserve_kernels.bench.tables import TABLES, Bench, Ceilings, Row, table
from chatserve_kernels.bench.workloads import even, shared

CEILINGS = Ceilings(copy_bytes_per_s=4e12, matrix_flops_per_s=8e14)


def test_rates_floors_and_ratios():
    row = Row("shared", "64 x 1", us=50.0, bytes=1e8, flops=8e9, rivals={"a": 100.0, "b": 75.0})
    figures = row.derived(CEILINGS)
    assert figures["TB/s"] == pytest.approx(2.0)
    assert figures["of copy"] == pytest.approx(0.5)
    assert figures["TFLOP/s"] == pytest.approx(160.0)
    assert figures["of matrix product"] == pytest.approx(0.2)
    assert figures["floor us"] == pytest.approx(25.0)
    assert figures["times floor"] == pytest.approx(2.0)
    assert figures["best rival over ours"] == pytest.approx(1.5)
    assert "b us 75" in row.line(CEILINGS)
    row.compare = {"c": lambda: 1.0}
    as_json = row.as_json(CEILINGS)
    assert as_json["derived"] == figures
    assert json.loads(json.dumps(as_json))["rivals"] == row.rivals


def test_the_summary_says_what_the_goals_are_set_on():
    rows = [
        Row("flat", "1", 10.0, rivals={"a": 20.0, "b": 40.0}),
        Row("flat", "2", 8.0, rivals={"a": 4.0}),
        Row("uneven", "1", 3.0),
        Row("uneven", "2", 2.0),
        Row("break-even", "1", 11.0, more={"not shared us": 10.0}),
    ]
    flat, uneven, sharing = summary(rows)
    assert "mean 1.000, worst 2.000" in flat
    assert uneven.endswith("1.50")
    assert sharing.endswith("1.100")
    assert summary([]) == []


def test_a_plot_has_a_bar_for_each_time():
    rows = [Row("a<b", "x & y", 1.5, rivals={"other": 3.0}), Row("c", "z", 2.0)]
    root = ET.fromstring(svg(rows, "title"))
    bars = [float(bar.get("width")) for bar in root.iter("{http://www.w3.org/2000/svg}rect") if bar.get("x")]
    assert len(bars) == 3
    assert bars[0] == pytest.approx(bars[1] / 2)


def test_one_rival_is_measured_on_all_rows_before_the_next_and_one_that_fails_stops_no_other(capfd):
    order = []

    def measure(name: str, us: float):
        def run() -> float:
            order.append(name)
            if us < 0:
                raise RuntimeError("no compiler")
            return us

        return run

    rows = [
        Row("flat", "1", 1.0, compare={"a": measure("a1", 3.0)}),
        Row("shared", "2", 1.0, compare={"a": measure("a2", 4.0), "b": measure("b2", -1.0), "c": measure("c2", 5.0)}),
        Row("shared", "3", 1.0, rivals={"d": 9.0}, compare={"b": measure("b3", 2.0), "c": measure("c3", 6.0)}),
    ]
    told = []
    assert measure_rivals(rows, lambda row: told.append(row.work)) == ["b"]
    assert order == ["a1", "a2", "b2", "c2", "c3"]
    assert told == ["1", "2", "2", "3"]
    assert [row.rivals for row in rows] == [{"a": 3.0}, {"a": 4.0, "c": 5.0}, {"d": 9.0, "c": 6.0}]
    assert "no compiler" in capfd.readouterr().err


def test_rivals_are_prepared_all_at_once_where_they_are_told_to(tmp_path):
    """Each waits for the other one's file, and the last fails."""
    wait = "while not (folder / other).exists(): pass"
    code = f"import os, pathlib, sys\nfolder = pathlib.Path(os.environ['{rivals.CACHE_VARIABLE}'])\n"
    meet = [sys.executable, "-c", f"{code}me, other = sys.argv[1:]\n(folder / me).touch()\n{wait}"]
    commands = {"a": [*meet, "a", "b"], "b": [*meet, "b", "a"], "c": [sys.executable, "-c", "raise SystemExit(3)"]}
    assert rivals.prepare(tmp_path, commands) == ["c"]


def test_only_shared_work_has_a_rival_that_shares(monkeypatch):
    monkeypatch.setattr(rivals, "is_installed", lambda: True)
    assert list(rivals.of(Bench(), even(2, 64), 100)) == ["FlashInfer"]
    assert list(rivals.of(Bench(), shared(2, 32, 64), 100)) == ["FlashInfer", "cascade"]
    monkeypatch.setattr(rivals, "is_installed", lambda: False)
    assert rivals.of(Bench(), even(2, 64), 100) == {}
    with pytest.raises(ValueError, match="a rival of FlashInfer, cascade, got nobody"):
        rivals.compile_one("nobody")


def test_tables_have_names_of_their_own():
    assert {"flat", "shared", "levels", "uneven", "break-even", "plan", "prefill", "fused"} <= set(TABLES)
    with pytest.raises(ValueError, match="a table flat already"):
        table("flat")(lambda bench: iter(()))


def test_plans_are_measured_without_a_gpu():
    row = next(TABLES["plan"](Bench()))
    assert 0 < row.more["same rows us"] < row.us
