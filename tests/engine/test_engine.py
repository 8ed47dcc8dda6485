"""What an engine promises its clients, step by step, on a runner in which a wrong block is wrong text."""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from chatserve.engine.engine import Engine
from chatserve.engine.messages import Cancel, Drain, Hint, Inspect, PathRef, Release
from chatserve.engine.paths import PathTable
from chatserve.sched.plan import StepFailedError, StepPlan, TransfersFailedError
from chatserve.types import RequestId, UserId
from tests.fakes.engines import Transcript, make_engine, make_submit, run_until_idle
from tests.fakes.fake_runner import FakeRunner, LateRunner

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


# --- sharing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_system_tokens", [400, 405])
@pytest.mark.parametrize("users", [("ann",), ("ann", "bob", "eve")])
def test_ten_sessions_at_once_compute_their_system_prompt_once(num_system_tokens: int, users: tuple[str, ...]) -> None:
    runner = FakeRunner(num_blocks=256)
    engine = make_engine(runner, max_batched_tokens=128)
    system = [7 + n % 900 for n in range(num_system_tokens)]
    prompts = {f"r{n}": [*system, 1000 - 1 - n, 5, 6] for n in range(10)}
    for n, (request_id, prompt) in enumerate(prompts.items()):
        user = UserId(users[n % len(users)])
        engine.handle(make_submit(request_id, prompt, user=user, num_shared_tokens=num_system_tokens))
    transcript = run_until_idle(engine)
    computed = sum(started.computed_tokens for started in transcript.started.values())
    assert computed == num_system_tokens + 10 * 3
    for request_id, prompt in prompts.items():
        assert transcript.text(request_id) == oracle(runner, prompt)


def test_a_users_own_words_are_computed_again_for_another_user() -> None:
    runner = FakeRunner(num_blocks=64)
    engine = make_engine(runner)
    prompt = list(range(100, 180))
    engine.handle(make_submit("ann", prompt))
    engine.handle(make_submit("bob", prompt, user=BOB))
    transcript = run_until_idle(engine)
    assert transcript.started["bob"].computed_tokens == len(prompt)
    assert transcript.text("bob") == transcript.text("ann")


def test_whoever_waits_for_a_prefix_goes_on_when_its_computer_is_cancelled() -> None:
    runner = FakeRunner(num_blocks=64)
    engine = make_engine(runner, max_batched_tokens=32)
    system = list(range(100, 308))  # 13 blocks
    for n in range(4):
        engine.handle(make_submit(f"r{n}", [*system, n], num_shared_tokens=len(system)))
    transcript = Transcript()
    transcript.add(engine.step())
    assert set(transcript.started) == {"r0"}
    engine.handle(cancel("r0"))
    run_until_idle(engine, transcript)
    assert transcript.finished["r0"].reason == "cancelled"
    for n in range(1, 4):
        assert transcript.text(f"r{n}") == oracle(runner, [*system, n])
    assert sum(transcript.started[f"r{n}"].computed_tokens for n in range(1, 4)) == len(system) - 32 + 3


def test_an_unrelated_request_does_not_wait_behind_those_that_wait_for_a_prefix() -> None:
    engine = make_engine(FakeRunner(num_blocks=64), max_batched_tokens=32)
    system = list(range(100, 308))  # 13 blocks
    for n in range(4):
        engine.handle(make_submit(f"r{n}", [*system, n], max_tokens=1))
    engine.handle(make_submit("other", (1, 2, 3), max_tokens=1))
    transcript = run_until_idle(engine)
    assert transcript.started_in["other"] < transcript.started_in["r1"]


def test_a_next_turn_computes_what_is_new_and_a_regeneration_one_token() -> None:
    runner = FakeRunner(num_blocks=64)
    engine = make_engine(runner)
    first = list(range(50, 90))
    engine.handle(make_submit("first", first, max_tokens=21))
    transcript = run_until_idle(engine)
    path = path_of(transcript, "first")
    engine.handle(make_submit("next", (1, 2, 3), base=path))
    engine.handle(make_submit("again", (), base=msgspec.structs.replace(path, num_tokens=40)))
    run_until_idle(engine, transcript)
    assert transcript.started["next"].computed_tokens == 3 + 1  # KV of the last output token was never needed
    assert transcript.started["again"].computed_tokens == 1
    assert transcript.text("next") == oracle(runner, [*first, *transcript.text("first"), 1, 2, 3])
    assert transcript.text("again") == transcript.text("first")[:8]


def test_a_fork_in_mid_block_copies_one_block_and_both_sides_go_on() -> None:
    runner = FakeRunner(num_blocks=64)
    engine = make_engine(runner)
    trunk = list(range(50, 110))
    engine.handle(make_submit("trunk", trunk))
    transcript = run_until_idle(engine)
    before = counters(engine)["copies"]
    base = msgspec.structs.replace(path_of(transcript, "trunk"), num_tokens=55)  # 3 blocks and 7 tokens
    engine.handle(make_submit("fork", (1, 2, 3), base=base, max_tokens=30))
    engine.handle(make_submit("other", (4,), base=path_of(transcript, "trunk"), max_tokens=30))
    run_until_idle(engine, transcript)
    assert transcript.started["fork"].computed_tokens == 3
    assert counters(engine)["copies"] - before == 1
    assert transcript.text("fork") == oracle(runner, [*trunk[:55], 1, 2, 3], 30)
    assert transcript.text("other") == oracle(runner, [*trunk, *transcript.text("trunk"), 4], 30)


# --- ends -------------------------------------------------------------------------------------------------------------


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


# --- refusals ---------------------------------------------------------------------------------------------------------


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


# --- hints and releases -----------------------------------------------------------------------------------------------


