"""The conversation tree: which message follows which, and which path through them is the active one.

A pure, synchronous structure over `MessageRecord`s whose parent pointers are the only truth; children, siblings and
paths are derived from them. A change is first planned (`append`, `select`, `delete`: nothing moves), so that the caller
can have it stored, and then applied. Knows nothing of stores, prompts or clients.

Invariants (`check`): parents exist and come before their children, users speak under nothing or under an assistant and
assistants under a user, and the active leaf is what one reaches by following each fork's chosen child from the top.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec

from chatserve.chat.store import MessageRecord
from chatserve.errors import BadParamsError, NotFoundError
from chatserve.types import MessageId

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

USER = "user"
ASSISTANT = "assistant"


class TreeChange(msgspec.Struct, frozen=True, kw_only=True):
    """What to store for one change: whole records to insert or replace, ids to remove, and the new active leaf."""

    puts: tuple[MessageRecord, ...] = ()
    deletes: tuple[MessageId, ...] = ()
    leaf: MessageId | None
    root_child: MessageId | None


class Tree:
    """One session's messages."""

    def __init__(
        self,
        messages: Iterable[MessageRecord] = (),
        *,
        leaf: MessageId | None = None,
        root_child: MessageId | None = None,
    ) -> None:
        """Take messages in creation order.

        Raises:
            BadParamsError: a parent is missing, comes later, or has the wrong role.
        """
        self._records: dict[MessageId, MessageRecord] = {}
        self._children: dict[MessageId | None, list[MessageId]] = {None: []}
        self.leaf = leaf
        self.root_child = root_child
        for record in messages:
            self._insert(record)

    def __contains__(self, message: object) -> bool:
        return message in self._records

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[MessageRecord]:
        """All messages in creation order, which puts parents before children."""
        return iter(self._records.values())

    # --- reading ------------------------------------------------------------------------------------------------------

    def get(self, message: MessageId) -> MessageRecord:
        """One message.

        Raises:
            NotFoundError: there is none of this id.
        """
        record = self._records.get(message)
        if record is None:
            raise NotFoundError("there is no such message in this session", message=message)
        return record

    def children(self, parent: MessageId | None) -> Sequence[MessageId]:
        """In creation order."""
        return self._children[parent]

    def chosen_child(self, parent: MessageId | None) -> MessageId | None:
        """The child that the active path takes here, if it comes by: the last chosen, the newest where none was."""
        explicit = self.root_child if parent is None else self._records[parent].child
        if explicit is not None:
            return explicit
        children = self._children[parent]
        return children[-1] if children else None

    def descend(self, message: MessageId | None) -> MessageId | None:
        """The end of the path that follows the chosen children from `message` on; None: an empty tree's."""
        while (below := self.chosen_child(message)) is not None:
            message = below
        return message

    def path(self, message: MessageId | None) -> list[MessageRecord]:
        """From the root to `message`, both included; empty for None."""
        found: list[MessageRecord] = []
        while message is not None:
            record = self.get(message)
            found.append(record)
            message = record.parent
        found.reverse()
        return found

    def subtree(self, message: MessageId) -> list[MessageId]:
        """`message` and all below it, parents first."""
        self.get(message)
        found = [message]
        for parent in found:  # grows as it goes
            found.extend(self._children[parent])
        return found

    # --- planning -----------------------------------------------------------------------------------------------------

    def append(self, *records: MessageRecord) -> TreeChange:
        """Add messages, each the child of the one before; the last becomes the active leaf.

        Raises:
            NotFoundError: the first one's parent does not exist.
            BadParamsError: its parent has the wrong role.
        """
        first = records[0]
        self._check_role(first)
        for above, below in pairwise(records):
            assert below.parent == above.message, "not a chain"
            assert below.role != above.role, "roles must alternate"
        assert all(r.message not in self._records for r in records), "ids are new"
        # Adding makes the newest child, so only a choice made earlier has to be changed here.
        return self._choose_path(first.message, first.parent, leaf=records[-1].message, puts=records)

    def select(self, message: MessageId) -> TreeChange:
        """Make the path through `message` the active one, and go on below it by each fork's chosen child.

        Raises:
            NotFoundError: there is no such message.
        """
        record = self.get(message)
        return self._choose_path(message, record.parent, leaf=self.descend(message), puts=())

    def delete(self, message: MessageId) -> TreeChange:
        """Remove a subtree. An active leaf in it moves to what its parent's remaining path ends in.

        Raises:
            NotFoundError: there is no such message.
        """
        record = self.get(message)
        gone = self.subtree(message)
        parent = record.parent
        root_child = None if self.root_child == message else self.root_child
        puts: tuple[MessageRecord, ...] = ()
        if parent is not None and self._records[parent].child == message:
            puts = (msgspec.structs.replace(self._records[parent], child=None),)
        leaf = self.leaf
        if leaf in set(gone):
            left = [child for child in self._children[parent] if child != message]
            # Had another child been chosen, the leaf would not be in here: what is left is the newest one.
            leaf = self.descend(left[-1]) if left else parent
        return TreeChange(puts=puts, deletes=tuple(gone), leaf=leaf, root_child=root_child)

    def replace(self, record: MessageRecord) -> TreeChange:
        """Store another version of a message that stays where it is."""
        assert self.get(record.message).parent == record.parent, "a message never moves"
        return TreeChange(puts=(record,), leaf=self.leaf, root_child=self.root_child)

    def fork(self, message: MessageId, new_id: Callable[[], MessageId]) -> list[MessageRecord]:
        """Copy the path from the root to `message` under new ids, for a session of its own. Token ids are kept.

        Raises:
            NotFoundError: there is no such message.
        """
        copies: list[MessageRecord] = []
        parent: MessageId | None = None
        for record in self.path(message):
            copies.append(msgspec.structs.replace(record, message=new_id(), parent=parent, child=None))
            parent = copies[-1].message
        return copies

    # --- applying -----------------------------------------------------------------------------------------------------

    def apply(self, change: TreeChange) -> None:
        """Make a planned change; no other one may have been applied in between."""
        gone = set(change.deletes)
        if gone:
            # Only the subtree's root hangs on a message that stays.
            siblings = self._children[self._records[change.deletes[0]].parent]
            siblings.remove(change.deletes[0])
            for message in change.deletes:
                del self._records[message]
                del self._children[message]
        for record in change.puts:
            if record.message in self._records:
                self._records[record.message] = record
            else:
                self._insert(record)
        self.leaf = change.leaf
        self.root_child = change.root_child

    def check(self) -> None:
        """Assert the invariants in the module's docstring."""
        seen: set[MessageId] = set()
        for message, record in self._records.items():
            assert record.message == message
            assert record.parent is None or record.parent in seen, "a parent comes first"
            assert message in self._children[record.parent]
            assert record.child is None or record.child in self._children[message], "the chosen child is a child"
            expected = USER if record.parent is None else _other(self._records[record.parent].role)
            assert record.role == expected
            seen.add(message)
        assert sum(map(len, self._children.values())) == len(self._records)
        assert set(self._children) == {None, *self._records}
        assert self.root_child is None or self.root_child in self._children[None]
        assert self.leaf == self.descend(None), "the active leaf ends the chosen path"

    # --- inside -------------------------------------------------------------------------------------------------------

    def _insert(self, record: MessageRecord) -> None:
        self._check_role(record)
        self._records[record.message] = record
        self._children[record.parent].append(record.message)
        self._children[record.message] = []

    def _check_role(self, record: MessageRecord) -> None:
        above = None if record.parent is None else self.get(record.parent).role
        if record.role != (USER if above is None else _other(above)):
            raise BadParamsError(
                f"a message of role {record.role} cannot follow {f'one of role {above}' if above else 'nothing'}",
                message=record.message,
            )

    def _choose_path(
        self,
        message: MessageId,
        parent: MessageId | None,
        *,
        leaf: MessageId | None,
        puts: Sequence[MessageRecord],
    ) -> TreeChange:
        """Have every fork above `message` choose the way to it; forks elsewhere keep their choice."""
        chosen: list[MessageRecord] = []
        child = message
        is_new = message not in self._records
        while parent is not None:
            record = self._records[parent]
            unchanged = record.child is None if is_new else self.chosen_child(parent) == child
            if not unchanged:
                chosen.append(msgspec.structs.replace(record, child=child))
            child, parent, is_new = parent, record.parent, False
        root_child = self.root_child
        if not (root_child is None if is_new else self.chosen_child(None) == child):
            root_child = child
        return TreeChange(puts=(*puts, *chosen), leaf=leaf, root_child=root_child)


def order_by_parents(parents: Mapping[str, str | None]) -> list[str]:
    """Order foreign ids so that parents come before children; otherwise in the given order.

    Raises:
        BadParamsError: a parent is missing, or parents form a cycle.
    """
    ordered: list[str] = []
    done: set[str] = set()
    for start in parents:
        climb: list[str] = []
        on_climb: set[str] = set()
        at: str | None = start
        while at is not None and at not in done:
            if at in on_climb:
                raise BadParamsError("the messages' parents form a cycle", message=at)
            if at not in parents:
                raise BadParamsError("a message names a parent that is not there", message=climb[-1])
            climb.append(at)
            on_climb.add(at)
            at = parents[at]
        ordered.extend(reversed(climb))
        done.update(climb)
    return ordered


def _other(role: str) -> str:
    return ASSISTANT if role == USER else USER
