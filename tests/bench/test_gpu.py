"""The GPU's measurements themselves, on a tiny shape on a CPU: what they say is what happened."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from chatserve.bench._gpu_sections import percentile
from chatserve.bench._traced_engine import idle_share
from chatserve.bench.gpu import main

if TYPE_CHECKING:
    from pathlib import Path


def test_idle_is_what_no_span_covers() -> None:
    assert idle_share([(0.0, 10.0)]) == 0.0
    assert idle_share([(5.0, 10.0), (0.0, 5.0)]) == 0.0
    assert idle_share([(0.0, 4.0), (6.0, 10.0)]) == pytest.approx(0.2)
    assert idle_share([(0.0, 8.0), (1.0, 2.0), (9.0, 10.0), (7.0, 8.5)]) == pytest.approx(0.05)


def test_a_percentile_is_one_of_the_values() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert percentile(values, 0.99) == 100.0
    assert percentile(values, 0.5) == 51.0
    assert percentile([3.0], 0.99) == 3.0


def test_an_unknown_section_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--sections", "decode,nonsense"])
    assert "unknown sections: nonsense" in capsys.readouterr().err


def test_sections_run_through_an_engine_of_their_own(tmp_path: Path) -> None:
    target = tmp_path / "figures.json"
    main(
        [
            *(
                "--device",
                "cpu",
                "--shape",
                "tiny",
                "--scale",
                "0.01",
                "--sections",
                "prefill,turn,idle",
                "--repeats",
                "1",
            ),
            *("--kv-cache-memory", "400blocks", "--host-cache-memory", "64M", "--json", str(target)),
        ]
    )
    figures = json.loads(target.read_text())
    assert figures["prefill"]["tokens_s"] > 0
    assert set(figures["turn"]["all"]) == {"resident", "host", "hinted", "gone", "cold"}
    assert min(figures["turn"]["all"]["host"]) > 0
    assert set(figures["turn"]["resident_parts_ms"]) == {"scheduling", "launching", "waiting"}
    assert figures["turn"]["resident_parts_ms"]["launching"] > 0
    assert figures["idle"]["sessions"] == 100
    assert figures["idle"]["device"] + figures["idle"]["host"] >= 100


def test_a_trace_has_a_report_of_each_kind_of_step(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "figures.json"
    main(
        [
            *("--device", "cpu", "--shape", "tiny", "--scale", "0.04", "--sections", "trace", "--repeats", "1"),
            *("--kv-cache-memory", "1000blocks", "--json", str(target)),
        ]
    )
    reports = json.loads(target.read_text())["trace"]
    assert {"decode"} <= {report["kind"] for report in reports} <= {"decode", "mixed", "prefill"}
    assert len({report["rows"] for report in reports if report["kind"] == "decode"}) == 3
    for report in reports:
        assert 0 <= report["idle"] < 1
        assert report["kernels"][0]["us"] > 0
    assert "ms a step, the device idle" in capfd.readouterr().out
