"""What an engine promises its clients: ends, refusals, releases and reports, step by step."""

from __future__ import annotations

import msgspec
import pytest

from chatserve.engine.messages import Drain, Inspect, PathRef, Release
from chatserve.engine.paths import PathTable
from chatserve.types import RequestId
from tests.engine.asking import BOB, GREEDY, cancel, counters, oracle, path_of
from tests.fakes.engines import Transcript, make_engine, make_submit, run_until_idle
from tests.fakes.fake_runner import FakeRunner


def test_the_last_stop_token_is_named_and_belongs_to_no_text() -> None:
    runner = FakeRunner(stop_token_id=9, stop_one_in=6)
    engine = make_engine(runner)
    for n in range(20):
        engine.handle(make_submit(f"r{n}", (n + 1, 2), max_tokens=40, stop_token_ids=(9,)))
    transcript = run_until_idle(engine)
    stopped = [finished for finished in transcript.finished.values() if finished.reason == "stop"]
    assert len(stopped) > 10
    for finished in stopped:
        assert finished.stop_token_id == 9
        assert 9 not in transcript.text(finished.request_id)
        assert finished.path is not None
        assert finished.path.num_tokens == 2 + finished.num_output_tokens


@pytest.mark.parametrize("keep", [None, 0, 3, 100])
def test_cancel_keeps_as_much_of_the_path_as_it_says(keep: int | None) -> None:
    runner = FakeRunner()
    engine = make_engine(runner)
    prompt = list(range(30, 50))
    engine.handle(make_submit("a", prompt, max_tokens=50))
    transcript = Transcript()
    while len(transcript.text("a")) < 6:
        transcript.add(engine.step())
    engine.handle(cancel("a", keep))
    run_until_idle(engine, transcript)
    num_kept = 6 if keep is None else min(keep, 6)
    path = path_of(transcript, "a")
    assert path.num_tokens == len(prompt) + num_kept
    engine.handle(make_submit("b", (1,), base=path))
    run_until_idle(engine, transcript)
    assert transcript.text("b") == oracle(runner, [*prompt, *transcript.text("a")[:num_kept], 1])


def test_a_cancel_counts_from_the_next_step_on() -> None:
    engine = make_engine(FakeRunner())
    engine.handle(make_submit("a", range(20), max_tokens=50))
    engine.step()
    engine.handle(cancel("a"))
    output = engine.step()
    assert output is not None
    assert not output.deltas
    assert [finished.reason for finished in output.finished] == ["cancelled"]


def test_an_id_is_free_again_when_its_end_has_been_said_and_not_before() -> None:
    runner = FakeRunner()
    engine = make_engine(runner)
    engine.handle(make_submit("first", range(20)))
    transcript = run_until_idle(engine)
    base = path_of(transcript, "first")
    engine.handle(make_submit("a", range(100, 120), max_tokens=50))
    engine.step()
    engine.handle(cancel("a"))
    engine.handle(make_submit("a", (1, 2), base=base))
    output = engine.step()
    assert output is not None
    assert [rejected.code for rejected in output.rejected] == ["bad_params"]
    (finished,) = output.finished
    engine.handle(make_submit("a", (1, 2), base=base))
    engine.handle(make_submit("b", (3,), base=finished.path))
    again = run_until_idle(engine)
    assert again.text("a") == oracle(runner, [*range(20), *transcript.text("first"), 1, 2])
    assert again.text("b")[:8] == oracle(runner, [*range(100, 120), oracle(runner, [*range(100, 120)], 1)[0], 3])


def test_draining_finishes_what_is_here_and_refuses_the_rest() -> None:
    engine = make_engine(FakeRunner())
    engine.handle(make_submit("a", range(20)))
    engine.handle(Drain())
    assert not engine.is_drained
    engine.handle(make_submit("b", range(20)))
    transcript = run_until_idle(engine)
    assert engine.is_drained
    assert transcript.rejected["b"].code == "overloaded"
    assert transcript.finished["a"].reason == "length"


def test_mistakes_are_answered_and_touch_nothing() -> None:
    runner = FakeRunner(vocab_size=100)
    engine = make_engine(runner, context_tokens=64)
    good = make_submit("good", range(10))
    bad = {
        "outside": make_submit("outside", (1, 100)),
        "negative": make_submit("negative", (-1,)),
        "empty": make_submit("empty", ()),
        "shared": make_submit("shared", (1, 2), num_shared_tokens=3),
        "prompt": make_submit("prompt", (1, 2), num_prompt_tokens=3),
        "no seed": msgspec.structs.replace(good, request_id=RequestId("no seed"), sampling=make_unseeded()),
        "hot": make_submit("hot", (1,), temperature=float("nan")),
        "too long": make_submit("too long", [1] * 64),
        "elsewhere": make_submit("elsewhere", (1,), base=PathRef("another", 1, 1)),
        "forgotten": make_submit("forgotten", (1,), base=PathRef(engine.info.epoch, 77, 1)),
    }
    engine.handle(good)
    for submit in (*bad.values(), good):
        engine.handle(submit)
    output = engine.step()
    assert output is not None
    codes = {rejected.request_id: rejected.code for rejected in output.rejected}
    assert codes == {
        **dict.fromkeys(bad, "bad_params"),
        "too long": "context_overflow",
        "elsewhere": "need_tokens",
        "forgotten": "need_tokens",
        "good": "bad_params",  # the second of the two
    }
    overflow = next(rejected for rejected in output.rejected if rejected.code == "context_overflow")
    assert (overflow.prompt_tokens, overflow.context_tokens) == (64, 64)
    assert "100 is outside the vocabulary of 100" in output.rejected[0].detail
    assert [started.request_id for started in output.started] == ["good"]
    while engine.has_work:
        engine.step()
    engine.check()


