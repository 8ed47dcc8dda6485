"""Whatever became of a snapshot's files, never a wrong text; and a line that says what is not used."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chatserve.cache import snapshot_files
from chatserve.cache.snapshot import Manifest, encode_manifest
from tests.engine.talk import ANN, BOB, SYSTEM, Talk, manifest_of, prompt_of, warnings_of
from tests.fakes.fake_runner import FakeRunner


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


@pytest.mark.parametrize("put", [os.mkfifo, os.mkdir, lambda path: path.symlink_to("/dev/zero")])
@pytest.mark.parametrize("which", ["manifest", "*.blocks"])
def test_what_is_no_file_is_neither_waited_for_nor_read(
    which: str, put: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = Talk(tmp_path)
    said = before.say(prompt_of(1, 40))
    before.end()
    (file,) = tmp_path.glob(which)
    file.unlink()
    put(file)
    after = Talk(tmp_path)
    after.say([*said, 1])
    assert after.computed() == len(said) + 1
    assert f"{file.name} is no file" in warnings_of(caplog)[0]
    after.end()


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
