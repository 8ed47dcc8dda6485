"""Nodes that a snapshot brought back and whose bytes are still in its file.

Each has a block of the host pool, into which its bytes are to be read, and is on the host alone. Until they are, no
search finds it, so nothing can be computed from it; it is evicted and released like any other. Who waits for a path
makes its nodes `wanted`, which are read before the rest. Owns that order; reads no files itself.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from chatserve.cache import search
from chatserve.cache.scopes import PUBLIC_TAG
from chatserve.cache.siblings import pack
from chatserve.cache.snapshot import ROOT
from chatserve.types import PUBLIC, HostBlockId, Scope

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatserve.cache.block_tree import BlockTree
    from chatserve.cache.host_pool import HostPool
    from chatserve.cache.node import Node
    from chatserve.cache.pager import Pager
    from chatserve.cache.snapshot import Manifest
    from chatserve.types import UserId


@dataclass(frozen=True, slots=True)
class UnreadBlock:
    """Block number `index` of the snapshot, and where it goes."""

    node: Node
    index: int
    checksum: int
    host_block_id: HostBlockId


class UnreadBlocks:
    """Fills an empty cache from a manifest, then hands out block after block to be read."""

    __slots__ = ("_cold", "_host", "_pager", "_tree", "_wanted", "num_damaged", "num_read")

    def __init__(self, tree: BlockTree, host: HostPool, pager: Pager) -> None:
        self._tree = tree
        self._host = host
        self._pager = pager
        self._cold: deque[Node] = deque()
        """All of them, most recently used first, and some that are none any more."""
        self._wanted: OrderedDict[Node, None] = OrderedDict()
        self.num_read = 0
        self.num_damaged = 0
        """Blocks that did not have their checksum; what followed them went with them."""

    def __len__(self) -> int:
        return len(self._tree.unread)

    def restore(self, manifest: Manifest) -> int:
        """Put as many blocks as the host pool has room for into an empty cache, most recently used first."""
        blocks = manifest.blocks[: self._host.num_free]
        tree, tags = self._tree, self._tree.tags
        scopes = [PUBLIC_TAG if scope == PUBLIC else tags.acquire(scope) for scope in manifest.scopes]
        nodes: list[Node] = []
        for index, block in enumerate(blocks):
            parent = tree.root if block.parent == ROOT else nodes[block.parent]
            host_block_id = self._host.acquire()
            self._host.cache(host_block_id)
            node = tree.insert_unread(
                parent,
                scopes[block.scope] + block.token_ids,
                host_block_id,
                (index, block.checksum),
                last_used=len(blocks) - index,
            )
            if block.is_protected:
                tree.protect(node)
            nodes.append(node)
        for tag in scopes:
            tags.release(tag)
        self._cold.extend(nodes)
        return len(nodes)

    def want(self, token_ids: Sequence[int], user: UserId) -> bool:
        """Have what spells a beginning of the sequence read first. Whether there is any that is not read yet."""
        unread = self._tree.unread
        if not unread:
            return False
        found = False
        for path in search.paths(self._tree, pack(token_ids), Scope(user), with_unread=True):
            for node in path.nodes if path.fork is None else (*path.nodes, path.fork):
                if node in unread:
                    self._wanted[node] = None
                    found = True
        return found

    def next_wanted(self) -> UnreadBlock | None:
        """The block to be read first, if somebody waits for one. `read` or `damaged` must follow."""
        while self._wanted:
            node = next(iter(self._wanted))
            if node in self._tree.unread:
                return self._describe(node)
            del self._wanted[node]
        return None

    def next_cold(self) -> UnreadBlock | None:
        """The most recently used block that is left. `read` or `damaged` must follow."""
        while self._cold:
            if self._cold[0] in self._tree.unread:
                return self._describe(self._cold[0])
            self._cold.popleft()
        return None

    def read(self, block: UnreadBlock) -> None:
        """The node's bytes stand in its host block."""
        del self._tree.unread[block.node]
        self.num_read += 1

    def damaged(self, block: UnreadBlock) -> None:
        """Its bytes are lost: forget the node and, since a parent outlives its children, all below it."""
        self._pager.forget_all(block.node)
        self.num_damaged += 1

    def _describe(self, node: Node) -> UnreadBlock:
        index, checksum = self._tree.unread[node]
        assert node.host_block_id is not None
        return UnreadBlock(node, index, checksum, node.host_block_id)
