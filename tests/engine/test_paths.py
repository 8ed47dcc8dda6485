"""The rope of token ids against plain lists."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chatserve.engine.paths import PathTable, UnknownPathError
from chatserve.types import UserId

ANN, BOB = UserId("ann"), UserId("bob")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_path_reads_back_as_it_was_written_as_long_as_it_is_known(data: st.DataObject) -> None:
    table = PathTable(max_tokens=data.draw(st.integers(1, 60)), max_paths=data.draw(st.integers(1, 20)))
    written: dict[int, list[int]] = {}
    for _ in range(data.draw(st.integers(1, 25))):
        known = [handle for handle in written if handle in table]
        base = data.draw(st.sampled_from([None, *known, *written])) if written else None
        inherited: list[int] = []
        if base is not None:
            inherited = written[base][: data.draw(st.integers(0, len(written[base])))]
        token_ids = inherited + data.draw(st.lists(st.integers(0, 9), max_size=12))
        handle = table.add(ANN, token_ids, base=base, num_inherited=len(inherited))
        written[handle] = token_ids
        if data.draw(st.integers(0, 4)) == 0:
            table.forget(data.draw(st.sampled_from(list(written))))
        table.check()
        for known_handle in [handle for handle in written if handle in table]:
            num_tokens = data.draw(st.integers(0, len(written[known_handle])))
            assert table.read(ANN, known_handle, num_tokens) == written[known_handle][:num_tokens]
    for handle in written:
        table.forget(handle)
    assert table.num_tokens == 0


def test_branches_share_what_they_have_in_common() -> None:
    table = PathTable()
    trunk = table.add(ANN, range(1000))
    for branch in range(10):
        table.add(ANN, [*range(1000), branch], base=trunk, num_inherited=1000)
    assert table.num_tokens == 1010


def test_the_least_recently_used_is_forgotten_first() -> None:
    table = PathTable(max_tokens=30)
    first, second = (table.add(ANN, range(n, n + 10)) for n in range(2))
    table.read(ANN, first, 10)
    table.add(ANN, range(2, 13))
    assert first in table
    assert second not in table


def test_paths_that_add_no_tokens_are_bounded_too() -> None:
    """A regenerated answer that is stopped before its first token continues its question by nothing."""
    table = PathTable(max_paths=10)
    question = table.add(ANN, range(5))
    for _ in range(100):
        table.read(ANN, question, 5)
        table.add(ANN, range(5), base=question, num_inherited=5)
        table.check()
    assert len(table) == 10
    assert question in table


def test_a_forgotten_parent_still_serves_its_children() -> None:
    table = PathTable()
    parent = table.add(ANN, range(10))
    child = table.add(ANN, range(20), base=parent, num_inherited=10)
    table.forget(parent)
    assert table.read(ANN, child, 20) == list(range(20))
    table.forget(child)
    assert table.num_tokens == 0


def test_nobody_reads_what_is_anothers_or_longer_than_it_is() -> None:
    table = PathTable()
    handle = table.add(ANN, range(10))
    for user, asked, num_tokens in ((BOB, handle, 5), (ANN, handle, 11), (ANN, handle, -1), (ANN, handle + 1, 0)):
        with pytest.raises(UnknownPathError):
            table.read(user, asked, num_tokens)


def test_a_conversation_of_many_turns_is_no_deeper_than_memory() -> None:
    table = PathTable()
    token_ids: list[int] = []
    handle = None
    for turn in range(3000):
        token_ids.append(turn % 7)
        handle = table.add(ANN, token_ids, base=handle, num_inherited=turn)
    assert handle is not None
    assert table.num_tokens == 3000
    assert table.read(ANN, handle, 3000) == token_ids
