"""Exact and nearest look-up among the children of a node."""

from __future__ import annotations

import random
import time

from hypothesis import given
from hypothesis import strategies as st

from chatserve.cache.node import Node
from chatserve.cache.siblings import Siblings, num_common, pack, unpack

SHORT = st.lists(st.integers(0, 3), min_size=1, max_size=5)
TOKEN_IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def siblings_of(keys: list[bytes]) -> Siblings:
    siblings = Siblings()
    for key in keys:
        siblings.add(Node(None, key))
        siblings.check()
    return siblings


@given(TOKEN_IDS)
def test_packed_ids_come_back(token_ids: list[int]) -> None:
    assert unpack(pack(token_ids)) == token_ids


@given(TOKEN_IDS, TOKEN_IDS)
def test_packed_ids_compare_as_their_lists_do(one: list[int], other: list[int]) -> None:
    assert (pack(one) < pack(other)) == (one < other)


@given(st.lists(st.sampled_from([0, 1, 255, 256, 2**24, 2**32 - 1]), max_size=6), st.data())
def test_tokens_in_common_are_counted_from_the_first(one: list[int], data: st.DataObject) -> None:
    other = one[: data.draw(st.integers(0, 6))] + data.draw(st.lists(st.integers(0, 2**32 - 1), max_size=3))
    expected = 0
    while expected < min(len(one), len(other)) and one[expected] == other[expected]:
        expected += 1
    assert num_common(pack(one), pack(other)) == expected


@given(st.lists(SHORT, max_size=30, unique_by=tuple), SHORT)
def test_the_longest_common_beginning_is_a_neighbours(children: list[list[int]], wanted: list[int]) -> None:
    siblings = siblings_of([pack(child) for child in children])
    key = pack(wanted)
    near = max((num_common(node.key, key) for node in siblings.neighbours(key)), default=0)
    assert near == max((num_common(pack(child), key) for child in children), default=0)
    assert (siblings.find(key) is not None) == (wanted in children)


@given(st.lists(SHORT, min_size=1, max_size=20, unique_by=tuple), st.data())
def test_a_renamed_child_is_found_by_its_new_tokens_only(children: list[list[int]], data: st.DataObject) -> None:
    siblings = siblings_of([pack(child) for child in children])
    old, new = pack(data.draw(st.sampled_from(children))), pack(data.draw(SHORT))
    if siblings.find(new) is not None:
        return
    node = siblings.find(old)
    assert node is not None
    siblings.rename(node, new)
    siblings.check()
    assert siblings.find(new) is node
    assert siblings.find(old) is None
    siblings.remove(node)
    siblings.check()
    assert len(siblings) == len(children) - 1


def test_100_000_children_are_searched_in_microseconds() -> None:
    rng = random.Random(7)
    siblings = siblings_of([])
    for key in sorted(rng.randbytes(64) for _ in range(100_000)):
        siblings.add(Node(None, key))
    wanted = [rng.randbytes(64) for _ in range(1000)]
    start = time.process_time()
    for key in wanted:
        siblings.neighbours(key)
    # Two microseconds each where nothing disturbs; a walk over all would take a thousand times as long.
    assert time.process_time() - start < 0.2
