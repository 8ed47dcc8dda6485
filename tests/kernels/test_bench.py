"""What the benchmark says of a row follows from what it measured, and its plot is well-formed."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest
from chatserve_kernels.bench.__main__ import summary
from chatserve_kernels.bench.plot import svg
from chatserve_kernels.bench.tables import TABLES, Bench, Ceilings, Row, table

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
    row.compare = dict
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


def test_tables_have_names_of_their_own():
    assert {"flat", "shared", "levels", "uneven", "break-even", "plan", "prefill", "fused"} <= set(TABLES)
    with pytest.raises(ValueError, match="a table flat already"):
        table("flat")(lambda bench: iter(()))


def test_plans_are_measured_without_a_gpu():
    row = next(TABLES["plan"](Bench()))
    assert 0 < row.more["same rows us"] < row.us
