"""A pytest plugin of `_test_gpu`: writes what was collected and each result to $TEST_GPU_REPORT as it comes, one JSON
value a line, so that a process that is killed has still said what it did."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

_LAST_LINES = 12


def _write(value: object) -> None:
    with Path(os.environ["TEST_GPU_REPORT"]).open("a") as file:
        file.write(json.dumps(value) + "\n")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write({"test": report.nodeid, "outcome": "failed", "lines": report.longreprtext.splitlines()[-_LAST_LINES:]})


def pytest_collection_finish(session: pytest.Session) -> None:
    _write({"collected": [item.nodeid for item in session.items]})


def pytest_runtest_logstart(nodeid: str) -> None:
    _write({"test": nodeid, "outcome": "started"})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or report.outcome != "passed":
        lines = report.longreprtext.splitlines()[-_LAST_LINES:] if report.failed else []
        _write({"test": report.nodeid, "outcome": report.outcome, "lines": lines})
