"""The second tier: blocks of host memory, and what makes room there.

A host block belongs to one node of the tree. It may be the node's only copy, or a spare one, when the node has been
brought back to the device and has not changed since. A block given up here while a copy reads or writes it is not
reused by the same step, for a step makes its copies out before its copies in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatserve.cache.block_pool import BlockPool
from chatserve.cache.evictor import host_lru
from chatserve.types import HostBlockId

if TYPE_CHECKING:
    from chatserve.cache.block_tree import BlockTree
    from chatserve.cache.node import Node


class HostPool(BlockPool[HostBlockId]):
    """When it is full, a spare copy goes first, for it loses nothing; then the least recently used leaf."""

    __slots__ = ("num_dropped",)

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.num_dropped = 0
        """Nodes forgotten to make room."""

    def acquire_for(self, newcomer: Node, tree: BlockTree) -> HostBlockId | None:
        """A block for a node that leaves the device; None where all that could go is worth more than the newcomer."""
        if not self.num_free:
            self._make_room(newcomer, tree)
        if not self.num_free:
            return None
        host_block_id = self.acquire()
        self.cache(host_block_id)
        return host_block_id

    def _make_room(self, newcomer: Node, tree: BlockTree) -> None:
        spare = next(iter(tree.retention.spare_copies), None)
        if spare is not None and self._can_go(spare):
            self.release(tree.displace_from_host(spare))
            return
        protect = tree.num_protected_on_host <= self.num_blocks // 2
        leaf = tree.retention.host_leaves.victim(protect=protect)
        if leaf is None or not self._can_go(leaf):
            return
        if host_lru(newcomer) < host_lru(leaf) if protect else newcomer.last_used < leaf.last_used:
            return
        self.release(tree.displace_from_host(leaf))
        tree.remove(leaf)
        self.num_dropped += 1

    def _can_go(self, node: Node) -> bool:
        """Giving up a block in the middle of a copy would make no room yet."""
        return node.host_block_id is not None and not self.is_held(node.host_block_id)
