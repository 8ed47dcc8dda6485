"""Every cached block by the tokens that led to it.

One node a block. A node's identity is its parent, its scope and its token ids, so a path from the root spells a
sequence and says where its KV stands: on the device, on the host, or both. The tree owns its nodes and what each is
worth; `retention` says who of them must stay. It neither frees nor copies blocks, and does not know requests.

Words: a node is *full* (`block_size` tokens; sealed, never changed again, may have children) or a *tail* (fewer; no
children; only its writer may extend it). A *frozen* tail is public and has no writer.

What holds on the device holds from the root down: a child on the device has its parent on the device.
"""

from __future__ import annotations

from collections.abc import Iterator

from chatserve.cache.evictor import HINTED, PROBATION, PROTECTED
from chatserve.cache.node import Node
from chatserve.cache.retention import Retention
from chatserve.cache.scopes import PUBLIC_TAG, ScopeTags
from chatserve.cache.siblings import TOKEN_BYTES, Siblings
from chatserve.types import BlockId, HostBlockId


class BlockTree:
    """Nodes under a root that is none of them; `search` reads it."""

    __slots__ = (
        "block_size",
        "num_protected",
        "num_protected_on_host",
        "num_unused_slots",
        "retention",
        "root",
        "tags",
        "unread",
    )

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.root = Node(None, PUBLIC_TAG)
        self.retention = Retention(self.root)
        """Told of every change here that concerns it; pins are for whoever needs a node to stay."""
        self.unread: dict[Node, tuple[int, int]] = {}
        """Nodes whose host block has still to be filled from a snapshot: the block's index there and its checksum."""
        self.num_protected = 0
        """Protected nodes on the device."""
        self.num_protected_on_host = 0
        self.num_unused_slots = 0
        """Token slots in device blocks past the end of their tail."""
        self.tags = ScopeTags()
        """Each node uses its scope's tag."""

    def walk(self) -> Iterator[Node]:
        """Every node but the root, parents first."""
        stack = [self.root]
        while stack:
            node = stack.pop()
            if node is not self.root:
                yield node
            stack.extend(node.children or ())

    # --- identity -----------------------------------------------------------------------------------------------------

    def insert(self, parent: Node, key: bytes, block_id: BlockId, *, pinned: bool = False) -> Node:
        """A new node on the device, which is pinned once if so asked."""
        node = self._add(parent, key)
        if pinned:
            node.num_pins = 1
            self.retention.pin(parent)
        self.place(node, block_id)
        return node

    def insert_unread(
        self, parent: Node, key: bytes, host_block_id: HostBlockId, place: tuple[int, int], *, last_used: int
    ) -> Node:
        """A new node on the host whose bytes have still to be read from `place`. Newer ones count as used later."""
        node = self._add(parent, key)
        self.retention.used_at(node, last_used)
        self.unread[node] = place
        self.mark_branch(parent)
        self.place_on_host(node, host_block_id)
        self.retention.refresh(parent)
        return node

    def _add(self, parent: Node, key: bytes) -> Node:
        node = Node(parent, key)
        if parent.children is None:
            parent.children = Siblings()
        parent.children.add(node)
        self.tags.hold(node.tag)
        return node

    def rename(self, node: Node, key: bytes) -> None:
        """A tail grows, becomes full, or is cut. It must not be on the host: that copy would be stale."""
        assert node.parent is not None and node.parent.children is not None  # noqa: PT018
        assert node.num_tokens < self.block_size, "a sealed block never changes"
        assert node.host_block_id is None, "a copy on the host would be stale"
        if node.block_id is not None:
            self.num_unused_slots -= (len(key) - len(node.key)) // TOKEN_BYTES
        node.parent.children.rename(node, key)

    def remove(self, node: Node) -> None:
        """Take out a childless node that is on neither tier. `unpin` gives back the pins that it still has."""
        assert node.parent is not None and node.parent.children is not None  # noqa: PT018
        assert not node.children, "a parent outlives its children"
        assert not self.is_attached(node), "its blocks have not been taken back"
        node.parent.children.remove(node)
        if not node.parent.children:
            node.parent.children = None
        self.tags.release(node.tag)
        self.retention.refresh(node.parent)

    @staticmethod
    def is_attached(node: Node) -> bool:
        return node.block_id is not None or node.host_block_id is not None

    # --- residency ----------------------------------------------------------------------------------------------------

    def place(self, node: Node, block_id: BlockId) -> None:
        """The node's KV stands (or will, once the planned copy has run) in a device block."""
        parent = node.parent
        assert parent is not None and node.block_id is None  # noqa: PT018
        assert parent is self.root or parent.block_id is not None, "its parent is not on the device"
        node.block_id = block_id
        parent.num_device_children += 1
        self.num_protected += node.standing == PROTECTED
        self.num_unused_slots += self.block_size - node.num_tokens
        self.retention.placed(node)

    def displace(self, node: Node) -> BlockId:
        """Take the device block from a node; it is the caller's now."""
        parent, block_id = node.parent, node.block_id
        assert parent is not None and block_id is not None  # noqa: PT018
        assert not node.num_device_children, "a child on the device needs its parent there"
        node.block_id = None
        parent.num_device_children -= 1
        self.num_protected -= node.standing == PROTECTED
        self.num_unused_slots -= self.block_size - node.num_tokens
        self.retention.displaced(node)
        return block_id

    def place_on_host(self, node: Node, host_block_id: HostBlockId) -> None:
        assert node.host_block_id is None
        node.host_block_id = host_block_id
        self.num_protected_on_host += node.standing == PROTECTED
        self.retention.refresh(node)

    def displace_from_host(self, node: Node) -> HostBlockId:
        host_block_id = node.host_block_id
        assert host_block_id is not None
        node.host_block_id = None
        self.unread.pop(node, None)
        self.num_protected_on_host -= node.standing == PROTECTED
        self.retention.refresh(node)
        return host_block_id

    # --- standing -----------------------------------------------------------------------------------------------------

    def mark_branch(self, parent: Node) -> None:
        """A path goes on below `parent`. If one did before, `parent` and all above it are shared: protect them."""
        if parent.had_child:
            self.protect(parent)
        parent.had_child = True

    def protect(self, node: Node) -> None:
        above: Node | None = node
        while above is not None and above is not self.root and above.standing != PROTECTED:
            self._set_standing(above, PROTECTED)
            above = above.parent

    def demote(self, node: Node, standing: int) -> None:
        """A node that one path alone has used goes first: `PREEMPTED` or `HINTED`."""
        if node.standing == PROBATION:
            self._set_standing(node, standing)

    @staticmethod
    def leads_on(node: Node) -> bool:
        """Whether a path that is no draft's goes on below the node."""
        return any(child.standing != HINTED for child in node.children or ())

    def adopt(self, node: Node) -> None:
        """A request goes on from what was computed for a draft: down to `node` it is a path like others."""
        at: Node | None = node
        while at is not None and at.standing == HINTED:
            self._set_standing(at, PROBATION)
            assert at.parent is not None
            self.mark_branch(at.parent)
            at = at.parent

    def _set_standing(self, node: Node, standing: int) -> None:
        change = (standing == PROTECTED) - (node.standing == PROTECTED)
        self.num_protected += change * (node.block_id is not None)
        self.num_protected_on_host += change * (node.host_block_id is not None)
        node.standing = standing
        self.retention.reorder(node)

    # --- invariants ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        nodes = list(self.walk())
        for node in nodes:
            self._check_node(node)
        self.retention.check(nodes)
        on_device = [node for node in nodes if node.block_id is not None]
        assert self.num_protected == sum(node.standing == PROTECTED for node in on_device)
        assert self.num_unused_slots == sum(self.block_size - node.num_tokens for node in on_device)
        on_host = [node for node in nodes if node.host_block_id is not None]
        assert self.num_protected_on_host == sum(node.standing == PROTECTED for node in on_host)
        for node in self.unread:
            assert node.host_block_id is not None, "a block that is to be read has no place"
            assert node.block_id is None, "on the device, and its copy on the host has still to be read"
            assert not node.num_pins, "in use before it was read"
        assert self.unread.keys() <= set(on_host), "a removed node is to be read"
        for ids in ([n.block_id for n in on_device], [n.host_block_id for n in on_host]):
            assert len(set(ids)) == len(ids), "two nodes have the same block"

    def _check_node(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        assert self.is_attached(node), "a node without a block"
        assert 1 <= node.num_tokens <= self.block_size
        assert parent is self.root or parent.num_tokens == self.block_size, "a tail has children"
        assert node.tag == parent.tag or parent.is_public, "a child's scope is wider than its parent's"
        if node.block_id is not None and parent is not self.root:
            assert parent.block_id is not None, "on the device under a parent that is not"
        if node.num_pins and parent is not self.root:
            assert parent.num_pins > 0, "a pinned child under an idle parent"
        children = list(node.children or ())
        assert node.children is None or children, "an empty list of children was kept"
        assert node.num_device_children == sum(child.block_id is not None for child in children)
        assert node.num_pins >= sum(child.num_pins > 0 for child in children)
        if node.children is not None:
            node.children.check()
        if parent.standing == HINTED:
            assert node.standing == HINTED, "a path goes on from a draft that nobody has adopted"
        if node.has_writer:
            assert node.num_tokens < self.block_size, "a sealed block has a writer"
            assert node.num_pins > 0, "a writer that does not pin its tail"
            assert node.block_id is not None
