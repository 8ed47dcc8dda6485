"""With steps in flight: what is planned ahead of the tokens, and what is taken back when they come."""

from __future__ import annotations

from collections import Counter

import pytest

from chatserve.engine.engine import Engine
from chatserve.engine.messages import Cancel, Hint, Inspect
from chatserve.sched.plan import Row
from chatserve.sched.request import Phase
from chatserve.types import RequestId
from tests.engine.asking import GREEDY, counters
from tests.fakes.engines import USER, Transcript, make_engine, make_submit, run_until_idle
from tests.fakes.fake_runner import FakeRunner, LateRunner


def rows_of(runner: FakeRunner, request_id: str) -> list[Row]:
    return [row for plan in runner.plans for row in plan.rows if row.request_id == request_id]


def num_sampled(runner: FakeRunner, request_id: str) -> int:
    return sum(row.sample for row in rows_of(runner, request_id))


@pytest.mark.parametrize("seed", range(4))
def test_the_next_step_is_launched_before_the_last_ones_tokens_are_known(seed: int) -> None:
    runner = LateRunner(seed=seed)
    engine = make_engine(runner)
    engine.handle(make_submit("a", range(20), max_tokens=10))
    transcript = Transcript()
    for num_launched in range(1, 10):
        transcript.add(engine.step())
        assert len(runner.plans) == num_launched
        assert len(transcript.text("a")) == num_launched - 1
    run_until_idle(engine, transcript)
    assert transcript.text("a") == runner.oracle(range(20), GREEDY, num_output_tokens=10)


def test_a_prompts_last_chunk_is_followed_at_once_by_its_first_decode_row() -> None:
    runner = LateRunner(seed=1)
    engine = make_engine(runner, max_batched_tokens=16)
    engine.handle(make_submit("a", range(40), max_tokens=3))
    transcript = run_until_idle(engine)
    assert [(row.start, row.num_tokens, row.sample) for row in rows_of(runner, "a")] == [
        (0, 16, False),
        (16, 16, False),
        (32, 8, True),
        (40, 1, True),
        (41, 1, True),
    ]
    assert transcript.text("a") == runner.oracle(range(40), GREEDY, num_output_tokens=3)


@pytest.mark.parametrize("max_in_flight", [2, 3])
def test_a_length_that_is_known_in_advance_is_never_passed(max_in_flight: int) -> None:
    runner = LateRunner(seed=2, max_in_flight=max_in_flight, num_blocks=256)
    engine = make_engine(runner, context_tokens=64)
    for n in range(12):
        engine.handle(make_submit(f"r{n}", [n + 1] * 10, max_tokens=n + 1))
    engine.handle(make_submit("full", [90] * 60, max_tokens=None))
    transcript = run_until_idle(engine)
    for n in range(12):
        assert num_sampled(runner, f"r{n}") == n + 1 == len(transcript.text(f"r{n}"))
    assert num_sampled(runner, "full") == 4 == len(transcript.text("full"))
    assert rows_of(runner, "full")[-1].start == 62


@pytest.mark.parametrize("max_in_flight", [2, 3])
def test_a_stop_is_found_late_and_costs_one_row_a_step_in_flight(max_in_flight: int) -> None:
    runner = LateRunner(seed=3, max_in_flight=max_in_flight, num_blocks=256, stop_token_id=9, stop_one_in=8)
    engine = make_engine(runner)
    for n in range(20):
        engine.handle(make_submit(f"r{n}", [n + 1] * 10, max_tokens=60, stop_token_ids=(9,)))
    transcript = run_until_idle(engine)
    stopped = [n for n in range(20) if transcript.finished[f"r{n}"].reason == "stop"]
    assert len(stopped) > 10
    for n in stopped:
        text = transcript.text(f"r{n}")
        expected = runner.oracle([n + 1] * 10, GREEDY, num_output_tokens=60, stop_token_ids=(9,))
        assert text == expected
        num_needed = len(text) + 1  # the stop token was sampled too
        assert num_needed <= num_sampled(runner, f"r{n}") <= num_needed + max_in_flight - 1
        path = transcript.finished[f"r{n}"].path
        assert path is not None
        assert path.num_tokens == 10 + len(text)
    assert counters(engine)["output_tokens"] == sum(len(transcript.text(f"r{n}")) for n in range(20))


@pytest.mark.parametrize("num_steps", range(8))
@pytest.mark.parametrize("keep", [None, 0, 2])
def test_a_cancel_in_flight_keeps_what_was_known_and_the_next_turn_goes_on_from_there(
    num_steps: int, keep: int | None
) -> None:
    runner = LateRunner(seed=num_steps, block_size=4)
    engine = make_engine(runner)
    engine.handle(make_submit("a", range(9), max_tokens=30))
    transcript = Transcript()
    for _ in range(num_steps):
        transcript.add(engine.step())
    engine.handle(Cancel(RequestId("a"), keep))
    engine.check()
    transcript.add(engine.step())
    text = transcript.text("a")
    finished = transcript.finished["a"]
    assert finished.num_output_tokens == len(text)
    kept = text if keep is None else text[:keep]
    engine.handle(make_submit("b", (7, 8), base=finished.path, max_tokens=6))  # its rows may follow a dropped one's
    run_until_idle(engine, transcript)
    assert transcript.text("b") == runner.oracle([*range(9), *kept, 7, 8], GREEDY, num_output_tokens=6)


