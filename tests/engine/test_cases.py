"""Faults seen in other engines, at the level of ours; the name of each test says the right behaviour."""

from __future__ import annotations

import msgspec
import pytest

from chatserve.engine.messages import Inspect
from chatserve.types import UserId
from tests.engine.asking import cancel, counters, oracle
from tests.fakes.engines import Transcript, make_engine, make_submit, run_until_idle
from tests.fakes.fake_runner import FakeRunner


def test_blocks_of_an_abandoned_generation_are_unpinned_by_the_next_step() -> None:
    engine = make_engine(FakeRunner(num_blocks=64))
    for n in range(4):
        engine.handle(make_submit(f"r{n}", [n + 1] * 40, max_tokens=None))
    for _ in range(10):
        engine.step()
    assert engine.report(Inspect(0)).device.pinned > 0
    for n in range(4):
        engine.handle(cancel(f"r{n}"))
    engine.step()
    report = engine.report(Inspect(0))
    assert report.running == report.device.pinned == report.device.private == 0


def test_a_stop_around_the_last_token_ends_once_and_leaks_nothing() -> None:
    runner = FakeRunner(num_blocks=32, stop_token_id=5, stop_one_in=4)
    engine = make_engine(runner, max_running=4)
    transcript = Transcript()
    for n in range(500):
        request_id = f"r{n}"
        engine.handle(make_submit(request_id, (n % 90 + 1, 2, 3), max_tokens=3, stop_token_ids=(5,)))
        if n % 3 == 0:  # company
            engine.handle(make_submit(f"other{n}", (n % 90 + 1, 9), max_tokens=2))
        for _ in range(n % 6):
            transcript.add(engine.step())
        engine.handle(cancel(request_id, keep=n % 4))
        engine.handle(cancel(request_id))
        transcript.add(engine.step())
        engine.check()
        assert request_id in transcript.finished
    run_until_idle(engine, transcript)
    reasons = {transcript.finished[f"r{n}"].reason for n in range(500)}
    assert reasons == {"stop", "length", "cancelled"}
    assert runner.num_sequences == 0


@pytest.mark.parametrize("num_host_blocks", [2, 8, 64])
def test_a_stop_in_mid_swap_gives_back_both_pools(num_host_blocks: int) -> None:
    """Cancel each request at each step of a run in which blocks move out and in all the time."""
    num_moves = 0
    for victim in range(4):
        for at in range(0, 30, 2):
            runner = FakeRunner(num_blocks=8, num_host_blocks=num_host_blocks, block_size=4)
            engine = make_engine(runner, max_batched_tokens=16)
            for n in range(4):
                engine.handle(make_submit(f"r{n}", [n + 1] * 9, max_tokens=10))
            transcript = Transcript()
            for _ in range(at):
                transcript.add(engine.step())
            engine.handle(cancel(f"r{victim}"))
            engine.check()
            run_until_idle(engine, transcript)
            num_moves += counters(engine)["swapped_out_blocks"]
            for n in range(4):
                text = transcript.text(f"r{n}")
                assert text == oracle(runner, [n + 1] * 9, 10)[: len(text)]
                assert n == victim or len(text) == 10
    assert num_moves > 100


def test_a_stop_before_the_first_token_is_heeded_within_one_step() -> None:
    runner = FakeRunner(num_blocks=600, context_tokens=9000)
    engine = make_engine(runner, max_batched_tokens=512)
    engine.handle(make_submit("long", [n % 900 for n in range(8000)]))
    for _ in range(4):
        engine.step()
    engine.handle(cancel("long"))
    output = engine.step()
    assert output is not None
    assert [(finished.reason, finished.num_output_tokens) for finished in output.finished] == [("cancelled", 0)]
    assert not runner.plans[-1].rows
    run_until_idle(engine)


def test_requests_whose_prefix_is_being_swapped_in_start_together() -> None:
    runner = FakeRunner(num_blocks=64, num_host_blocks=64)
    engine = make_engine(runner, max_batched_tokens=256)
    system = list(range(200, 360))
    engine.handle(make_submit("first", [*system, 1], num_shared_tokens=len(system), max_tokens=1))
    transcript = run_until_idle(engine)
    for n in range(5):  # push it out
        engine.handle(make_submit(f"fill{n}", [n + 1] * 200, max_tokens=1))
        run_until_idle(engine, transcript)
    for n in range(20):
        user = UserId(f"user{n % 7}")
        engine.handle(make_submit(f"r{n}", [*system, 500 + n], num_shared_tokens=len(system), user=user))
    run_until_idle(engine, transcript)
    assert any(transcript.started[f"r{n}"].swapped_in_tokens for n in range(20)), "nothing had been swapped out"
    assert {transcript.started[f"r{n}"].computed_tokens for n in range(20)} == {1}
    assert len({transcript.first_token_in[f"r{n}"] for n in range(20)}) == 1
    for n in range(20):
        assert transcript.text(f"r{n}") == oracle(runner, [*system, 500 + n])