def make_unseeded() -> object:
    return msgspec.structs.replace(GREEDY, seed=None)


def test_a_full_queue_says_when_to_come_back() -> None:
    engine = make_engine(FakeRunner(), max_queued=3, max_running=1)
    for n in range(6):
        engine.handle(make_submit(f"r{n}", range(5)))
    transcript = run_until_idle(engine)
    assert list(transcript.rejected) == ["r3", "r4", "r5"]
    for rejected in transcript.rejected.values():
        assert rejected.code == "overloaded"
        assert rejected.retry_after_s is not None
        assert 1.0 <= rejected.retry_after_s <= 60.0


def test_paths_of_another_user_are_unknown() -> None:
    engine = make_engine(FakeRunner())
    engine.handle(make_submit("a", range(20)))
    transcript = run_until_idle(engine)
    engine.handle(make_submit("b", (1,), base=path_of(transcript, "a"), user=BOB))
    run_until_idle(engine, transcript)
    assert transcript.rejected["b"].code == "need_tokens"


def test_forgotten_paths_ask_for_all_tokens_and_the_cache_is_found_by_tokens() -> None:
    runner = FakeRunner()
    engine = make_engine(runner, paths=PathTable(max_tokens=40))
    engine.handle(make_submit("a", range(20)))
    engine.handle(make_submit("b", range(100, 120)))
    transcript = run_until_idle(engine)
    engine.handle(make_submit("c", (1,), base=path_of(transcript, "a")))
    whole = [*range(20), *transcript.text("a"), 1]
    engine.handle(make_submit("d", whole))
    run_until_idle(engine, transcript)
    assert transcript.rejected["c"].code == "need_tokens"
    assert transcript.started["d"].computed_tokens == 2
    assert transcript.text("d") == oracle(runner, whole)


def test_released_paths_are_forgotten_and_their_blocks_are_free() -> None:
    engine = make_engine(FakeRunner())
    engine.handle(make_submit("a", range(40)))
    transcript = run_until_idle(engine)
    assert engine.report(Inspect(0)).device.cached > 0
    path = path_of(transcript, "a")
    engine.handle(Release(BOB, (path,)))
    assert engine.report(Inspect(0)).device.cached > 0
    engine.handle(Release(make_submit("x", (1,)).user, (path, path, PathRef("another", 1, 1))))
    engine.handle(make_submit("b", (1,), base=path))
    run_until_idle(engine, transcript)
    assert transcript.rejected["b"].code == "need_tokens"
    report = engine.report(Inspect(0))
    assert report.device.free == report.device.total


def test_an_answer_whose_question_names_the_same_path_is_released_to_its_end() -> None:
    """The paths of a regenerated answer and of its question have one handle; the question may be named first."""
    engine = make_engine(FakeRunner())
    prompt = list(range(40))
    engine.handle(make_submit("a", prompt, max_tokens=30))
    transcript = run_until_idle(engine)
    answer = path_of(transcript, "a")
    question = msgspec.structs.replace(answer, num_tokens=len(prompt))
    engine.handle(Release(make_submit("x", (1,)).user, (question, answer)))
    run_until_idle(engine, transcript)
    report = engine.report(Inspect(0))
    assert report.device.free == report.device.total


def test_a_deleted_answer_leaves_its_conversation_in_the_cache() -> None:
    engine = make_engine(FakeRunner())
    prompt = list(range(40))
    engine.handle(make_submit("a", prompt, max_tokens=30))
    transcript = run_until_idle(engine)
    engine.handle(Release(make_submit("x", (1,)).user, (path_of(transcript, "a"),), len(prompt)))
    engine.handle(make_submit("b", prompt))
    run_until_idle(engine, transcript)
    assert transcript.started["b"].computed_tokens == 1
    assert engine.report(Inspect(0)).device.cached <= 4


def test_a_report_adds_up() -> None:
    engine = make_engine(FakeRunner(num_blocks=32))
    for n in range(3):
        engine.handle(make_submit(f"r{n}", [n + 1] * 20))
    transcript = Transcript()
    for _ in range(3):
        transcript.add(engine.step())
    engine.handle(Inspect(5, with_map=True))
    output = engine.step()
    assert output is not None
    transcript.add(output)
    (report,) = output.reports
    assert report.inspect_tag == 5
    assert report.running == 3
    assert len(report.block_map) == 32
    for pool in (report.device, report.host):
        assert pool.free + pool.cached + pool.private + pool.transit == pool.total
    run_until_idle(engine, transcript)
    assert counters(engine)["prompt_tokens_computed"] == 60
    assert counters(engine)["output_tokens"] == 24
