"""The conversation tree keeps its invariants under every sequence of changes."""

from __future__ import annotations

import itertools
import sys

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chatserve.chat.store import MessageRecord
from chatserve.chat.tree import ASSISTANT, USER, Tree, order_by_parents
from chatserve.errors import BadParamsError, NotFoundError
from chatserve.types import MessageId


def record(name: str, parent: str | None, role: str) -> MessageRecord:
    return MessageRecord(
        message=MessageId(name),
        parent=None if parent is None else MessageId(parent),
        role=role,
        text=f"text of {name}",
        status="done",
        created_at=0.0,
        token_ids=(len(name),),
    )


def tree_of(*edges: str) -> Tree:
    """`"u0"` is a root, `"u0>a1"` a child; roles by first letter. Each becomes the leaf in turn."""
    tree = Tree()
    for edge in edges:
        parent, _, name = edge.rpartition(">")
        tree.apply(tree.append(record(name, parent or None, USER if name[0] == "u" else ASSISTANT)))
        tree.check()
    return tree


class TreeMachine(RuleBasedStateMachine):
    """Random appends, selections, deletions and forks, beside a model of plain dictionaries."""

    @initialize()
    def begin(self) -> None:
        self.tree = Tree()
        self.parents: dict[str, str | None] = {}
        self.chosen: dict[str | None, str] = {}
        self.numbers = itertools.count()

    def children(self, parent: str | None) -> list[str]:
        return [m for m, p in self.parents.items() if p == parent]

    def end_of_path(self, message: str | None) -> str | None:
        while below := self.children(message):
            message = self.chosen[message] if self.chosen.get(message) in below else below[-1]
        return message

    def choose(self, message: str) -> None:
        at: str | None = message
        while at is not None:
            self.chosen[self.parents[at]] = at
            at = self.parents[at]

    @rule(pick=st.integers(min_value=0), with_reply=st.booleans())
    def append(self, pick: int, with_reply: bool) -> None:
        places = [None, *self.parents]
        parent = places[pick % len(places)]
        role = USER if parent is None or parent[0] == "a" else ASSISTANT
        name = f"{role[0]}{next(self.numbers)}"
        new = [record(name, parent, role)]
        if with_reply:
            role = ASSISTANT if role == USER else USER
            new.append(record(f"{role[0]}{next(self.numbers)}", name, role))
        self.tree.apply(self.tree.append(*new))
        for one in new:
            self.parents[one.message] = one.parent
        self.choose(new[-1].message)
        assert self.tree.leaf == new[-1].message

    @precondition(lambda self: self.parents)
    @rule(pick=st.integers(min_value=0))
    def select(self, pick: int) -> None:
        message = list(self.parents)[pick % len(self.parents)]
        before = {m: self.tree.chosen_child(MessageId(m)) for m in self.parents}
        self.tree.apply(self.tree.select(MessageId(message)))
        self.choose(message)
        assert self.tree.leaf == self.end_of_path(message)
        on_path = {m.message for m in self.tree.path(MessageId(message))}
        for fork, choice in before.items():
            if fork not in on_path or fork == message:
                assert self.tree.chosen_child(MessageId(fork)) == choice, "other forks keep their choice"

    @precondition(lambda self: self.parents)
    @rule(pick=st.integers(min_value=0))
    def delete(self, pick: int) -> None:
        message = list(self.parents)[pick % len(self.parents)]
        parent, leaf = self.parents[message], self.tree.leaf
        change = self.tree.delete(MessageId(message))
        self.tree.apply(change)
        for gone in change.deletes:
            del self.parents[gone]
            self.chosen.pop(gone, None)
        if self.chosen.get(parent) == message:
            del self.chosen[parent]
        if leaf in change.deletes:
            assert self.tree.leaf == self.end_of_path(parent), "the parent's remaining path"
        else:
            assert self.tree.leaf == leaf

    @precondition(lambda self: self.parents)
    @rule(pick=st.integers(min_value=0))
    def fork(self, pick: int) -> None:
        message = MessageId(list(self.parents)[pick % len(self.parents)])
        ids = (MessageId(f"copy{n}") for n in itertools.count())
        copies = self.tree.fork(message, lambda: next(ids))
        path = self.tree.path(message)
        assert [(c.role, c.text, c.token_ids) for c in copies] == [(m.role, m.text, m.token_ids) for m in path]
        copy = Tree(copies, leaf=copies[-1].message)
        copy.check()
        assert len(copy) == len(path)

    @invariant()
    def whole(self) -> None:
        self.tree.check()
        assert {m.message: m.parent for m in self.tree} == self.parents
        for parent in [None, *self.parents]:
            assert list(self.tree.children(parent)) == self.children(parent), "siblings by creation"
        again = Tree(list(self.tree), leaf=self.tree.leaf, root_child=self.tree.root_child)
        again.check()


