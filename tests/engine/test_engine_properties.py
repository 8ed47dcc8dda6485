"""Whatever clients do, however small the pools, and however late the device: right text, one end each, and nothing left
over.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from chatserve.engine.messages import Hint, PathRef, Release
from chatserve.sched.plan import StepFailedError, StepPlan
from chatserve.types import RequestId, UserId
from tests.fakes.engines import Transcript, make_engine, make_submit, run_until_idle
from tests.fakes.fake_runner import FakeRunner, LateRunner

BLOCK_SIZE = 4
STOP = 3
VOCAB = 50
USERS = (UserId("ann"), UserId("bob"))
SYSTEM = tuple(range(10, 21))  # 11 tokens: the shared prefix ends inside a block

tokens = st.lists(st.integers(0, 5), min_size=1, max_size=14)


class EngineMachine(RuleBasedStateMachine):
    """Random turns, forks, cancels, hints, releases and steps; each text is compared with an uncached run."""

    paths = Bundle("paths")

    @initialize(
        num_blocks=st.integers(8, 14),
        num_host_blocks=st.sampled_from([0, 3, 8, 40]),
        budget=st.sampled_from([1, 5, 16, 64]),
        max_running=st.integers(1, 6),
        min_fetched_blocks=st.sampled_from([0, 1, 8]),
        max_in_flight=st.sampled_from([1, 2, 2, 3]),
        fail_one_in=st.sampled_from([0, 0, 15]),
        seed=st.integers(0, 1000),
    )
    def start(
        self,
        num_blocks: int,
        num_host_blocks: int,
        budget: int,
        max_running: int,
        min_fetched_blocks: int,
        max_in_flight: int,
        fail_one_in: int,
        seed: int,
    ) -> None:
        luck = random.Random(seed)

        def gate(plan: StepPlan) -> None:
            if fail_one_in and plan.rows and luck.randrange(fail_one_in) == 0:
                raise StepFailedError("out of memory")

        self.may_fail = fail_one_in > 0
        options = {
            "num_blocks": num_blocks,
            "num_host_blocks": num_host_blocks,
            "block_size": BLOCK_SIZE,
            "vocab_size": VOCAB,
            "stop_token_id": STOP,
            "stop_one_in": 9,
            "gate": gate,
        }
        self.runner = (
            FakeRunner(**options)
            if max_in_flight == 1
            else LateRunner(seed=seed, max_in_flight=max_in_flight, fails_early=seed % 2 == 0, **options)
        )
        self.budget = budget
        self.engine = make_engine(
            self.runner,
            max_batched_tokens=budget,
            max_running=max_running,
            max_queued=12,
            min_fetched_blocks=min_fetched_blocks,
        )
        self.transcript = Transcript()
        self.sent: dict[str, tuple[list[int], int]] = {}
        """What each request was to continue, and its max_tokens."""
        self.kept: dict[str, int | None] = {}
        self.known: dict[PathRef, tuple[UserId, list[int]]] = {}
        self.settled: set[str] = set()

    # --- what clients do ----------------------------------------------------------------------------------------------

    @rule(user=st.sampled_from(USERS), shared=st.booleans(), new=tokens, max_tokens=st.integers(1, 20))
    def send(self, user: UserId, shared: bool, new: list[int], max_tokens: int) -> None:
        prompt = [*SYSTEM, *new] if shared else new
        self._submit(user, None, prompt, prompt, len(SYSTEM) if shared else 0, max_tokens)

    @rule(
        path=paths, new=st.lists(st.integers(0, 5), max_size=9), max_tokens=st.integers(1, 20), cut=st.integers(0, 30)
    )
    def continue_or_fork(self, path: PathRef, new: list[int], max_tokens: int, cut: int) -> None:
        if path not in self.known:
            return
        user, token_ids = self.known[path]
        base = PathRef(path.epoch, path.handle, max(1, path.num_tokens - cut))
        num_shared = len(SYSTEM) if tuple(token_ids[: len(SYSTEM)]) == SYSTEM and base.num_tokens >= len(SYSTEM) else 0
        self._submit(user, base, new, [*token_ids[: base.num_tokens], *new], num_shared, max_tokens)

    def _submit(
        self,
        user: UserId,
        base: PathRef | None,
        new: Sequence[int],
        whole: list[int],
        num_shared_tokens: int,
        max_tokens: int,
    ) -> None:
        request_id = f"r{len(self.sent)}"
        self.sent[request_id] = (whole, max_tokens)
        self.engine.handle(
            make_submit(
                request_id,
                new,
                user=user,
                base=base,
                num_shared_tokens=num_shared_tokens,
                max_tokens=max_tokens,
                stop_token_ids=(STOP,),
            )
        )
        self.users = {**getattr(self, "users", {}), request_id: user}

    @rule(number=st.integers(0, 10), keep=st.one_of(st.none(), st.integers(0, 6)))
    def cancel(self, number: int, keep: int | None) -> None:
        live = [request_id for request_id in self.sent if request_id in self.engine._scheduler]
        if live:
            request_id = live[number % len(live)]
            self.kept[request_id] = keep
            self.engine.handle(make_cancel(request_id, keep))
            assert request_id not in self.engine._scheduler

    @rule(path=paths, draft=tokens, key=st.sampled_from(["a", "b"]), shared=st.booleans(), unknown=st.booleans())
    def hint(self, path: PathRef, draft: list[int], key: str, shared: bool, unknown: bool) -> None:
        """A draft after a known path, or of a first message, or a path that is not this user's."""
        if path not in self.known:
            return
        user, token_ids = self.known[path]
        if shared:
            new = (*SYSTEM, *draft)
            hint = Hint(user=user, key=key, base=None, token_ids=new, num_shared_tokens=11, num_draft_tokens=len(draft))
        else:
            num_shared = len(SYSTEM) if tuple(token_ids[: len(SYSTEM)]) == SYSTEM else 0
            whose = USERS[user == USERS[0]] if unknown else user
            hint = Hint(
                user=whose,
                key=key,
                base=path,
                token_ids=tuple(draft),
                num_shared_tokens=num_shared,
                num_draft_tokens=len(draft),
            )
        self.engine.handle(hint)

    @rule(key=st.sampled_from(["a", "b"]), user=st.sampled_from(USERS))
    def leave(self, key: str, user: UserId) -> None:
        self.engine.handle(Hint(user=user, key=key, base=None, token_ids=()))

    @rule(path=paths)
    def release(self, path: PathRef) -> None:
        if path in self.known:
            self.engine.handle(Release(self.known.pop(path)[0], (path,)))

    # --- what the engine does -----------------------------------------------------------------------------------------

    @rule(target=paths, num_steps=st.integers(1, 6))
    def step(self, num_steps: int) -> object:
        for _ in range(num_steps):
            before = copy.deepcopy(self.engine._scheduler)
            num_plans = len(self.runner.plans)
            self.transcript.add(self.engine.step())
            self.engine.check()
            for plan in self.runner.plans[num_plans:]:
                assert before.schedule() == plan, "the same state gave another plan"
                assert plan.num_tokens <= self.budget
        return self._settle()

    @rule(target=paths)
    def run_dry(self) -> object:
        run_until_idle(self.engine, self.transcript)
        assert self.runner.num_sequences == 0
        assert set(self.sent) == set(self.transcript.finished) | set(self.transcript.rejected)
        return self._settle()

    def _settle(self) -> object:
        """Compare the texts of what has ended since the last time, and give their paths."""
        fresh = [r for r in self.transcript.finished if r not in self.settled]
        for request_id in fresh:
            self.settled.add(request_id)
            self._compare(request_id)
        return multiple(*[path for r in fresh if (path := self.transcript.finished[r].path) is not None])

    def _compare(self, request_id: str) -> None:
        whole, max_tokens = self.sent[request_id]
        finished, text = self.transcript.finished[request_id], self.transcript.text(request_id)
        room = self.engine.info.context_tokens - len(whole)
        sampling = make_submit("x", (1,)).sampling
        full = self.runner.oracle(whole, sampling, num_output_tokens=min(max_tokens, room), stop_token_ids=(STOP,))
        num_kept = len(text)
        match finished.reason:
            case "stop":
                assert text == full
                assert finished.stop_token_id == STOP
                assert len(text) < min(max_tokens, room)
            case "length":
                assert text == full
                assert len(text) == min(max_tokens, room)
            case "cancelled":
                assert request_id in self.kept
                assert text == full[: len(text)]
                keep = self.kept[request_id]
                num_kept = len(text) if keep is None else min(keep, len(text))
            case "error":
                assert self.may_fail
                assert text == full[: len(text)]
            case other:
                raise AssertionError(other)
        assert finished.path is not None
        assert finished.path.num_tokens == len(whole) + num_kept
        self.known[finished.path] = (self.users[request_id], whole + text[:num_kept])

    @invariant()
    def rejections_are_deserved(self) -> None:
        for request_id, rejected in getattr(self, "transcript", Transcript()).rejected.items():
            whole, _ = self.sent[request_id]
            match rejected.code:
                case "context_overflow":
                    assert rejected.prompt_tokens == len(whole) >= rejected.context_tokens
                case "overloaded":
                    assert rejected.retry_after_s is not None
                case other:
                    raise AssertionError(other)

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.run_dry()


def make_cancel(request_id: str, keep: int | None) -> object:
    from chatserve.engine.messages import Cancel

    return Cancel(RequestId(request_id), keep)


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_batch_under_pressure_says_what_each_says_alone(data: st.DataObject) -> None:
    """Resident, swapped, preempted, forked and cold give the same text (CASE 35)."""
    runner = FakeRunner(
        num_blocks=data.draw(st.integers(8, 20)), num_host_blocks=data.draw(st.sampled_from([0, 4, 64])), block_size=4
    )
    engine = make_engine(runner, max_batched_tokens=data.draw(st.sampled_from([8, 16, 64])))
    prompts = data.draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=18), min_size=2, max_size=10))
    for number, prompt in enumerate(prompts):
        engine.handle(make_submit(f"r{number}", prompt, max_tokens=9))
    transcript = run_until_idle(engine)
    for number, prompt in enumerate(prompts):
        expected = runner.oracle(prompt, make_submit("x", (1,)).sampling, num_output_tokens=9)
        assert transcript.text(f"r{number}") == expected
