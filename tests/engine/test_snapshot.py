"""KV that outlives an engine: found again by who may find it, and whatever became of the files, never a wrong text."""

from __future__ import annotations

import errno
import logging
import os
import random
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatserve.cache import snapshot_files
from chatserve.cache.siblings import pack
from chatserve.cache.snapshot import Manifest, decode_manifest, encode_manifest
from chatserve.config import KV_SNAPSHOT_S
from chatserve.engine.engine import Engine
from chatserve.engine.messages import Cancel, Hint, Inspect
from chatserve.engine.snapshot import Snapshot
from chatserve.types import RequestId, UserId
from tests.fakes.engines import Transcript, make_engine, make_submit, run_until_idle
from tests.fakes.fake_runner import FakeRunner

ANN, BOB = UserId("ann"), UserId("bob")
SYSTEM = list(range(60, 71))  # 11 tokens: the shared prefix ends inside a block


def prompt_of(seed: int, num_tokens: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(50) for _ in range(num_tokens)]


def make_runner(num_blocks: int = 64, num_host_blocks: int = 64) -> FakeRunner:
    return FakeRunner(num_blocks=num_blocks, num_host_blocks=num_host_blocks, block_size=4)


class Talk:
    """Conversations through one engine, each compared with what an engine without any cache says."""

    def __init__(self, directory: Path, runner: FakeRunner | None = None, **options: Any) -> None:
        self.runner = runner or make_runner()
        self.engine: Engine = make_engine(self.runner, kv_snapshot=directory, **options)
        self.transcript = Transcript()
        self.count = 0

    def say(self, prompt: list[int], user: UserId = ANN, *, shared: int = 0, max_tokens: int = 8) -> list[int]:
        """One turn from its prompt; the whole sequence after it."""
        name = self.ask(prompt, user, shared=shared, max_tokens=max_tokens)
        run_until_idle(self.engine, self.transcript)
        text = self.transcript.text(name)
        assert text == self.runner.oracle(prompt, make_submit("x", (1,)).sampling, num_output_tokens=max_tokens)
        return prompt + text

    def ask(self, prompt: list[int], user: UserId = ANN, *, shared: int = 0, max_tokens: int = 8) -> str:
        self.count += 1
        name = f"r{self.count}"
        submit = make_submit(name, prompt, user=user, num_shared_tokens=shared, max_tokens=max_tokens)
        self.engine.handle(submit)
        return name

    def computed(self) -> int:
        """Prompt tokens that the last turn had to compute."""
        return self.transcript.started[f"r{self.count}"].computed_tokens

    def end(self) -> None:
        self.engine.save_snapshot()
        self.engine.check()


def manifest_of(directory: Path) -> Manifest:
    return decode_manifest((directory / snapshot_files.MANIFEST_NAME).read_bytes())


# --- what comes back --------------------------------------------------------------------------------------------------


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


# --- whose it is ------------------------------------------------------------------------------------------------------


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


def test_files_are_their_owners_alone(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "snapshot"
    talk = Talk(directory)
    talk.say(prompt_of(1, 30))
    talk.end()
    assert directory.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in directory.iterdir()} == {0o600}


# --- what is not used -------------------------------------------------------------------------------------------------


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_another_identity_is_said_once_and_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = Talk(tmp_path, model="one")
    said = before.say(prompt_of(1, 30))
    before.end()
    after = Talk(tmp_path, model="two")
    after.say([*said, 1])
    assert after.computed() == len(said) + 1
    (line,) = warnings_of(caplog)
    assert "another model" in line
    assert str(tmp_path) in line
    other = Talk(tmp_path, FakeRunner(num_blocks=64, num_host_blocks=64, block_size=8), model="one")
    other.say([*said, 1])
    assert other.computed() == len(said) + 1
    assert "another layout" in warnings_of(caplog)[1]


def test_no_snapshot_is_no_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Talk(tmp_path / "none").say(prompt_of(1, 10))
    assert warnings_of(caplog) == []


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    directory = tmp_path_factory.mktemp("saved")
    talk = Talk(directory, make_runner(20, 64))
    said = [talk.say([*SYSTEM, *prompt_of(seed, 15)], shared=len(SYSTEM)) for seed in range(3)]
    said.append(talk.say([*said[0][:27], 9, 9, 9], BOB, shared=len(SYSTEM)))
    talk.end()
    return directory, said


