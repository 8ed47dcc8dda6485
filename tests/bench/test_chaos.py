"""The short form of `chatserve bench chaos`, and that its checks can fail."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from chatserve.bench.chaos.ledger import Ledger
from chatserve.bench.chaos.mirror import Frame, Mirror, ProtocolViolationError
from chatserve.bench.chaos.run import ChaosRun, Plan
from chatserve.bench.chaos.tally import quantile
from chatserve.bench.chaos.tiny_model import make_tiny_model
from chatserve.supervisor.paths import default_cache_dir


@pytest.mark.timeout(300)
def test_nothing_acknowledged_is_lost_while_everything_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan(
        directory=tmp_path,
        model=str(make_tiny_model(tmp_path / "tiny-model", default_cache_dir())),
        minutes=0.2,
        min_kills=3,
        seed=5,
        num_users=4,
        every_s=1.0,
        pause_s=0.3,
    )
    outcome = asyncio.run(ChaosRun(plan, print).run())
    assert outcome.problems == []
    assert outcome.tally.kills >= 3
    assert outcome.tally.messages > 0
    assert "the storm is over" in capsys.readouterr().out


# --- the checks -------------------------------------------------------------------------------------------------------


def added(seq: int, message: str, parent: str | None, role: str, **more: Any) -> Frame:
    fields = {"message": message, "parent": parent, "role": role, "text": "", "status": "done"}
    return {"type": "message.added", "session": "s", "seq": seq, **fields, **more}


@pytest.fixture
def mirror() -> Mirror:
    mirror = Mirror()
    mirror.apply(added(1, "q", None, "user", text="why"))
    mirror.apply(added(2, "a", "q", "assistant", status="generating"))
    mirror.apply({"type": "generation.delta", "session": "s", "seq": 3, "message": "a", "text": "be"})
    return mirror


def snapshot(seq: int, *messages: Frame) -> Mirror:
    loaded = Mirror()
    fields = {"title": "", "system": None, "params": {}, "leaf": messages[-1]["message"]}
    assert loaded.load({"part": 0, "last": True, "seq": seq, "messages": list(messages), **fields})
    return loaded


@pytest.mark.parametrize(
    "event",
    [
        {"type": "generation.delta", "seq": 5, "message": "a", "text": "cause"},
        {"type": "generation.delta", "seq": 3, "message": "a", "text": "be"},
        {"type": "generation.delta", "seq": 4, "message": "q", "text": "no answer"},
        {"type": "generation.delta", "seq": 4, "message": "gone", "text": "of nothing"},
        {"type": "message.deleted", "seq": 4, "message": "q", "deleted": 2},
        {"type": "session.deleted", "seq": 4},
        {"type": "generation.end", "seq": 4, "message": "a", "reason": "stop", "status": "stopped", "usage": {}},
        added(4, "q", None, "user"),
    ],
    ids=["gap", "repeat", "not generating", "unknown", "deleted early", "session early", "wrong status", "added twice"],
)
def test_a_mirror_takes_no_event_that_breaks_the_protocol(mirror: Mirror, event: Frame) -> None:
    with pytest.raises(ProtocolViolationError):
        mirror.apply({"session": "s", **event})


def test_a_snapshot_that_lost_shown_text_is_refused(mirror: Mirror) -> None:
    question = {"message": "q", "parent": None, "role": "user", "text": "why", "status": "done"}
    answer = {"message": "a", "parent": "q", "role": "assistant", "status": "interrupted"}
    mirror.replace(snapshot(4, question, {**answer, "text": "because"}))
    with pytest.raises(ProtocolViolationError, match="'because'"):
        mirror.replace(snapshot(5, question, {**answer, "text": "bec"}))
    with pytest.raises(ProtocolViolationError, match="seq 3"):
        mirror.replace(snapshot(3, question, {**answer, "text": "because"}))


def test_a_ledger_finds_what_is_lost_doubled_or_changed(mirror: Mirror) -> None:
    ledger = Ledger("")
    ledger.asked("q", None, "why", "a")
    mirror.title = ""
    ledger.compare("s", mirror)
    for change in (
        lambda: mirror.messages.pop("a"),
        lambda: mirror.messages.update(twin={**mirror.messages["a"], "message": "twin"}),
        lambda: mirror.messages["q"].update(text="how"),
        lambda: setattr(mirror, "title", "another"),
    ):
        before = {message: dict(record) for message, record in mirror.messages.items()}
        change()
        with pytest.raises(ProtocolViolationError):
            ledger.compare("s", mirror)
        mirror.messages, mirror.title = before, ""
    ledger.compare("s", mirror)
    with pytest.raises(ProtocolViolationError, match="1 messages"):
        ledger.deleted("q", 1)


def test_a_quantile_is_a_value_that_occurred() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile(list(range(100)), 0.99) == 98
    assert quantile([7.0], 0.99) == 7.0
