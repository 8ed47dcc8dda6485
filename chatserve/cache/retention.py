"""Which nodes must stay where they are, and which of the others may leave, in which order.

Owns the pins, the clock of use, and the lists of idle nodes that follow from both and from where a node's KV stands.
The tree says when that changes (`refresh`), and who makes room reads the lists. Moves and frees nothing.

A node is *idle* while nothing at or below it is pinned; `num_pins` counts its own pins and its pinned children, so that
pinning the end of a path whose beginning is already pinned costs what is new.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from chatserve.cache.evictor import HINTED, PREEMPTED, PROBATION, Evictor, host_lru, segmented_lru

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatserve.cache.node import Node


class Retention:
    """`root` is no node of its tree and stands on no list."""

    __slots__ = ("_clock", "_root", "device_leaves", "dirty", "host_leaves", "num_idle", "spare_copies")

    def __init__(self, root: Node) -> None:
        self._root = root
        self._clock = 0
        self.device_leaves = Evictor(segmented_lru)
        """Idle nodes on the device without a child there."""
        self.host_leaves = Evictor(host_lru)
        """Idle nodes on the host alone, without any child."""
        self.spare_copies: OrderedDict[Node, None] = OrderedDict()
        """Nodes on both tiers, in the order in which they came to be so."""
        self.dirty: OrderedDict[Node, None] = OrderedDict()
        """Idle nodes that are on the device alone, in the order in which they came to be so, ends of paths first; no
        drafts, which are not worth a copy.
        """
        self.num_idle = 0
        """Idle nodes on the device: each can be evicted, leaves first."""

    # --- pins ---------------------------------------------------------------------------------------------------------

    def pin(self, node: Node, *, used: bool = True) -> None:
        """Keep a node and all above it where they are. Without `used`, this is no reason to keep them longer later."""
        at: Node | None = node
        while at is not None:
            at.num_pins += 1
            if at.num_pins > 1:
                return
            # As `refresh`, but of a long path all nodes but the last are on none of the lists of leaves.
            if at.block_id is not None:
                self.num_idle -= 1
                self.dirty.pop(at, None)
                if not at.num_device_children:
                    self.device_leaves.discard(at)
            elif not at.children:
                self.host_leaves.discard(at)
            if used and at.standing == PREEMPTED:
                at.standing = PROBATION  # on none of the lists now
            at = at.parent

    def unpin(self, node: Node, *, used: bool = True) -> None:
        """Undo one `pin`. With `used`, the node counts as used now, and so does what is above it once it is idle."""
        if used:
            self._clock += 1
            node.last_used = self._clock
        last_used = node.last_used
        at: Node | None = node
        while at is not None:
            assert at.num_pins > 0, "unpinned more often than pinned"
            at.num_pins -= 1
            if at.num_pins:
                return
            at.last_used = last_used = max(at.last_used, last_used)
            if at.block_id is not None:
                self.num_idle += 1
                if at.host_block_id is None and at.standing != HINTED:
                    self.dirty[at] = None
                if not at.num_device_children:
                    self.device_leaves.add(at)
            elif at.host_block_id is not None and not at.children:
                self.host_leaves.add(at)
            at = at.parent

    def used_at(self, node: Node, last_used: int) -> None:
        """A node of an earlier life of the cache; whatever is used from now on counts as used later."""
        node.last_used = last_used
        self._clock = max(self._clock, last_used)

    # --- lists --------------------------------------------------------------------------------------------------------

    def placed(self, node: Node) -> None:
        """A node has come to the device."""
        self.num_idle += not node.num_pins
        self.refresh(node)
        assert node.parent is not None
        self.refresh(node.parent)

    def displaced(self, node: Node) -> None:
        """A node has left the device."""
        self.num_idle -= not node.num_pins
        self.refresh(node)
        assert node.parent is not None
        self.refresh(node.parent)

    def reorder(self, node: Node) -> None:
        """The node's standing has changed, and with it its turn."""
        for leaves in (self.device_leaves, self.host_leaves):
            if node in leaves:
                leaves.add(node)
        self.refresh(node)

    def refresh(self, node: Node) -> None:
        """Put a node on, or take it off, the lists that it now belongs to."""
        if node is self._root:
            return
        on_device, on_host, idle = node.block_id is not None, node.host_block_id is not None, not node.num_pins
        if on_device and idle and not node.num_device_children:
            if node not in self.device_leaves:
                self.device_leaves.add(node)
        else:
            self.device_leaves.discard(node)
        if on_host and idle and not on_device and not node.children:
            if node not in self.host_leaves:
                self.host_leaves.add(node)
        else:
            self.host_leaves.discard(node)
        if on_device and on_host:
            self.spare_copies[node] = None
        else:
            self.spare_copies.pop(node, None)
        if on_device and idle and not on_host and node.standing != HINTED:
            self.dirty.setdefault(node)
        else:
            self.dirty.pop(node, None)

    # --- invariants ---------------------------------------------------------------------------------------------------

    def check(self, nodes: Sequence[Node]) -> None:
        """Assert that the lists are those of `nodes`, all of the tree."""
        self.device_leaves.check()
        self.host_leaves.check()
        on_device = [node for node in nodes if node.block_id is not None]
        on_host = [node for node in nodes if node.host_block_id is not None]
        assert self.num_idle == sum(not node.num_pins for node in on_device)
        device_leaves = [node for node in on_device if not (node.num_pins or node.num_device_children)]
        host_leaves = [node for node in on_host if node.block_id is None and not node.num_pins and not node.children]
        for leaves, expected in ((self.device_leaves, device_leaves), (self.host_leaves, host_leaves)):
            assert len(leaves) == len(expected)
            assert all(node in leaves for node in expected)
        assert set(self.spare_copies) == {node for node in on_device if node.host_block_id is not None}
        dirty = {n for n in on_device if n.host_block_id is None and not n.num_pins and n.standing != HINTED}
        assert self.dirty.keys() == dirty, "a node that has to be copied out was missed, or is not one"