def copy_of(source: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    return shutil.copytree(source, target)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_damage_to_the_files_gives_a_wrong_text(
    data: st.DataObject, saved: tuple[Path, list[list[int]]], tmp_path: Path
) -> None:
    """Flips, cuts, overwriting and loss at random places: `say` compares every text with the oracle's."""
    source, said = saved
    directory = copy_of(source, tmp_path / "damaged")
    file = data.draw(st.sampled_from(sorted(directory.iterdir())))
    content = bytearray(file.read_bytes())
    match data.draw(st.sampled_from(["flip", "cut", "noise", "lose", "extend", "shift"])):
        case "flip":
            at = data.draw(st.integers(0, len(content) - 1))
            content[at] ^= 1 << data.draw(st.integers(0, 7))
        case "cut":
            del content[data.draw(st.integers(0, len(content) - 1)) :]
        case "noise":
            at = data.draw(st.integers(0, len(content) - 1))
            noise = data.draw(st.binary(min_size=1, max_size=64))
            content[at : at + len(noise)] = noise
        case "shift":
            at = data.draw(st.integers(0, len(content) - 1))
            content[at:at] = b"\0" * data.draw(st.sampled_from([1, 8, 64]))
        case "extend":
            content += data.draw(st.binary(min_size=1, max_size=64))
        case "lose":
            file.unlink()
    if file.exists():
        file.write_bytes(content)
    after = Talk(directory)
    for sequence in data.draw(st.permutations(said)):
        after.say([*sequence, 1], data.draw(st.sampled_from([ANN, BOB])), shared=len(SYSTEM))
    while after.engine.has_background:
        after.engine.background()
        after.engine.check()
    after.end()
    again = Talk(directory)
    for sequence in said:
        again.say([*sequence, 2], shared=len(SYSTEM))


def test_one_damaged_block_costs_what_follows_it_and_no_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = Talk(tmp_path)
    said = before.say(prompt_of(1, 40))
    before.end()
    (file,) = tmp_path.glob("*.blocks")
    content = bytearray(file.read_bytes())
    block_bytes = before.runner.block_bytes().block_bytes
    content[5 * block_bytes + 3] ^= 1
    file.write_bytes(content)
    after = Talk(tmp_path)
    after.say([*said, 1])
    assert after.computed() == len(said) + 1 - 5 * 4
    assert len(warnings_of(caplog)) == 1


def _twist(change: Callable[[list[Any]], None]) -> Callable[[Manifest], Manifest]:
    def twisted(manifest: Manifest) -> Manifest:
        blocks = [[*_fields(block)] for block in manifest.blocks]
        change(blocks)
        kind = type(manifest.blocks[0])
        return Manifest(
            identity=manifest.identity,
            block_size=manifest.block_size,
            block_bytes=manifest.block_bytes,
            data_file=manifest.data_file,
            scopes=manifest.scopes,
            blocks=tuple(kind(*fields) for fields in blocks),
        )

    return twisted


def _fields(block: Any) -> Iterable[Any]:
    return (block.parent, block.scope, block.is_protected, block.token_ids, block.checksum)


@pytest.mark.parametrize(
    "change",
    [
        lambda blocks: blocks[3].__setitem__(0, 7),
        lambda blocks: blocks[3].__setitem__(0, -2),
        lambda blocks: blocks[3].__setitem__(1, 99),
        lambda blocks: blocks[3].__setitem__(3, b""),
        lambda blocks: blocks[3].__setitem__(3, bytes(7)),
        lambda blocks: blocks[3].__setitem__(3, bytes(400)),
        lambda blocks: blocks.append(list(blocks[3])),
        lambda blocks: blocks[0].__setitem__(3, bytes(4)),
    ],
)
def test_a_manifest_that_makes_no_tree_is_not_used(
    change: Callable[[list[Any]], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its digest is right: another program's, or one of ours with a fault."""
    before = Talk(tmp_path)
    said = before.say(prompt_of(1, 40))
    before.end()
    twisted = _twist(change)(manifest_of(tmp_path))
    (tmp_path / snapshot_files.MANIFEST_NAME).write_bytes(encode_manifest(twisted))
    after = Talk(tmp_path)
    after.say([*said, 1])
    assert after.computed() == len(said) + 1
    assert len(warnings_of(caplog)) == 1


def test_a_data_file_outside_the_directory_is_not_opened(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = Talk(tmp_path / "kv")
    said = before.say(prompt_of(1, 20))
    before.end()
    manifest = manifest_of(tmp_path / "kv")
    (tmp_path / "kv" / manifest.data_file).rename(tmp_path / "other.blocks")
    content = encode_manifest(
        Manifest(
            **{name: getattr(manifest, name) for name in manifest.__struct_fields__} | {"data_file": "../other.blocks"}
        )
    )
    (tmp_path / "kv" / snapshot_files.MANIFEST_NAME).write_bytes(content)
    after = Talk(tmp_path / "kv")
    after.say([*said, 1])
    assert after.computed() == len(said) + 1
    assert "../other.blocks" in warnings_of(caplog)[0]


# --- writing it -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fail_at", [0, 1, 5, 12])
def test_a_full_disk_costs_a_line_and_leaves_the_old_snapshot(
    fail_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk is full at the n-th write, manifest included."""
    before = Talk(tmp_path)
    said = before.say(prompt_of(1, 36))
    before.end()
    files = {path.name for path in tmp_path.iterdir()}
    between = Talk(tmp_path)
    between.say([*said, 1, 2])
    writes = 0
    real = os.write

    def write(fd: int, content: memoryview) -> int:
        nonlocal writes
        writes += 1
        if writes > fail_at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, content[: len(content) // 2 + 1])  # and never all at once

    monkeypatch.setattr(os, "write", write)
    between.end()
    monkeypatch.undo()
    (line,) = warnings_of(caplog)
    assert "No space left on device" in line
    assert {path.name for path in tmp_path.iterdir()} == files
    after = Talk(tmp_path)
    after.say([*said, 1])
    assert after.computed() <= 2


def test_a_disk_without_room_is_left_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    usage = shutil.disk_usage(tmp_path)
    block_bytes = make_runner().block_bytes().block_bytes
    for free, num_blocks in ((snapshot_files.RESERVED_BYTES + 3 * block_bytes, 3), (1000, 3)):
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=free: usage._replace(free=free))
        talk = Talk(tmp_path)
        talk.say(prompt_of(1, 36))
        talk.end()
        assert len(manifest_of(tmp_path).blocks) == num_blocks
    assert "no room" in warnings_of(caplog)[0]


def test_it_ends_in_time_with_what_it_has(tmp_path: Path) -> None:
    """By a clock on which each look takes a while: a disk that is slow."""
    talk = Talk(tmp_path, make_runner(512, 0))
    said = [talk.say(prompt_of(seed, 200)) for seed in range(6)]
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 4.5
        return now

    assert talk.engine._snapshot is not None
    talk.engine._snapshot._clock = clock
    talk.end()
    assert now <= KV_SNAPSHOT_S + 3 * 4.5
    saved = len(manifest_of(tmp_path).blocks)
    assert 0 < saved < 6 * 50
    after = Talk(tmp_path, make_runner(512, 512))
    after.say([*said[-1], 1])
    assert after.computed() <= 2


def test_a_directory_that_cannot_be_written_costs_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    talk = Talk(tmp_path / "file" / "below")
    talk.say(prompt_of(1, 10))
    (tmp_path / "file").write_text("in the way")
    talk.end()
    assert len(warnings_of(caplog)) == 1


def test_what_a_dead_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    writer = snapshot_files.SnapshotWriter(tmp_path)
    writer.append(memoryview(b"half of a snapshot"))
    talk = Talk(tmp_path)
    talk.say(prompt_of(1, 10))
    talk.end()
    assert len(list(tmp_path.iterdir())) == 2
    writer.discard()


def test_a_reader_keeps_its_blocks_when_a_writer_replaces_the_snapshot(tmp_path: Path) -> None:
    first = Talk(tmp_path)
    said = first.say(prompt_of(1, 40))
    first.end()
    reader = Talk(tmp_path)
    other = Talk(tmp_path, model="other")
    other.say(prompt_of(2, 10))
    other.end()
    reader.say([*said, 1])
    assert reader.computed() <= 2


# --- under way --------------------------------------------------------------------------------------------------------


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
