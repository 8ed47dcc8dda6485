"""What tests of snapshots begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.talk import BOB, SYSTEM, Talk, make_runner, prompt_of


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    directory = tmp_path_factory.mktemp("saved")
    talk = Talk(directory, make_runner(20, 64))
    said = [talk.say([*SYSTEM, *prompt_of(seed, 15)], shared=len(SYSTEM)) for seed in range(3)]
    said.append(talk.say([*said[0][:27], 9, 9, 9], BOB, shared=len(SYSTEM)))
    talk.end()
    return directory, said
