"""How what a request has computed becomes part of the tree.

A lease's frontier block is shown as a tail as soon as it holds a computed token, so that others can fork from it; when
it is full it is sealed and shared. Tables never change for that:

- A sibling has the very same tokens (two requests compute the same at once). A tail's block is then private until the
  two part; a full block stays private until its request ends, and the request goes on below the sibling. A sibling that
  is on the host alone takes the block as its own.
- The shared prefix ends inside a block. A public, frozen copy of that block's beginning is made from the block of
  whoever computed it first: the slots of these tokens never change, so the copy can run at any later time.
"""

from __future__ import annotations

from chatserve.cache.block_pool import BlockPool
from chatserve.cache.block_tree import BlockTree
from chatserve.cache.evictor import HINTED
from chatserve.cache.lease import Lease
from chatserve.cache.node import Node
from chatserve.cache.pager import Pager
from chatserve.cache.scopes import PUBLIC_TAG
from chatserve.cache.siblings import TOKEN_BYTES, num_common
from chatserve.cache.transfers import TransferBook
from chatserve.types import BlockId


class Publisher:
    """Writes the frontier of leases, and the nodes that it becomes."""

    __slots__ = ("_block_bytes", "_device", "_pager", "_transfers", "_tree")

    def __init__(self, tree: BlockTree, device: BlockPool[BlockId], transfers: TransferBook, pager: Pager) -> None:
        self._tree = tree
        self._device = device
        self._transfers = transfers
        self._pager = pager
        self._block_bytes = tree.block_size * TOKEN_BYTES

    def frontier_tag(self, lease: Lease) -> bytes:
        """Scope of the frontier block: public if all of it, and all above it, is shared."""
        end = (lease.num_sealed + 1) * self._tree.block_size
        if lease.leaf.is_public and end <= lease.num_shared_tokens:
            return PUBLIC_TAG
        return lease.own_tag

    def append(self, lease: Lease, tokens: bytes) -> None:
        """KV of these packed tokens now stands in the lease's blocks."""
        start = 0
        while start < len(tokens):
            part = tokens[start : start + self._block_bytes - len(lease.frontier)]
            start += len(part)
            lease.frontier += part
            lease.num_committed += len(part) // TOKEN_BYTES
            if lease.freeze_at is not None and lease.num_committed >= lease.freeze_at:
                self._freeze(lease)
            self._publish(lease)

    def cut_tail(self, lease: Lease, num_tokens: int) -> None:
        """Keep the first `num_tokens` of the tail, in the same block. Copies being made of it have their own length."""
        tail = lease.tail
        assert tail is not None
        if num_tokens >= tail.num_tokens:
            return
        key = lease.tag + lease.frontier[: max(num_tokens, 0) * TOKEN_BYTES]
        if num_tokens > 0 and lease.leaf.find_child(key) is None:
            self._pager.drop_host_copy(tail)
            self._tree.rename(tail, key)
        else:
            block_id = lease.block_ids[lease.num_sealed]
            self._unpublish(lease)
            self._device.release(block_id)

    def _publish(self, lease: Lease) -> None:
        """The frontier has grown: show it in the tree, and go on below it if its block is full."""
        tree = self._tree
        key = lease.tag + lease.frontier
        is_full = len(lease.frontier) == self._block_bytes
        twin = lease.leaf.find_child(key)
        if twin is not None:
            if lease.tail is not None:
                self._unpublish(lease)
            if is_full:
                self._join(lease, twin)
                self._seal(lease, twin)
            return
        if lease.tail is None:
            block_id = lease.block_ids[lease.num_sealed]
            self._device.cache(block_id)
            if not lease.is_hint:
                tree.adopt(lease.leaf)
            lease.tail = tree.insert(lease.leaf, key, block_id, pinned=True)
            if not lease.is_hint:
                tree.mark_branch(lease.leaf)
            elif lease.leaf.standing == HINTED:
                tree.demote(lease.tail, HINTED)
            self._transfers.keep(lease.tail)
            tree.retention.unpin(lease.leaf)
        else:
            self._pager.drop_host_copy(lease.tail)
            tree.rename(lease.tail, key)
        lease.tail.has_writer = not is_full
        if is_full:
            self._seal(lease, lease.tail)

    def _seal(self, lease: Lease, node: Node) -> None:
        lease.leaf = node
        lease.tail = None
        lease.num_sealed += 1
        lease.frontier = b""
        lease.tag = self.frontier_tag(lease)

    def _join(self, lease: Lease, twin: Node) -> None:
        """Go on below a node that has the tokens of our full block. It takes our block if it has none here."""
        block_id = lease.block_ids[lease.num_sealed]
        self._tree.retention.pin(twin)
        self._tree.retention.unpin(lease.leaf)
        if twin.block_id is None:
            if twin in self._tree.unread:
                self._pager.drop_host_copy(twin)
            self._device.cache(block_id)
            self._tree.place(twin, block_id)
            self._transfers.keep(twin)
        else:
            lease.twins.append(block_id)
        lease.num_foreign = lease.num_sealed + 1

    def _unpublish(self, lease: Lease) -> None:
        """The tail's tokens are another node's too: its block is private again. Copies from it may be under way."""
        tail = lease.tail
        assert tail is not None
        tail.has_writer = False
        self._pager.drop_host_copy(tail)
        self._tree.retention.pin(lease.leaf)
        self._device.uncache(self._tree.displace(tail))
        self._tree.remove(tail)
        self._tree.retention.unpin(tail)
        lease.tail = None

    def _freeze(self, lease: Lease) -> None:
        """Put the partial end of the shared prefix into the tree, as a copy, so that every user finds it.

        Done where a block can be had for it, and taken back if the room is wanted before the copy has been handed out.
        """
        assert lease.freeze_at is not None
        num_tokens = lease.freeze_at - lease.num_sealed * self._tree.block_size
        lease.freeze_at = None
        key = PUBLIC_TAG + lease.frontier[: num_tokens * TOKEN_BYTES]
        near = () if lease.leaf.children is None else lease.leaf.children.neighbours(key)
        if any(num_common(node.key, key) * TOKEN_BYTES == len(key) for node in near):
            return
        if not lease.leaf.is_public or not self._pager.num_available:
            return
        (block_id,) = self._pager.acquire(1)
        self._device.cache(block_id)
        frozen = self._tree.insert(lease.leaf, key, block_id)
        self._transfers.copy(lease.block_ids[lease.num_sealed], block_id, num_tokens, frozen)
        if lease.tail is not None:
            self._transfers.keep(lease.tail)
        self._pager.plan_ahead(frozen)
