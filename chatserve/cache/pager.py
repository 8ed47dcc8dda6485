"""Room on the device: which blocks can be had, and what leaves for them.

Every idle block can be had, one leaf after the other: it moves to the host, or is forgotten where the host has no
place. What is planned ahead of need (hints, frozen ends of shared prefixes) is taken back before a request goes
without.
"""

from __future__ import annotations

from chatserve.cache.block_pool import BlockPool
from chatserve.cache.block_tree import BlockTree
from chatserve.cache.host_pool import HostPool
from chatserve.cache.node import Node
from chatserve.cache.transfers import TransferBook
from chatserve.types import BlockId


class Pager:
    """Moves idle nodes between the tiers and out of the tree. Who pins what is others' business."""

    __slots__ = ("_ahead", "_device", "_host", "_transfers", "_tree", "num_dropped")

    def __init__(self, tree: BlockTree, device: BlockPool[BlockId], host: HostPool, transfers: TransferBook) -> None:
        self._tree = tree
        self._device = device
        self._host = host
        self._transfers = transfers
        self._ahead: list[Node] = []
        """Nodes planned ahead of need whose copies may not have been handed out yet, parents first."""
        self.num_dropped = 0
        """Nodes forgotten because they had no place on the host."""

    # --- getting blocks -----------------------------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Blocks that are free or that eviction can free."""
        return self._device.num_free + self._tree.num_idle

    def can_acquire(self, num_blocks: int) -> bool:
        """Whether so many can be had. Takes back what was planned ahead if that decides it."""
        if num_blocks > self.num_available:
            self.take_back()
        return num_blocks <= self.num_available

    def acquire(self, num_blocks: int) -> list[BlockId]:
        """Private blocks, known to be available. The coldest leaves leave for them."""
        while self._device.num_free < num_blocks:
            victim = self.victim()
            assert victim is not None, "fewer blocks than were counted as available"
            if not self._leave_device(victim):
                self.num_dropped += self.forget_all(victim)
        return [self._device.acquire() for _ in range(num_blocks)]

    def victim(self) -> Node | None:
        """The leaf that goes next. What is shared is protected as long as it fits half the pool."""
        protect = self._tree.num_protected <= self._device.num_blocks // 2
        return self._tree.device_leaves.victim(protect=protect)

    # --- ahead of need ------------------------------------------------------------------------------------------------

    def reclaim(self, low: int, high: int) -> None:
        """Below `low` free blocks, move cold leaves to the host until `high` are free. It drops nothing."""
        if self._device.num_free_soon >= low:
            return
        while self._device.num_free_soon < high:
            victim = self.victim()
            if victim is None or not self._leave_device(victim):
                return

    def bring_back(self, node: Node) -> None:
        """Swap a node in while a block is free, because it is likely to be wanted."""
        self._transfers.swap_in(node, self._device.acquire())
        self._ahead.append(node)

    def plan_ahead(self, node: Node) -> None:
        """A node that only a planned copy fills can be given up until that is handed out."""
        self._ahead.append(node)

    def take_back(self) -> bool:
        """Give up what was planned ahead and that nothing else has come to pin. True if that made room."""
        made_room = False
        for node in reversed(self._ahead):
            if node.num_pins != 1 or node.block_id is None or not self._transfers.abandon(node.block_id):
                continue
            if node.host_block_id is None:
                self.forget(node)
            else:
                self._device.release(self._tree.displace(node))
            made_room = True
        self._ahead.clear()
        return made_room

    def close_step(self) -> None:
        """The planned copies are handed out: what they fill is there to stay."""
        self._ahead.clear()

    # --- letting go ---------------------------------------------------------------------------------------------------

    def forget(self, node: Node) -> None:
        """Free an idle, childless node on both tiers."""
        if node.block_id is not None:
            self._device.release(self._tree.displace(node))
        self.drop_host_copy(node)
        self._tree.remove(node)

    def forget_all(self, node: Node) -> int:
        """Forget an idle node and, since a parent outlives its children, all below it. How many that were."""
        below = [node]
        for parent in below:
            below.extend(parent.children or ())
        for each in reversed(below):
            self.forget(each)
        return len(below)

    def drop_host_copy(self, node: Node) -> None:
        if node.host_block_id is not None:
            self._host.release(self._tree.displace_from_host(node))

    def _leave_device(self, node: Node) -> bool:
        """Move an idle leaf to the host alone; False if it has no place there."""
        if node.host_block_id is not None:
            self._device.release(self._tree.displace(node))
            return True
        host_block_id = self._host.acquire_for(node, self._tree)
        if host_block_id is None:
            return False
        self._transfers.swap_out(node, host_block_id)
        return True
