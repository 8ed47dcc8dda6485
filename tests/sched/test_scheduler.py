"""What the scheduler promises, on blocks that nobody shares."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatserve.errors import ContextOverflowError, OverloadedError
from chatserve.sched.outcome import Outcome
from chatserve.sched.placement import CHUNK_STEPS, CHUNK_TOKENS, CHUNK_UNIT, level_chunk_tokens
from chatserve.sched.plan import StepPlan, StepResult
from chatserve.sched.scheduler import Scheduler
from chatserve.types import RequestId, SamplingParams, UserId
from tests.fakes.plain_kv import Match, PlainKV

BLOCK_SIZE = 4


class Loop:
    """A scheduler whose runner always says 1, with all that it was told and planned."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        max_batched_tokens: int = 16,
        max_running: int = 8,
        max_queued: int = 100,
        context_tokens: int | None = None,
        kv: type[PlainKV] = PlainKV,
    ) -> None:
        self.kv = kv(num_blocks=num_blocks, block_size=BLOCK_SIZE)
        self.scheduler = Scheduler(
            self.kv,  # type: ignore[arg-type]
            max_batched_tokens=max_batched_tokens,
            max_running=max_running,
            max_queued=max_queued,
            context_tokens=context_tokens or num_blocks * BLOCK_SIZE,
        )
        self.plans: list[StepPlan] = []
        self.began: list[str] = []
        self.ended: dict[str, str] = {}
        self.positions: dict[str, list[int]] = {}

    def submit(
        self,
        request_id: str,
        num_tokens: int,
        *,
        user: str = "ann",
        max_tokens: int | None = 4,
        stop: Sequence[int] = (),
    ) -> None:
        self.scheduler.submit(
            request_id=RequestId(request_id),
            user=UserId(user),
            token_ids=[2] * num_tokens,
            num_shared_tokens=0,
            num_prompt_tokens=num_tokens,
            sampling=SamplingParams(max_tokens=max_tokens, seed=0),
            stop_token_ids=stop,
        )

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self.plans.append(plan)
        if plan:
            self.scheduler.commit(plan, StepResult(plan.step, tuple(1 for row in plan.rows if row.sample)))
        self.note(self.scheduler.take_outcome())
        self.scheduler.check()
        self.kv.check()
        return plan

    def note(self, outcome: Outcome) -> None:
        self.began += [str(begun.request_id) for begun in outcome.begun]
        for waiting in outcome.waiting:
            self.positions.setdefault(waiting.request_id, []).append(waiting.position)
        for ended in outcome.ended:
            assert ended.request_id not in self.ended
            self.ended[ended.request_id] = ended.reason.value

    def run(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                assert self.kv.counts()[0].free == self.kv.num_blocks
                return
            self.step()
        raise AssertionError("still busy")


def rows(plan: StepPlan) -> dict[str, int]:
    return {str(row.request_id): row.num_tokens for row in plan.rows}


def test_a_long_prompt_is_computed_in_chunks_and_decoding_goes_on_beside_it() -> None:
    loop = Loop(max_batched_tokens=16)
    loop.submit("short", 4, max_tokens=30)
    loop.step()
    loop.submit("long", 50)
    steps = [rows(loop.step()) for _ in range(4)]
    assert steps == [
        {"short": 1, "long": 15},
        {"short": 1, "long": 15},
        {"short": 1, "long": 15},
        {"short": 1, "long": 5},
    ]


def test_a_long_prompt_beside_others_takes_a_little_of_many_steps_and_all_of_one_when_it_is_alone() -> None:
    loop = Loop(num_blocks=4096, max_batched_tokens=8192, max_running=64)
    for n in range(40):
        loop.submit(f"r{n}", 4, max_tokens=200)
    loop.step()
    loop.submit("long", 8192, max_tokens=1)
    chunks = []
    while "long" not in loop.ended:
        chunks.append(rows(loop.step())["long"])
        assert len(loop.plans[-1].rows) == 41
    assert sum(chunks) == 8192
    assert chunks[0] == CHUNK_TOKENS
    assert chunks[:-1] == sorted(chunks[:-1], reverse=True), "what attends to more is more work"
    assert chunks[-2] < CHUNK_TOKENS
    assert all(chunk % CHUNK_UNIT == 0 for chunk in chunks[:-1])
    loop.run()
    loop.submit("alone", 8192, max_tokens=1)
    assert rows(loop.step()) == {"alone": 8192}


@pytest.mark.parametrize("position", [0, 1, 4_096, 100_000, 10**9])
def test_a_chunk_has_tokens_wherever_it_begins(position: int) -> None:
    assert CHUNK_UNIT <= level_chunk_tokens(position) <= CHUNK_TOKENS


def test_the_more_prompts_are_waiting_the_less_they_wait_for_those_who_decode() -> None:
    loop = Loop(num_blocks=8192, max_batched_tokens=8192, max_running=64)
    loop.submit("busy", 4, max_tokens=10_000)
    loop.step()
    for n in range(7):
        loop.submit(f"r{n}", 4000, max_tokens=1, user=f"user{n}")
    num_steps = 0
    while not all(f"r{n}" in loop.ended for n in range(7)):
        loop.step()
        num_steps += 1
    assert num_steps <= 4 * -(-7 * 4000 // 8192)


def test_a_very_long_prompt_ends_in_a_bounded_number_of_steps_whoever_else_decodes() -> None:
    loop = Loop(num_blocks=18_000, max_batched_tokens=8192, max_running=64)
    for n in range(20):
        loop.submit(f"r{n}", 4, max_tokens=600)
    loop.step()
    loop.submit("book", 50_000, max_tokens=1)
    num_steps = 0
    while "book" not in loop.ended:
        loop.step()
        num_steps += 1
    assert num_steps < 2 * CHUNK_STEPS


def test_the_oldest_prompt_moves_though_the_budget_is_no_more_than_the_rows() -> None:
    loop = Loop(max_batched_tokens=4, max_running=100)
    loop.submit("long", 30)
    for number in range(6):
        loop.submit(f"r{number}", 1, max_tokens=40)
    while "long" not in loop.ended:
        assert "long" in rows(loop.step())


def test_one_users_hundred_requests_do_not_starve_anothers_one() -> None:
    loop = Loop(max_running=2, max_queued=200, max_batched_tokens=64)
    for number in range(100):
        loop.submit(f"a{number}", 4, user="ann")
    loop.step()
    loop.submit("b", 4, user="bob")
    loop.run()
    assert loop.began.index("b") <= 3


def test_what_can_never_fit_is_refused_with_its_numbers() -> None:
    loop = Loop(num_blocks=8, context_tokens=32)
    loop.submit("fits", 31)
    with pytest.raises(ContextOverflowError) as caught:
        loop.submit("too long", 32)
    assert caught.value.fields == {"prompt_tokens": 32, "context_tokens": 32}
    loop.run()
    assert loop.ended == {"fits": "length"}


def test_a_full_queue_refuses_and_takes_again_when_there_is_room() -> None:
    loop = Loop(max_queued=2, max_running=1)
    loop.submit("a", 4)
    loop.submit("b", 4)
    with pytest.raises(OverloadedError):
        loop.submit("c", 4)
    loop.step()
    loop.submit("d", 4)
    loop.run()
    assert set(loop.ended) == {"a", "b", "d"}


def test_the_context_ends_a_generation_that_has_no_other_limit() -> None:
    loop = Loop(context_tokens=20)
    loop.submit("a", 5, max_tokens=None)
    loop.run()
    assert loop.ended == {"a": "length"}
    assert sum(row.sample for plan in loop.plans for row in plan.rows) == 15


def test_a_stop_token_ends_a_generation() -> None:
    loop = Loop()
    loop.submit("a", 5, stop=(1,))
    loop.run()
    assert loop.ended == {"a": "stop"}


def test_output_of_an_earlier_run_counts_against_max_tokens() -> None:
    loop = Loop()
    for request_id, num_earlier in (("some", 3), ("all", 4)):
        loop.scheduler.submit(
            request_id=RequestId(request_id),
            user=UserId("ann"),
            token_ids=[2] * (5 + num_earlier),
            num_shared_tokens=0,
            num_prompt_tokens=5,
            sampling=SamplingParams(max_tokens=4, seed=0),
            stop_token_ids=(),
        )
    loop.run()
    assert loop.ended == {"some": "length", "all": "length"}
    assert sum(row.sample for plan in loop.plans for row in plan.rows) == 1


def test_the_newest_gives_way_and_comes_back_with_all_its_tokens() -> None:
    loop = Loop(num_blocks=8, max_batched_tokens=16, context_tokens=32)
    loop.submit("old", 8, max_tokens=20)
    loop.submit("new", 8, max_tokens=12)
    loop.run()
    assert loop.ended == {"old": "length", "new": "length"}
    returned = [a for plan in loop.plans for a in plan.admitted if len(a.token_ids) > 8]
    assert returned
    for admitted in returned:
        assert admitted.request_id == "new"
        assert admitted.num_prompt_tokens == 8
        assert admitted.token_ids == (2,) * 8 + (1,) * (len(admitted.token_ids) - 8)
    assert loop.began == ["old", "new"], "it began once"


def test_preempted_requests_come_back_before_others_are_let_in() -> None:
    loop = Loop(num_blocks=8, context_tokens=32)
    loop.submit("old", 8, max_tokens=20)
    loop.submit("new", 8, max_tokens=12)
    while not loop.step().removed:
        pass
    loop.submit("late", 1)
    loop.run()
    order = [str(a.request_id) for plan in loop.plans for a in plan.admitted]
    assert order.index("late") > len(order) - 1 - order[::-1].index("new")


def test_everyone_is_told_where_they_stand_once_and_again_at_half() -> None:
    loop = Loop(max_running=1)
    for number in range(9):
        loop.submit(f"r{number}", 4)
    loop.run()
    assert loop.positions["r8"] == [7, 3, 1, 0]
    assert loop.positions["r1"] == [0]
    assert "r0" not in loop.positions


@pytest.mark.parametrize("num_steps", range(8))
def test_a_cancelled_request_ends_once_wherever_it_is(num_steps: int) -> None:
    loop = Loop(max_running=1)
    loop.submit("running", 20, max_tokens=4)
    loop.submit("waiting", 4)
    for _ in range(num_steps):
        loop.step()
    for request_id in ("running", "waiting", "unknown", "running"):
        loop.scheduler.cancel(RequestId(request_id))
    loop.note(loop.scheduler.take_outcome())
    assert loop.ended["waiting"] == "cancelled"
    assert loop.ended["running"] == ("length" if num_steps > 4 else "cancelled")
    loop.run()


def test_a_failed_step_ends_its_own_requests_and_no_others() -> None:
    loop = Loop(max_running=2)
    loop.submit("a", 4)
    loop.submit("b", 4)
    loop.submit("c", 4)
    loop.step()
    plan = loop.scheduler.schedule()
    loop.scheduler.fail(plan, "out of memory")
    loop.note(loop.scheduler.take_outcome())
    loop.scheduler.check()
    assert loop.ended == {"a": "error", "b": "error"}
    loop.run()
    assert loop.ended["c"] == "length"


class CountingKV(PlainKV):
    """Notes how often it is asked what it holds of a prompt."""

    num_matches = 0

    def match(self, token_ids: Sequence[int], user: UserId) -> Match:
        self.num_matches += 1
        return super().match(token_ids, user)


def test_a_long_prompt_that_finds_no_room_costs_the_others_nothing() -> None:
    loop = Loop(num_blocks=8, context_tokens=32, kv=CountingKV)
    assert isinstance(loop.kv, CountingKV)
    loop.submit("running", 4, max_tokens=20)
    loop.step()
    loop.submit("waits", 28, max_tokens=2)
    before = loop.kv.num_matches
    while "running" not in loop.ended:
        loop.step()
    assert loop.kv.num_matches == before + 1
    loop.run()
    assert loop.ended == {"running": "length", "waits": "length"}


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 31), st.integers(1, 30), st.sampled_from("abc")), min_size=1, max_size=12
    ),
    budget=st.sampled_from([1, 3, 8, 64]),
    max_running=st.integers(1, 8),
)
def test_all_end_within_the_budget_and_the_same_state_gives_the_same_plan(
    requests: list[tuple[int, int, str]], budget: int, max_running: int
) -> None:
    loop = Loop(num_blocks=8, max_batched_tokens=budget, max_running=max_running, context_tokens=32)
    for number, (num_tokens, max_tokens, user) in enumerate(requests):
        loop.submit(f"r{number}", num_tokens, max_tokens=max_tokens, user=user)
    while loop.scheduler.has_work:
        again = copy.deepcopy(loop.scheduler).schedule()
        oldest = next((request.request_id for request in loop.scheduler._batch), None)
        plan = loop.step()
        assert plan == again
        assert plan.num_tokens <= budget
        assert len(plan.rows) <= max_running
        assert plan.rows or not loop.scheduler.num_running + loop.scheduler.num_waiting, "nobody moves"
        assert oldest is None or oldest in rows(plan), "the oldest stands still"
    assert set(loop.ended.values()) == {"length"}
    assert len(loop.ended) == len(requests)