@pytest.mark.parametrize("seed", range(10))
def test_nobody_is_preempted_while_anything_is_under_way_and_nothing_is_computed_twice(seed: int) -> None:
    """A preempted request computes again what it lost, and nobody else anything."""
    runner = LateRunner(seed=seed, num_blocks=10, num_host_blocks=64, block_size=4)
    engine = make_engine(runner, max_batched_tokens=16, min_fetched_blocks=1)
    for n in range(5):
        engine.handle(make_submit(f"r{n}", [n + 1] * 9, max_tokens=20))
    transcript = Transcript()
    scheduler = engine._scheduler
    num_preemptions = 0
    while engine.has_work:
        was_quiet = scheduler._flights.is_quiet
        transcript.add(engine.step())
        engine.check()
        now = counters(engine)["preemptions"]
        assert was_quiet or now == num_preemptions
        num_preemptions = now
    assert num_preemptions > 0
    assert counters(engine)["dropped_blocks"] == 0
    for n in range(5):
        rows = rows_of(runner, f"r{n}")
        positions = Counter(position for row in rows for position in range(row.start, row.start + row.num_tokens))
        assert set(positions) == set(range(9 + 19))
        # KV of a row is not lost with its request, but its last token's has to be there again for the next one.
        assert max(positions.values()) <= 1 + sum(
            admitted.request_id == f"r{n}" for plan in runner.plans for admitted in plan.admitted
        )
        assert sum(positions.values()) <= 28 + num_preemptions
        assert transcript.text(f"r{n}") == runner.oracle([n + 1] * 9, GREEDY, num_output_tokens=20)


def swapped_out(runner: FakeRunner, engine: Engine) -> Transcript:
    """A session `cold` of which nothing is on the device any more."""
    engine.handle(make_submit("cold", range(64), max_tokens=1))
    transcript = run_until_idle(engine)
    for n in range(4):
        engine.handle(make_submit(f"fill{n}", [100 + n] * 60, max_tokens=1))
        run_until_idle(engine, transcript)
    return transcript


@pytest.mark.parametrize("seed", range(6))
def test_a_session_that_comes_back_from_the_host_does_not_hold_up_those_who_decode(seed: int) -> None:
    runner = LateRunner(seed=seed, num_blocks=16, num_host_blocks=64)
    engine = make_engine(runner, min_fetched_blocks=1)
    transcript = swapped_out(runner, engine)
    engine.handle(make_submit("busy", (1, 2, 3), max_tokens=60))
    for _ in range(3):
        transcript.add(engine.step())
    engine.handle(make_submit("back", (7,), base=transcript.finished["cold"].path, max_tokens=4))
    num_before, num_fetching = len(runner.plans), 0
    transcript.add(engine.step())
    while any(request.phase is Phase.FETCHING for request in engine._scheduler._batch):
        num_fetching += 1
        transcript.add(engine.step())
        engine.check()
    started = transcript.started["back"]
    assert started.swapped_in_tokens == 64
    assert num_fetching > 0
    while_fetching = runner.plans[num_before : num_before + num_fetching]
    assert while_fetching[0].background.swap_in
    assert not any(plan.transfers.swap_in for plan in while_fetching)
    assert all([row.request_id for row in plan.rows] == ["busy"] for plan in while_fetching)
    run_until_idle(engine, transcript)
    assert transcript.text("busy") == runner.oracle((1, 2, 3), GREEDY, num_output_tokens=60)
    whole = [*range(64), *transcript.text("cold"), 7]
    assert transcript.text("back") == runner.oracle(whole, GREEDY, num_output_tokens=4)


def test_who_is_alone_has_its_blocks_brought_in_by_the_step_that_needs_them() -> None:
    runner = LateRunner(seed=0, num_blocks=16, num_host_blocks=64)
    engine = make_engine(runner, min_fetched_blocks=1)
    transcript = swapped_out(runner, engine)
    engine.handle(make_submit("back", (7,), base=transcript.finished["cold"].path, max_tokens=4))
    num_before = len(runner.plans)
    transcript.add(engine.step())
    assert len(runner.plans[num_before].transfers.swap_in) == 4
    assert runner.plans[num_before].rows
    run_until_idle(engine, transcript)


@pytest.mark.parametrize("seed", range(8))
def test_who_needs_what_a_hint_is_bringing_back_waits_for_it(seed: int) -> None:
    runner = LateRunner(seed=seed, num_blocks=16, num_host_blocks=64)
    engine = make_engine(runner)
    transcript = swapped_out(runner, engine)
    path = transcript.finished["cold"].path
    assert path is not None
    engine.handle(make_submit("room", (1, 2, 3), max_tokens=30))
    engine.handle(Hint(user=USER, key="chat", base=path, token_ids=()))
    for _ in range(1 + seed % 2):
        transcript.add(engine.step())
    engine.handle(make_submit("back", (7,), base=path, max_tokens=4))
    run_until_idle(engine, transcript)
    assert transcript.text("back") == runner.oracle(
        [*range(64), *transcript.text("cold"), 7], GREEDY, num_output_tokens=4
    )


@pytest.mark.parametrize("late", [False, True])
def test_finished_turns_are_on_the_host_before_their_room_is_needed(late: bool) -> None:
    options = {"num_blocks": 64, "num_host_blocks": 200}
    runner = LateRunner(seed=5, **options) if late else FakeRunner(**options)
    engine = make_engine(runner)
    transcript = Transcript()
    for n in range(12):
        engine.handle(make_submit(f"r{n}", [n * 50 + token for token in range(200)], max_tokens=4))
        run_until_idle(engine, transcript)
    assert engine.report(Inspect(0)).host.cached == 12 * 13
    assert not any(plan.transfers for plan in runner.plans), "nobody ever waited for a copy"
    engine.handle(make_submit("again", (7,), base=transcript.finished["r0"].path))
    run_until_idle(engine, transcript)
    assert transcript.started["again"].swapped_in_tokens >= 192
