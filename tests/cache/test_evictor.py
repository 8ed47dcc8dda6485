"""Which idle leaf goes next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from chatserve.cache.evictor import HINTED, PREEMPTED, PROBATION, PROTECTED, Evictor, host_lru, segmented_lru
from chatserve.cache.node import Node


def leaf(standing: int, last_used: int) -> Node:
    node = Node(None, b"")
    node.standing, node.last_used = standing, last_used
    return node


def order_of(evictor: Evictor, *, protect: bool) -> list[tuple[int, int]]:
    order = []
    while (node := evictor.victim(protect=protect)) is not None:
        order.append((node.standing, node.last_used))
        evictor.discard(node)
        evictor.check()
    return order


LEAVES = st.lists(
    st.tuples(st.sampled_from([HINTED, PREEMPTED, PROBATION, PROTECTED]), st.integers(0, 99)), max_size=30
)


@given(LEAVES)
def test_what_several_paths_share_goes_last(leaves: list[tuple[int, int]]) -> None:
    evictor = Evictor(segmented_lru)
    for standing, last_used in leaves:
        evictor.add(leaf(standing, last_used))
    assert order_of(evictor, protect=True) == sorted(leaves)


@given(LEAVES)
def test_past_its_share_the_protected_kind_goes_by_age(leaves: list[tuple[int, int]]) -> None:
    evictor = Evictor(segmented_lru)
    for standing, last_used in leaves:
        evictor.add(leaf(standing, last_used))
    order = order_of(evictor, protect=False)
    first = sorted(each for each in leaves if each[0] in (HINTED, PREEMPTED))
    assert order[: len(first)] == first
    assert [age for _, age in order[len(first) :]] == sorted(a for kind, a in leaves if kind in (PROBATION, PROTECTED))


def test_on_the_host_a_preempted_request_is_like_any_other() -> None:
    evictor = Evictor(host_lru)
    evictor.add(leaf(PREEMPTED, 5))
    evictor.add(leaf(PROBATION, 4))
    assert order_of(evictor, protect=True) == [(PROBATION, 4), (PREEMPTED, 5)]


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(0, 9)), max_size=200))
def test_the_victim_is_the_least_key_whatever_came_and_went(changes: list[tuple[int, bool, int]]) -> None:
    nodes = [leaf(PROBATION, 0) for _ in range(6)]
    evictor = Evictor(segmented_lru)
    members: set[Node] = set()
    for index, joins, last_used in changes:
        node = nodes[index]
        if joins:
            node.last_used = last_used
            evictor.add(node)
            members.add(node)
        else:
            evictor.discard(node)
            members.discard(node)
        evictor.check()
        assert len(evictor) == len(members)
        victim = evictor.victim(protect=True)
        assert (victim is None) == (not members)
        if victim is not None:
            assert victim in members
            assert victim.last_used == min(node.last_used for node in members)


def test_leaves_that_come_and_go_leave_no_memory_behind() -> None:
    evictor = Evictor(segmented_lru)
    node = leaf(PROBATION, 0)
    for _ in range(10_000):
        evictor.add(node)
        evictor.discard(node)
    assert sum(len(heap) for heap in evictor._heaps) < 200
