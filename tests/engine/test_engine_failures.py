"""Steps that fail: who ends with an error, who goes on, and when the engine gives up."""

from __future__ import annotations

import dataclasses

import pytest

from chatserve.sched.plan import StepFailedError, StepPlan, TransfersFailedError
from tests.engine.asking import oracle
from tests.fakes.engines import Transcript, make_engine, make_submit, run_until_idle
from tests.fakes.fake_runner import FakeRunner, LateRunner


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