@pytest.mark.parametrize("num_steps", range(1, 12))
@pytest.mark.parametrize("keep", [None, 0, 2])
def test_cancelling_one_side_of_a_fork_leaves_the_other_as_it_was(num_steps: int, keep: int | None) -> None:
    runner = FakeRunner(num_blocks=32)
    engine = make_engine(runner)
    trunk = list(range(50, 71))  # ends inside a block
    engine.handle(make_submit("trunk", trunk))
    transcript = run_until_idle(engine)
    path = transcript.finished["trunk"].path
    assert path is not None
    engine.handle(make_submit("left", (), base=path, max_tokens=20))
    engine.handle(make_submit("right", (7,), base=path, max_tokens=20))
    for _ in range(num_steps):
        transcript.add(engine.step())
    engine.handle(cancel("left", keep))
    run_until_idle(engine, transcript)
    whole = [*trunk, *transcript.text("trunk")]
    assert transcript.text("right") == oracle(runner, [*whole, 7], 20)
    engine.handle(make_submit("left again", (), base=path, max_tokens=20))
    run_until_idle(engine, transcript)
    assert transcript.text("left again") == oracle(runner, whole, 20)


def test_a_restored_session_is_really_restored_and_is_its_own() -> None:
    runner = FakeRunner(num_blocks=24, num_host_blocks=256)
    engine = make_engine(runner)
    transcript = Transcript()
    prompts = {f"s{n}": [n * 40 + token for token in range(40)] for n in range(20)}
    for request_id, prompt in prompts.items():
        engine.handle(make_submit(request_id, prompt))
        run_until_idle(engine, transcript)
    for request_id in prompts:
        path = transcript.finished[request_id].path
        engine.handle(make_submit(f"{request_id} again", (1, 2), base=path))
        run_until_idle(engine, transcript)
    for request_id, prompt in prompts.items():
        started = transcript.started[f"{request_id} again"]
        assert started.computed_tokens == 3, "two new ones, and the last output's, whose KV was not needed before"
        whole = [*prompt, *transcript.text(request_id), 1, 2]
        assert transcript.text(f"{request_id} again") == oracle(runner, whole)
    assert counters(engine)["prompt_tokens_swapped_in"] > 400


@pytest.mark.parametrize("num_host_blocks", [0, 16])
def test_a_burst_of_short_chats_does_not_push_out_what_all_share(num_host_blocks: int) -> None:
    runner = FakeRunner(num_blocks=32, num_host_blocks=num_host_blocks, vocab_size=5000)
    engine = make_engine(runner)
    system = list(range(2000, 2100))
    transcript = Transcript()
    for n in range(1000):
        prompt = [*system, n, n + 1, 7]
        engine.handle(make_submit(f"r{n}", prompt, num_shared_tokens=len(system), max_tokens=2))
        if n % 4 == 3:
            while engine.has_work:
                transcript.add(engine.step())
    run_until_idle(engine, transcript)
    computed = sum(started.computed_tokens for started in transcript.started.values())
    assert computed == len(system) + 3 * 1000


@pytest.mark.parametrize("seed", range(3))
def test_resident_swapped_preempted_forked_and_cold_give_the_same_text(seed: int) -> None:
    """Three turns of six conversations with a fork each, in a roomy pool and in one of eight blocks."""
    texts = []
    for num_blocks, num_host_blocks, budget in ((512, 0, 512), (12, 64, 32), (12, 4, 16), (12, 0, 8)):
        runner = FakeRunner(num_blocks=num_blocks, num_host_blocks=num_host_blocks, block_size=8)
        engine = make_engine(runner, max_batched_tokens=budget, context_tokens=88)
        transcript = Transcript()
        bases = {}
        for turn in range(3):
            for n in range(6):
                engine.handle(
                    make_submit(
                        f"{turn}.{n}",
                        [seed + n + 1] * (9 if turn == 0 else 3),
                        base=bases.get(n),
                        max_tokens=11,
                        temperature=1.0,
                        seed=seed * 100 + n,
                    )
                )
                if n in bases:
                    fork = msgspec.structs.replace(bases[n], num_tokens=bases[n].num_tokens - 5)
                    engine.handle(make_submit(f"{turn}.{n}.fork", (9,), base=fork, max_tokens=5, seed=seed))
            run_until_idle(engine, transcript)
            bases = {n: transcript.finished[f"{turn}.{n}"].path for n in range(6)}
        texts.append(transcript.texts)
        assert not transcript.rejected
        assert num_blocks > 12 or counters(engine)["preemptions"] > 0
    assert all(each == texts[0] for each in texts)