def fill(engine: Engine, transcript: Transcript, num_requests: int, start: int = 0) -> None:
    for n in range(start, start + num_requests):
        engine.handle(make_submit(f"fill{n}", [900 - n] * 60, max_tokens=1))
        run_until_idle(engine, transcript)


def test_a_hint_brings_a_cold_path_back_before_it_is_asked_for() -> None:
    runner = FakeRunner(num_blocks=16)
    engine = make_engine(runner)
    prompt = list(range(64))
    engine.handle(make_submit("a", prompt))
    transcript = run_until_idle(engine)
    fill(engine, transcript, 6)
    path = path_of(transcript, "a")
    engine.handle(Hint(user=make_submit("x", (1,)).user, key="chat", base=path, token_ids=()))
    run_until_idle(engine, transcript)
    engine.handle(make_submit("b", (1,), base=path))
    run_until_idle(engine, transcript)
    started = transcript.started["b"]
    assert started.swapped_in_tokens == 0
    assert started.computed_tokens <= 2
    assert transcript.text("b") == oracle(runner, [*prompt, *transcript.text("a"), 1])


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


# --- failures ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class FailAt:
    """A gate that raises once, at the first step for which `when` holds."""

    error: Exception
    step: int
    failed: StepPlan | None = None

    def __call__(self, plan: StepPlan) -> None:
        if plan.step >= self.step and plan.rows and self.failed is None:
            self.failed = plan
            raise self.error


@pytest.mark.parametrize("step", range(6))
@pytest.mark.parametrize("error", [RuntimeError("unknown"), StepFailedError("out of memory")])
@pytest.mark.parametrize("late", [None, "when it is launched", "when it is waited for"])
def test_a_failed_step_ends_its_requests_with_an_error_and_the_engine_goes_on(
    late: str | None, error: Exception, step: int
) -> None:
    gate = FailAt(error, step)
    if late is None:
        runner = FakeRunner(num_blocks=64, gate=gate)
    else:
        runner = LateRunner(seed=step, fails_early=late == "when it is launched", num_blocks=64, gate=gate)
    engine = make_engine(runner, max_batched_tokens=16, max_running=2)
    for n in range(4):
        engine.handle(make_submit(f"r{n}", [n + 1] * 30))
    transcript = run_until_idle(engine)
    assert gate.failed is not None
    failed = {row.request_id for row in gate.failed.rows}
    assert failed
    for n in range(4):
        finished = transcript.finished[f"r{n}"]
        assert finished.reason == ("error" if f"r{n}" in failed else "length")
        assert (str(error) in finished.detail) == (f"r{n}" in failed)
    for n in range(4):
        engine.handle(make_submit(f"again{n}", [n + 1] * 30))
    run_until_idle(engine, transcript)
    for n in range(4):
        assert transcript.text(f"again{n}") == oracle(runner, [n + 1] * 30)


def test_an_error_while_blocks_are_on_the_move_ends_the_engine() -> None:
    def fail_on_transfers(plan: StepPlan) -> None:
        if plan.transfers:
            raise TransfersFailedError("who knows what stands there now")

    engine = make_engine(FakeRunner(num_blocks=8, gate=fail_on_transfers))
    engine.handle(make_submit("a", range(60)))
    engine.handle(make_submit("b", range(100, 160)))
    with pytest.raises(TransfersFailedError, match="who knows"):
        run_until_idle(engine)


@pytest.mark.parametrize("num_host_blocks", [0, 32])
def test_errors_after_blocks_have_moved_leave_the_cache_as_it_should_be(num_host_blocks: int) -> None:
    def fail_often(plan: StepPlan) -> None:
        if plan.rows and plan.step % 11 == 7:
            raise StepFailedError("out of memory")

    runner = FakeRunner(num_blocks=12, num_host_blocks=num_host_blocks, block_size=4, gate=fail_often)
    engine = make_engine(runner, max_batched_tokens=16)
    transcript = Transcript()
    for n in range(60):
        engine.handle(make_submit(f"r{n}", [n % 7] * (5 + n % 11), max_tokens=6))
        if n % 4 == 3:
            run_until_idle(engine, transcript)
    reasons = [transcript.finished[f"r{n}"].reason for n in range(60)]
    assert set(reasons) == {"length", "error"}
    for n in range(60):
        text = transcript.text(f"r{n}")
        assert text == oracle(runner, [n % 7] * (5 + n % 11), 6)[: len(text)]


def test_an_engine_whose_every_step_fails_gives_up() -> None:
    def fail(plan: StepPlan) -> None:
        raise RuntimeError("the device is gone")

    engine = make_engine(FakeRunner(gate=fail), max_running=1)
    for n in range(5):
        engine.handle(make_submit(f"r{n}", range(5)))
    transcript = Transcript()
    with pytest.raises(RuntimeError, match="the device is gone"):
        run_until_idle(engine, transcript)
    assert [finished.reason for finished in transcript.finished.values()] == ["error", "error"]


# --- reports ----------------------------------------------------------------------------------------------------------


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


def test_one_that_computed_what_another_had_computed_does_not_keep_both_when_room_is_short() -> None:
    """Two that say the same at the same time have a block each for it; the one left alone must still fit."""
    runner = FakeRunner(num_blocks=8, num_host_blocks=0, block_size=4)
    engine = make_engine(runner)
    for request_id, max_tokens in (("short", 11), ("long", 22)):
        engine.handle(make_submit(request_id, (1, 2, 3, 4), max_tokens=max_tokens))
    transcript = run_until_idle(engine, max_steps=200)
    assert transcript.text("long") == oracle(runner, [1, 2, 3, 4], 22)
