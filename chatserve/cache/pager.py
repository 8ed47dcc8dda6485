"""Room on the device: which blocks can be had, and what leaves for them.

Every idle block can be had, one leaf after the other: it moves to the host, or is forgotten where the host has no
place. What is planned ahead of need (hints, frozen ends of shared prefixes) is taken back before a request goes
without.
"""

from __future__ import annotations

from typing import Final

from chatserve.cache.block_pool import BlockPool
from chatserve.cache.block_tree import BlockTree
from chatserve.cache.evictor import HINTED
from chatserve.cache.host_pool import HostPool
from chatserve.cache.node import Node
from chatserve.cache.transfers import TransferBook
from chatserve.types import BlockId

_LEAST_WRITING: Final = 32
_BLOCKS_AT_ONCE: Final = 64
"""Blocks that are dealt with ahead of need each step."""


class Pager:
    """Moves idle nodes between the tiers and out of the tree. Who pins what is others' business."""

    __slots__ = ("_ahead", "_device", "_host", "_max_writing", "_transfers", "_tree", "num_dropped")

    def __init__(self, tree: BlockTree, device: BlockPool[BlockId], host: HostPool, transfers: TransferBook) -> None:
        self._tree = tree
        self._device = device
        self._host = host
        self._transfers = transfers
        self._ahead: list[Node] = []
        """Nodes planned ahead of need whose copies may not have been handed out yet, parents first."""
        self._max_writing = max(_LEAST_WRITING, device.num_blocks // 64)
        """Blocks that may be on their way to the host ahead of need. They cannot be had until they are there."""
        self.num_dropped = 0
        """Nodes forgotten because they had no place on the host."""

    # --- getting blocks -----------------------------------------------------------------------------------------------

    @property
    def num_available(self) -> int:
        """Blocks that are free or that eviction can free."""
        return self._device.num_free + self._tree.retention.num_idle

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
            if victim.standing == HINTED or not self._leave_device(victim):
                self.num_dropped += self.forget_all(victim)
        return [self._device.acquire() for _ in range(num_blocks)]

    def victim(self) -> Node | None:
        """The leaf that goes next. What is shared is protected as long as it fits half the pool."""
        protect = self._tree.num_protected <= self._device.num_blocks // 2
        return self._tree.retention.device_leaves.victim(protect=protect)

    # --- ahead of need ------------------------------------------------------------------------------------------------

    def reclaim(self, low: int, high: int) -> None:
        """Below `low` free blocks, see to it that `high` become free: cold leaves that have a copy on the host leave
        the device, others are given one first. It drops nothing but drafts, and does a little at a time, so that no
        step waits for the making of lists.
        """
        if self._device.num_free_soon >= low:
            return
        budget = _BLOCKS_AT_ONCE
        while (num_missing := min(budget, high - self._device.num_free_soon)) > 0:
            victim = self.victim()
            if victim is None:
                return
            if victim.standing == HINTED:
                self.num_dropped += self.forget_all(victim)
                budget -= 1
            elif victim.host_block_id is not None:
                self._device.release(self._tree.displace(victim))
                budget -= 1
            else:
                num_written = self._write_through(victim, num_missing - self._transfers.num_writing_through)
                if not num_written:
                    return
                budget -= num_written

    def write_idle_through(self) -> None:
        """Copy what is idle out while the host has free blocks, so that it can leave the device later at no cost."""
        budget = _BLOCKS_AT_ONCE
        while (num_blocks := min(budget, self._host.num_free)) and self._tree.retention.dirty:
            num_written = self._write_through(next(iter(self._tree.retention.dirty)), num_blocks)
            if not num_written:
                return
            budget -= num_written

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

    def _write_through(self, end: Node, num_blocks: int) -> int:
        """Copy out up to so many nodes of the path that leads to `end`, its end first. How many it were."""
        num_blocks = min(num_blocks, self._max_writing - self._transfers.num_writing_through)
        node, num_written = end, 0
        while num_written < num_blocks and node.block_id is not None and node.host_block_id is None:
            host_block_id = self._host.acquire_for(node, self._tree)
            if host_block_id is None:
                break
            self._transfers.write_through(node, host_block_id)
            num_written += 1
            assert node.parent is not None
            node = node.parent
        return num_written

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