TestTree = TreeMachine.TestCase
TestTree.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


def test_planning_changes_nothing_until_it_is_applied() -> None:
    tree = tree_of("u0", "u0>a1", "u0>a2", "a2>u3")
    before = (list(tree), tree.leaf, tree.root_child)
    tree.append(record("u9", "a1", USER))
    tree.select(MessageId("a1"))
    tree.delete(MessageId("a2"))
    assert (list(tree), tree.leaf, tree.root_child) == before


def test_a_regenerated_answer_leaves_the_choice_below_other_answers_alone() -> None:
    tree = tree_of("u0", "u0>a1", "a1>u2", "u2>a3", "a1>u4", "u4>a5")
    tree.apply(tree.select(MessageId("u2")))
    tree.apply(tree.append(record("a6", "u0", ASSISTANT)))
    assert tree.leaf == "a6"
    tree.apply(tree.select(MessageId("a1")))
    assert tree.leaf == "a3", "the fork below keeps its last choice"


@pytest.mark.parametrize(("parent", "role"), [(None, ASSISTANT), ("u0", USER), ("a1", ASSISTANT)])
def test_roles_alternate(parent: str | None, role: str) -> None:
    tree = tree_of("u0", "u0>a1")
    with pytest.raises(BadParamsError, match="cannot follow"):
        tree.append(record("x", parent, role))


def test_what_is_not_there_is_not_found() -> None:
    tree = tree_of("u0")
    nobody = MessageId("nobody")
    for ask in (tree.get, tree.select, tree.delete, tree.subtree, tree.path):
        with pytest.raises(NotFoundError):
            ask(nobody)


def test_a_replaced_message_keeps_its_place() -> None:
    tree = tree_of("u0", "u0>a1", "u0>a2")
    changed = msgspec.structs.replace(tree.get(MessageId("a1")), text="new")
    tree.apply(tree.replace(changed))
    tree.check()
    assert [m.message for m in tree] == ["u0", "a1", "a2"]
    assert tree.get(MessageId("a1")).text == "new"


def test_a_path_longer_than_the_recursion_limit_is_walked() -> None:
    depth = sys.getrecursionlimit() * 3
    edges = (("u" if n % 2 == 0 else "a") + str(n) for n in range(depth))
    records, parent = [], None
    for name in edges:
        records.append(record(name, parent, USER if name[0] == "u" else ASSISTANT))
        parent = name
    tree = Tree(records, leaf=MessageId(records[-1].message))
    tree.check()
    assert len(tree.path(tree.leaf)) == len(tree.subtree(records[0].message)) == depth
    assert len(order_by_parents({m.message: m.parent for m in reversed(records)})) == depth


@pytest.mark.parametrize(
    ("parents", "why"),
    [
        ({"a": "b", "b": "a"}, "cycle"),
        ({"a": "a"}, "cycle"),
        ({"r": None, "x": "r", "a": "c", "b": "a", "c": "b"}, "cycle"),
        ({"a": "gone"}, "not there"),
    ],
)
def test_parents_that_form_no_tree_are_refused(parents: dict[str, str | None], why: str) -> None:
    with pytest.raises(BadParamsError, match=why):
        order_by_parents(parents)
