"""KV that outlives an engine: found again by who may find it, and read when it is needed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatserve.cache.siblings import pack
from chatserve.engine.messages import Cancel, Hint, Inspect, Release
from chatserve.engine.snapshot import Snapshot
from chatserve.types import RequestId
from tests.engine.talk import ANN, BOB, SYSTEM, Talk, make_runner, manifest_of, prompt_of, warnings_of
from tests.fakes.engines import make_submit, run_until_idle


@pytest.mark.parametrize("sizes", [(64, 64), (16, 64), (64, 0)], ids=["resident", "mostly on the host", "no host tier"])
def test_the_next_turn_after_a_restart_computes_what_is_new(tmp_path: Path, sizes: tuple[int, int]) -> None:
    before = Talk(tmp_path, make_runner(*sizes))
    said = [before.say(prompt_of(seed, 22)) for seed in range(5)]
    before.end()
    after = Talk(tmp_path)
    assert after.engine.has_background
    for sequence in said:
        after.say([*sequence, 1, 2, 3])
        # All but the answer's last token, of which nobody needed the KV, if the pools could hold it.
        assert after.computed() <= 4 or sizes == (64, 0)
    assert after.engine.report(Inspect(0)).counters["damaged_blocks"] == 0


def test_what_nobody_asks_for_is_read_in_the_background(tmp_path: Path) -> None:
    before = Talk(tmp_path)
    said = before.say(prompt_of(1, 40))
    before.end()
    after = Talk(tmp_path)
    assert not after.engine.has_work
    while after.engine.has_background:
        after.engine.background()
        after.engine.check()
    shutil.rmtree(tmp_path)
    after.say([*said, 1])
    assert after.computed() <= 2


def test_a_request_waits_for_its_own_path_and_not_for_the_rest(tmp_path: Path) -> None:
    before = Talk(tmp_path)
    said = before.say(prompt_of(1, 40))
    for seed in range(2, 5):
        before.say(prompt_of(seed, 40))
    before.end()
    after = Talk(tmp_path)
    total = len(after.engine._kv.unread)
    after.say([*said, 1])
    assert after.computed() <= 2
    assert len(after.engine._kv.unread) == total - -(-(len(said) - 1) // 4)


def test_those_who_run_go_on_while_another_waits_for_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = Talk(tmp_path)
    said = before.say(prompt_of(1, 40))
    before.end()
    after = Talk(tmp_path)
    running = after.ask(prompt_of(9, 5), max_tokens=40)
    after.transcript.add(after.engine.step())
    monkeypatch.setattr(Snapshot, "read", one_block_at_a_time(Snapshot.read))
    waiting = after.ask([*said, 1])
    while waiting not in after.transcript.started:
        num_said = len(after.transcript.text(running))
        after.transcript.add(after.engine.step())
        assert len(after.transcript.text(running)) == num_said + 1, "kept waiting"
    assert len(after.transcript.text(running)) >= 10
    assert after.transcript.started[waiting].computed_tokens <= 2
    run_until_idle(after.engine, after.transcript)


def one_block_at_a_time(read: Callable[..., None]) -> Callable[..., None]:
    return lambda self, *, wanted_only, budget_s=0.0: read(self, wanted_only=wanted_only, budget_s=0.0)


def test_the_most_recently_used_paths_come_first_within_the_limit(tmp_path: Path) -> None:
    before = Talk(tmp_path, snapshot_blocks=16)
    said = [before.say(prompt_of(seed, 20)) for seed in range(4)]
    before.say([*said[1], 5])  # used again
    before.end()
    assert len(manifest_of(tmp_path).blocks) == 16
    after = Talk(tmp_path)
    for index, most in ((1, 2), (3, 2), (0, 100)):
        after.say([*said[index], 1])
        assert after.computed() <= most or index == 0
    assert after.computed() == len(said[0]) + 1


def test_a_smaller_host_pool_takes_what_it_has_room_for(tmp_path: Path) -> None:
    before = Talk(tmp_path)
    said = [before.say(prompt_of(seed, 20)) for seed in range(4)]
    before.end()
    after = Talk(tmp_path, make_runner(64, 9))
    after.engine.check()
    after.say([*said[3], 1])
    assert after.computed() <= 2
    assert Talk(tmp_path, make_runner(64, 0)).say([*said[3], 1])


def test_a_second_restart_keeps_what_was_never_read(tmp_path: Path) -> None:
    before = Talk(tmp_path)
    said = before.say(prompt_of(1, 40))
    before.end()
    between = Talk(tmp_path)
    between.say(prompt_of(2, 8))
    between.end()
    after = Talk(tmp_path)
    after.say([*said, 1])
    assert after.computed() <= 2
    assert len(list(tmp_path.iterdir())) == 2, "files of older snapshots are left"


def test_requests_that_still_run_at_the_end_are_kept_as_far_as_they_came(tmp_path: Path) -> None:
    before = Talk(tmp_path)
    name = before.ask(prompt_of(1, 30), max_tokens=50)
    for _ in range(10):
        before.transcript.add(before.engine.step())
    before.end()
    after = Talk(tmp_path)
    after.say(prompt_of(1, 30) + before.transcript.text(name), max_tokens=4)
    assert after.computed() <= 2


def test_scopes_outlive_the_restart(tmp_path: Path) -> None:
    before = Talk(tmp_path)
    private = before.say(prompt_of(1, 30))
    before.say([*SYSTEM, *prompt_of(2, 9)], shared=len(SYSTEM))
    before.end()
    after = Talk(tmp_path)
    after.say([*private, 1], BOB)
    assert after.computed() == len(private) + 1, "another user's text was found"
    after.say([*SYSTEM, *prompt_of(3, 9)], BOB, shared=len(SYSTEM))
    assert after.computed() == 9
    after.say([*private, 1], ANN)
    assert after.computed() <= 2


def test_released_before_it_was_read_it_is_gone_for_good(tmp_path: Path) -> None:
    before = Talk(tmp_path)
    said = before.say(prompt_of(1, 30))
    before.end()
    after = Talk(tmp_path)
    after.engine._kv.release(said, ANN)
    after.engine.check()
    assert not after.engine.has_background
    whole = after.say([*said, 1])
    assert after.computed() == len(said) + 1
    after.engine._kv.release(whole, ANN)
    after.end()
    assert list(tmp_path.iterdir()) == [], "the disk still holds what was deleted"


def test_deleted_by_its_ids_it_leaves_the_disk_at_once_and_the_others_can_be_read(tmp_path: Path) -> None:
    before = Talk(tmp_path)
    gone, kept = (before.say([*SYSTEM, *prompt_of(seed, 30)], shared=len(SYSTEM)) for seed in (1, 2))
    before.end()
    after = Talk(tmp_path)
    after.engine.handle(Release(ANN, (), 0, tuple(gone)))
    assert list(tmp_path.iterdir()) == [], "the disk still holds what was deleted"
    after.engine.check()
    after.say([*gone, 1], shared=len(SYSTEM))
    assert after.computed() >= len(gone) - len(SYSTEM)
    after.say([*kept, 1], shared=len(SYSTEM))
    assert after.computed() <= 2
    after.engine.handle(Release(ANN, (), 0, (*gone, 1)))
    after.end()
    assert len(manifest_of(tmp_path).blocks) > 0


def test_deleted_it_leaves_the_disk_also_where_the_snapshot_is_of_another_model(tmp_path: Path) -> None:
    before = Talk(tmp_path, model="one")
    said = before.say(prompt_of(1, 30))
    before.end()
    after = Talk(tmp_path, model="two")
    assert len(manifest_of(tmp_path).blocks) > 0
    after.engine.handle(Release(ANN, (), 0, tuple(said)))
    assert list(tmp_path.iterdir()) == [], "the disk still holds what was deleted"


def test_a_deletion_where_the_snapshot_cannot_be_looked_at_costs_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = Talk(tmp_path)
    said = before.say(prompt_of(1, 30))
    before.end()
    after = Talk(tmp_path)
    (tmp_path / "manifest").write_bytes(b"damaged meanwhile")
    after.engine.handle(Release(ANN, (), 0, tuple(said)))
    assert ["may have what was deleted" in line for line in warnings_of(caplog)] == [True]
    shutil.rmtree(tmp_path)
    after.engine.handle(Release(ANN, (), 0, tuple(said)))
    assert len(warnings_of(caplog)) == 1


def test_a_deletion_of_what_the_snapshot_does_not_have_leaves_it(tmp_path: Path) -> None:
    before = Talk(tmp_path)
    said = before.say([*SYSTEM, *prompt_of(1, 30)], shared=len(SYSTEM))
    before.end()
    after = Talk(tmp_path)
    new = after.say([*SYSTEM, *prompt_of(9, 30)], shared=len(SYSTEM))
    others = [
        Release(ANN, (), 0, tuple(new)),
        Release(BOB, (), 0, tuple(said)),
        Release(ANN, (), len(said), (*said, 4, 5, 6)),
    ]
    for release in others:
        after.engine.handle(release)
    assert len(manifest_of(tmp_path).blocks) > 0
    after.engine.handle(Release(ANN, (), len(said) - 9, tuple(said)))
    assert list(tmp_path.iterdir()) == [], "the disk still holds a message that was deleted"


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_restored_blocks_under_pressure_say_what_a_cold_engine_says(
    data: st.DataObject, saved: tuple[Path, list[list[int]]]
) -> None:
    """Reading, evicting, hints, releases, cancels and restarts in any order, on pools of a few blocks."""
    source, said = saved
    num_blocks, num_host_blocks = data.draw(st.integers(14, 24)), data.draw(st.sampled_from([1, 5, 12, 64]))
    talk = Talk(
        source, make_runner(num_blocks, num_host_blocks), max_batched_tokens=data.draw(st.sampled_from([7, 64]))
    )
    prompts: dict[str, list[int]] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        sequence = data.draw(st.sampled_from(said))
        cut = data.draw(st.integers(1, len(sequence)))
        user = data.draw(st.sampled_from([ANN, BOB]))
        match data.draw(st.sampled_from(["ask", "ask", "step", "background", "hint", "release", "cancel"])):
            case "ask":
                prompt = [*sequence[:cut], *data.draw(st.lists(st.integers(0, 3), max_size=5))]
                prompts[talk.ask(prompt, user, shared=min(len(SYSTEM), len(prompt)))] = prompt
            case "step":
                talk.transcript.add(talk.engine.step())
            case "background":
                talk.engine.background()
            case "hint":
                ids, num_draft = tuple(sequence[:cut]), data.draw(st.integers(0, cut))
                talk.engine.handle(Hint(user=user, key="chat", base=None, token_ids=ids, num_draft_tokens=num_draft))
            case "release":
                talk.engine._kv.release(sequence[:cut], user)
                talk.engine._stirred = True
            case "cancel":
                live = [name for name in prompts if name in talk.engine._scheduler]
                if live:
                    talk.engine.handle(Cancel(RequestId(live[0])))
        talk.engine.check()
    run_until_idle(talk.engine, talk.transcript)
    sampling = make_submit("x", (1,)).sampling
    for name, prompt in prompts.items():
        expected = talk.runner.oracle(prompt, sampling, num_output_tokens=8)
        text = talk.transcript.text(name)
        if talk.transcript.finished[name].reason == "cancelled":
            expected = expected[: len(text)]
        assert text == expected


def test_a_hint_has_its_path_read_first_and_brought_back(tmp_path: Path) -> None:
    before = Talk(tmp_path)
    said = before.say(prompt_of(1, 40))
    for seed in range(2, 6):
        before.say(prompt_of(seed, 40))
    before.end()
    after = Talk(tmp_path)
    total = len(after.engine._kv.unread)
    after.engine.handle(Hint(user=ANN, key="chat", base=None, token_ids=tuple(said)))
    run_until_idle(after.engine, after.transcript)
    assert len(after.engine._kv.unread) == total - -(-(len(said) - 1) // 4)
    after.say([*said, 1])
    assert after.transcript.started[f"r{after.count}"].swapped_in_tokens == 0
    assert after.computed() <= 2


def test_a_draft_that_was_never_sent_is_not_saved(tmp_path: Path) -> None:
    talk = Talk(tmp_path)
    said = talk.say(prompt_of(1, 40))
    talk.engine.handle(Hint(user=ANN, key="chat", base=None, token_ids=(*said, *range(30)), num_draft_tokens=30))
    run_until_idle(talk.engine, talk.transcript)
    assert talk.engine.report(Inspect(0)).counters["hinted_tokens"] >= 30
    talk.end()
    kept = b"".join(block.token_ids for block in manifest_of(tmp_path).blocks)
    assert pack(said[:-1]) in kept
    assert pack(range(20)) not in kept
