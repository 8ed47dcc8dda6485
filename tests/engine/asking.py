"""What tests ask of an engine and its transcript."""

from __future__ import annotations

from chatserve.engine.engine import Engine
from chatserve.engine.messages import Cancel, Inspect, PathRef
from chatserve.types import RequestId, UserId
from tests.fakes.engines import Transcript, make_submit
from tests.fakes.fake_runner import FakeRunner

BOB = UserId("bob")

GREEDY = make_submit("x", (1,)).sampling


def cancel(request_id: str, keep: int | None = None) -> Cancel:
    return Cancel(RequestId(request_id), keep)


def path_of(transcript: Transcript, request_id: str) -> PathRef:
    path = transcript.finished[request_id].path
    assert path is not None
    return path


def counters(engine: Engine) -> dict[str, int]:
    return engine.report(Inspect(0)).counters


def oracle(runner: FakeRunner, token_ids: list[int], num_output_tokens: int = 8) -> list[int]:
    return runner.oracle(token_ids, GREEDY, num_output_tokens=num_output_tokens)
