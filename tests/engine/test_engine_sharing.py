"""What an engine computes once for all, on a runner in which a wrong block is wrong text."""

from __future__ import annotations

import msgspec
import pytest

from chatserve.engine.engine import Engine
from chatserve.engine.messages import Hint
from chatserve.types import UserId
from tests.engine.asking import BOB, cancel, counters, oracle, path_of
from tests.fakes.engines import Transcript, make_engine, make_submit, run_until_idle
from tests.fakes.fake_runner import FakeRunner


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


def test_one_that_computed_what_another_had_computed_does_not_keep_both_when_room_is_short() -> None:
    """Two that say the same at the same time have a block each for it; the one left alone must still fit."""
    runner = FakeRunner(num_blocks=8, num_host_blocks=0, block_size=4)
    engine = make_engine(runner)
    for request_id, max_tokens in (("short", 11), ("long", 22)):
        engine.handle(make_submit(request_id, (1, 2, 3, 4), max_tokens=max_tokens))
    transcript = run_until_idle(engine, max_steps=200)
    assert transcript.text("long") == oracle(runner, [1, 2, 3, 4], 22)
