"""What is computed ahead: found by the turn it was meant for, in nobody's way, and gone when nobody wants it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatserve.engine.engine import Engine
from chatserve.engine.messages import Cancel, Drain, Hint, Inspect, PathRef, Release
from chatserve.sched import hints
from chatserve.sched.plan import StepFailedError, StepPlan
from chatserve.types import RequestId, UserId
from tests.engine.asking import BOB, GREEDY
from tests.fakes.engines import Transcript, make_engine, make_submit, run_until_idle
from tests.fakes.fake_runner import FakeRunner, LateRunner

ANN = UserId("ann")
TURN = tuple(range(40))
DRAFT = tuple(range(100, 130))


def hint(
    path: PathRef | None,
    new: tuple[int, ...] = (),
    *,
    user: UserId = ANN,
    key: str = "chat",
    num_draft: int | None = None,
) -> Hint:
    return Hint(
        user=user, key=key, base=path, token_ids=new, num_draft_tokens=len(new) if num_draft is None else num_draft
    )


def hint_rows(runner: FakeRunner) -> list[list[int]]:
    """For each plan, the tokens of each row that was not asked for."""
    return [
        [row.num_tokens for row in plan.rows if hints.Hints.owns(row.request_id)] for plan in runner.plans if plan.rows
    ]


def computed_ahead(engine: Engine) -> int:
    return engine.report(Inspect(0)).counters["hinted_tokens"]


class Chat:
    """One conversation of a turn, whose path is `path`, on an engine with nothing else to do."""

    def __init__(self, runner: FakeRunner | None = None, **options: int) -> None:
        self.runner = runner or FakeRunner(block_size=4, num_blocks=128)
        self.engine = make_engine(self.runner, **options)  # type: ignore[arg-type]
        self.transcript = Transcript()
        self.engine.handle(make_submit("turn", TURN))
        self.run()
        path = self.transcript.finished["turn"].path
        assert path is not None
        self.path = path
        self.said = (*TURN, *self.transcript.text("turn"))

    def run(self) -> None:
        run_until_idle(self.engine, self.transcript)

    def ask(self, name: str, new: tuple[int, ...], *, user: UserId = ANN, max_tokens: int = 6) -> int:
        """The next turn; how many tokens it had to compute."""
        if user == ANN:
            self.engine.handle(make_submit(name, new, base=self.path, max_tokens=max_tokens))
        else:
            self.engine.handle(make_submit(name, (*self.said, *new), user=user, max_tokens=max_tokens))
        self.run()
        expected = self.runner.oracle((*self.said, *new), GREEDY, num_output_tokens=max_tokens)
        assert self.transcript.text(name) == expected
        return self.transcript.started[name].computed_tokens


@pytest.mark.parametrize("late", [False, True])
def test_a_turn_that_was_drafted_computes_what_was_not(late: bool) -> None:
    options = {"block_size": 4, "num_blocks": 128}
    chat = Chat(LateRunner(seed=3, **options) if late else FakeRunner(**options))
    chat.engine.handle(hint(chat.path, DRAFT))
    chat.run()
    assert chat.ask("sent", (*DRAFT, 1, 2, 3)) == 3
    assert chat.transcript.started["sent"].swapped_in_tokens == 0


def test_a_draft_that_grows_computes_what_is_new_and_copies_once() -> None:
    chat = Chat()
    copies = chat.engine.report(Inspect(0)).counters["copies"]
    before = computed_ahead(chat.engine)
    for end in range(5, 31, 5):
        chat.engine.handle(hint(chat.path, DRAFT[:end]))
        chat.run()
    # And the answer's last token, of which nobody needed the KV before.
    assert computed_ahead(chat.engine) - before == 30 + 1
    assert chat.engine.report(Inspect(0)).counters["copies"] - copies <= 1
    assert chat.ask("sent", (*DRAFT, 1)) == 1


def test_a_path_that_went_to_the_host_comes_back_though_the_device_is_full_of_others() -> None:
    chat = Chat(FakeRunner(block_size=4, num_blocks=40, num_host_blocks=400))
    for n in range(4):
        chat.engine.handle(make_submit(f"other{n}", [n * 200 + i for i in range(100)], user=BOB))
        chat.run()
    chat.engine.handle(hint(chat.path, DRAFT))
    chat.run()
    assert chat.ask("sent", (*DRAFT, 1)) == 1
    assert chat.transcript.started["sent"].swapped_in_tokens == 0


def test_a_hint_without_a_draft_brings_the_path_back_and_computes_next_to_nothing() -> None:
    chat = Chat(FakeRunner(block_size=4, num_blocks=40, num_host_blocks=400))
    for n in range(4):
        chat.engine.handle(make_submit(f"other{n}", [n * 200 + i for i in range(100)], user=BOB))
        chat.run()
    before = computed_ahead(chat.engine)
    chat.engine.handle(hint(chat.path))
    chat.run()
    assert computed_ahead(chat.engine) - before <= 1
    assert chat.ask("sent", (7, 8)) == 2
    assert chat.transcript.started["sent"].swapped_in_tokens == 0


# --- in nobody's way --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
def test_nothing_is_computed_ahead_while_anybody_is_answered(late: bool) -> None:
    options = {"block_size": 4, "num_blocks": 256}
    chat = Chat(LateRunner(seed=5, **options) if late else FakeRunner(**options), max_batched_tokens=512)
    for n in range(3):
        chat.engine.handle(make_submit(f"runs{n}", [500 + n] * 9, user=BOB, max_tokens=90))
    chat.transcript.add(chat.engine.step())
    chat.runner.plans.clear()
    chat.engine.handle(hint(chat.path, tuple(i % 90 for i in range(200))))
    chat.run()
    answering = [plan for plan in chat.runner.plans if any(row.request_id.startswith("runs") for row in plan.rows)]
    assert len(answering) >= 80
    assert all(row.request_id.startswith("runs") for plan in answering for row in plan.rows)
    assert sum(map(sum, hint_rows(chat.runner))) == 201, "it is, once they have ended"
    for n in range(3):
        assert chat.transcript.text(f"runs{n}") == chat.runner.oracle([500 + n] * 9, GREEDY, num_output_tokens=90)


def test_what_is_on_the_host_comes_back_while_others_are_answered() -> None:
    chat = Chat(FakeRunner(block_size=4, num_blocks=60, num_host_blocks=400))
    for n in range(5):
        chat.engine.handle(make_submit(f"other{n}", [n * 200 + i for i in range(100)], user=BOB))
        chat.run()
    chat.engine.handle(make_submit("runs", [500] * 9, user=BOB, max_tokens=60))
    chat.transcript.add(chat.engine.step())
    chat.engine.handle(hint(chat.path))
    for _ in range(20):
        chat.transcript.add(chat.engine.step())
    assert "runs" not in chat.transcript.finished
    chat.ask("sent", (7, 8))
    started = chat.transcript.started["sent"]
    assert started.swapped_in_tokens < 4, "no whole block is left to bring back"
    assert started.computed_tokens <= 3


def test_while_anybody_waits_or_computes_a_prompt_nothing_is_computed_ahead() -> None:
    chat = Chat(max_batched_tokens=8, max_running=4)
    chat.engine.handle(hint(chat.path, DRAFT))
    chat.engine.handle(make_submit("prompt", range(300, 400), user=BOB, max_tokens=2))
    chat.runner.plans.clear()
    chat.run()
    for plan in chat.runner.plans:
        if any(row.request_id == "prompt" and row.num_tokens > 1 for row in plan.rows):
            assert not any(hints.Hints.owns(row.request_id) for row in plan.rows)
    assert computed_ahead(chat.engine) >= len(DRAFT)


def test_alone_a_step_is_short_so_that_nobody_waits_long() -> None:
    chat = Chat(max_batched_tokens=128)
    chat.runner.plans.clear()
    chat.engine.handle(hint(chat.path, tuple(i % 90 for i in range(200))))
    chat.run()
    assert max(map(sum, hint_rows(chat.runner))) == 128 // 16


def test_a_request_never_goes_without_for_a_hint() -> None:
    """A pool that the request needs whole, while the hint holds a part of it."""
    chat = Chat(FakeRunner(block_size=4, num_blocks=24), max_batched_tokens=64)
    chat.engine.handle(hint(chat.path, DRAFT[:20]))
    chat.transcript.add(chat.engine.step())
    assert chat.engine.report(Inspect(0)).device.pinned > 0
    chat.engine.handle(make_submit("large", range(300, 380), user=BOB, max_tokens=10))
    transcript = chat.transcript
    chat.run()
    assert transcript.text("large") == chat.runner.oracle(range(300, 380), GREEDY, num_output_tokens=10)
    assert chat.engine.report(Inspect(0)).counters["preemptions"] == 0


def test_answers_that_grow_take_the_blocks_of_a_hint_before_each_others() -> None:
    chat = Chat(FakeRunner(block_size=4, num_blocks=40, num_host_blocks=40), max_batched_tokens=64)
    for n in range(2):
        chat.engine.handle(make_submit(f"runs{n}", [500 + n] * 8, user=BOB, max_tokens=50))
    chat.transcript.add(chat.engine.step())
    chat.engine.handle(hint(chat.path, tuple(i % 90 for i in range(60))))
    chat.run()
    assert chat.engine.report(Inspect(0)).counters["preemptions"] == 0


def test_what_does_not_fit_is_given_up_and_not_tried_for_ever() -> None:
    chat = Chat(FakeRunner(block_size=4, num_blocks=24))
    chat.engine.handle(hint(chat.path, tuple(i % 90 for i in range(80))))
    chat.run()
    chat.engine.handle(hint(None, tuple(i % 90 for i in range(5000))))
    chat.run()
    assert chat.ask("sent", (7,)) <= 2


# --- and gone again ---------------------------------------------------------------------------------------------------


def cached(chat: Chat) -> int:
    return chat.engine.report(Inspect(0)).device.cached


@pytest.mark.parametrize("num_steps", [0, 1, 2, 50])
@pytest.mark.parametrize("how", ["leave", "empty", "replace"])
def test_a_draft_that_is_given_up_leaves_nothing(num_steps: int, how: str) -> None:
    chat = Chat(max_batched_tokens=64)
    chat.engine.handle(hint(chat.path))
    chat.run()
    before = cached(chat)
    chat.engine.handle(hint(chat.path, DRAFT))
    for _ in range(num_steps):
        chat.transcript.add(chat.engine.step())
    match how:
        case "leave":
            chat.engine.handle(hint(None))
        case "empty":
            chat.engine.handle(hint(chat.path))
        case "replace":
            chat.engine.handle(hint(chat.path, (55,)))
    chat.run()
    assert cached(chat) <= before + (how == "replace")
    assert chat.ask("sent", (7, 8)) <= 3


def test_sending_something_else_frees_the_draft_but_what_they_have_in_common() -> None:
    chat = Chat()
    chat.engine.handle(hint(chat.path, DRAFT))
    chat.run()
    assert chat.ask("sent", (*DRAFT[:9], 7)) == 1
    assert len(chat.engine._scheduler.hints) == 0
    blocks = -(-(len(chat.said) + 10 + 6 - 1) // 4)
    # And the end of the first turn, which somebody may go on from, and the block in which the two part.
    assert cached(chat) <= blocks + 2


@pytest.mark.parametrize("num_steps", [0, 1, 50])
def test_a_draft_does_not_keep_the_kv_of_a_conversation_that_is_deleted(num_steps: int) -> None:
    chat = Chat(max_batched_tokens=64)
    chat.engine.handle(hint(chat.path, DRAFT))
    for _ in range(num_steps):
        chat.transcript.add(chat.engine.step())
    chat.engine.handle(Release(BOB, (chat.path,)))
    assert len(chat.engine._scheduler.hints) == 1
    chat.engine.handle(Release(ANN, (chat.path,)))
    chat.run()
    assert cached(chat) == 0


def test_a_draft_goes_on_from_what_is_kept_of_a_conversation() -> None:
    """One of its branches is deleted; what is being written hangs on another."""
    chat = Chat()
    chat.engine.handle(hint(chat.path, DRAFT))
    chat.engine.handle(Release(ANN, (chat.path,), chat.path.num_tokens))
    assert len(chat.engine._scheduler.hints) == 1
    chat.engine.handle(Release(ANN, (chat.path,), chat.path.num_tokens - 1))
    assert len(chat.engine._scheduler.hints) == 1, "the path is forgotten"


def test_a_turn_in_another_conversation_leaves_a_draft_alone() -> None:
    chat = Chat()
    chat.engine.handle(hint(chat.path, DRAFT))
    chat.engine.handle(make_submit("elsewhere", range(200, 230)))
    chat.run()
    assert len(chat.engine._scheduler.hints) == 1
    assert chat.ask("sent", (*DRAFT, 1)) == 1


def test_drafts_of_other_users_neither_help_nor_end_one() -> None:
    chat = Chat()
    chat.engine.handle(hint(None, (*chat.said, *DRAFT), user=BOB, num_draft=len(DRAFT)))
    chat.run()
    assert chat.ask("ann", (*DRAFT, 1)) >= len(DRAFT)
    assert len(chat.engine._scheduler.hints) == 1
    assert chat.ask("bob", (*DRAFT, 1), user=BOB) == 1


def test_an_unknown_path_is_nothing_to_go_by() -> None:
    chat = Chat()
    for path in (PathRef("another", 1, 1), PathRef(chat.path.epoch, 999, 1)):
        chat.engine.handle(hint(path, DRAFT))
    chat.engine.handle(hint(chat.path, DRAFT, user=BOB))
    chat.run()
    assert computed_ahead(chat.engine) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"token_ids": (1, 5_000)},
        {"token_ids": (1, -1)},
        {"num_draft_tokens": 9},
        {"num_draft_tokens": -1},
        {"num_shared_tokens": 9},
        {"num_shared_tokens": -1},
    ],
)
def test_what_a_client_got_wrong_never_reaches_the_model(wrong: dict[str, object]) -> None:
    chat = Chat()
    fields: dict[str, object] = {"user": ANN, "key": "chat", "base": None, "token_ids": (1, 2, 3)}
    chat.engine.handle(Hint(**{**fields, **wrong}))  # type: ignore[arg-type]
    chat.run()
    assert computed_ahead(chat.engine) == 0


def test_so_many_and_no_more() -> None:
    chat = Chat(FakeRunner(block_size=4, num_blocks=2000))
    for n in range(10):
        chat.engine.handle(hint(None, (n, *DRAFT), key=f"chat{n}"))
    assert len(chat.engine._scheduler.hints) == hints.MAX_HINTS_PER_USER
    for n in range(100):
        chat.engine.handle(hint(None, (n, *DRAFT), user=UserId(f"user{n}")))
    assert len(chat.engine._scheduler.hints) == hints.MAX_HINTS
    chat.run()


def test_a_draining_engine_computes_nothing_ahead() -> None:
    chat = Chat()
    chat.engine.handle(hint(chat.path, DRAFT))
    chat.engine.handle(Drain())
    chat.engine.handle(hint(chat.path, DRAFT))
    chat.run()
    assert chat.engine.is_drained
    assert computed_ahead(chat.engine) == 0


def test_a_step_that_fails_ends_the_hint_and_is_not_tried_again() -> None:
    chat = Chat()

    def gate(plan: StepPlan) -> None:
        if any(hints.Hints.owns(row.request_id) for row in plan.rows):
            raise StepFailedError("out of memory")

    chat.runner.gate = gate
    chat.runner.plans.clear()
    chat.engine.handle(hint(chat.path, DRAFT))
    chat.run()
    assert sum(map(bool, hint_rows(chat.runner))) == 1
    chat.runner.gate = None
    assert chat.ask("sent", (*DRAFT, 1)) == len(DRAFT) + 2


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_drafts_change_no_text(data: st.DataObject) -> None:
    """Hints, turns, cancels and steps in any order, on a device that may lag behind: each text is an uncached run's."""
    options = {"block_size": 4, "num_blocks": data.draw(st.integers(20, 60)), "num_host_blocks": 60}
    late = data.draw(st.booleans())
    runner = LateRunner(seed=data.draw(st.integers(0, 9)), **options) if late else FakeRunner(**options)
    engine = make_engine(runner, max_batched_tokens=data.draw(st.sampled_from([4, 16, 256])), max_running=4)
    transcript = Transcript()
    prompts: dict[str, tuple[int, ...]] = {}
    texts = st.lists(st.integers(0, 2), min_size=1, max_size=24).map(tuple)
    for _ in range(data.draw(st.integers(1, 25))):
        user = data.draw(st.sampled_from([ANN, BOB]))
        base: tuple[int, ...] = data.draw(st.sampled_from([(), *prompts.values()]))
        match data.draw(st.sampled_from(["hint", "hint", "ask", "step", "step", "cancel", "leave"])):
            case "hint":
                draft = data.draw(texts)
                key = data.draw(st.sampled_from(["one", "two"]))
                engine.handle(hint(None, (*base, *draft), user=user, key=key, num_draft=len(draft)))
            case "ask":
                name = f"r{len(prompts)}"
                prompts[name] = (*base, *data.draw(texts))[: engine.info.context_tokens - 8]
                engine.handle(make_submit(name, prompts[name], user=user, max_tokens=5))
            case "step":
                transcript.add(engine.step())
            case "cancel":
                if prompts:
                    engine.handle(Cancel(RequestId(data.draw(st.sampled_from(sorted(prompts))))))
            case "leave":
                engine.handle(hint(None, user=user, key="one"))
        engine.check()
    run_until_idle(engine, transcript)
    assert runner.num_sequences == 0
    for name, prompt in prompts.items():
        if name in transcript.rejected:
            continue
        text = transcript.text(name)
        expected = runner.oracle(prompt, GREEDY, num_output_tokens=5)
        assert text == (expected[: len(text)] if transcript.finished[name].reason == "cancelled" else expected)
