"""What a request takes of the cache when it starts, and what it leaves there when it ends.

Opens a lease on a cached path: sees whether all of it can be on the device at once, pins it and plans the copies that
bring it there. Closes it again: frees what is the request's alone, and says what the rest is worth. In between the
lease is `publisher`'s. Which path that is was `search`'s to find; who holds a lease is the KV manager's to know.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatserve.cache.evictor import HINTED
from chatserve.cache.lease import Lease
from chatserve.cache.search import Path
from chatserve.cache.siblings import TOKEN_BYTES

if TYPE_CHECKING:
    from chatserve.cache.block_pool import BlockPool
    from chatserve.cache.block_tree import BlockTree
    from chatserve.cache.node import Node
    from chatserve.cache.pager import Pager
    from chatserve.cache.publisher import Publisher
    from chatserve.cache.transfers import TransferBook
    from chatserve.types import BlockId, RequestId, Scope


class Leasing:
    """`affordable`, then `open`; `close`, then perhaps `demote`."""

    __slots__ = ("_device", "_pager", "_publisher", "_transfers", "_tree")

    def __init__(
        self,
        tree: BlockTree,
        device: BlockPool[BlockId],
        transfers: TransferBook,
        pager: Pager,
        publisher: Publisher,
    ) -> None:
        self._tree = tree
        self._device = device
        self._transfers = transfers
        self._pager = pager
        self._publisher = publisher

    # --- beginning ----------------------------------------------------------------------------------------------------

    def affordable(self, path: Path) -> Path | None:
        """The path, or it without its fork, if all of it can be on the device at once beside what is pinned.

        Without the fork means recomputing less than a block. Were it not an option, a request that fills the whole pool
        could never fork: the block it copies from would take the last place.
        """
        for option in (path, Path(path.nodes, None, 0, extends_fork=False)):
            nodes = option.nodes if option.fork is None else (*option.nodes, option.fork)
            num_idle = sum(not node.num_pins and node.block_id is not None for node in nodes)
            if _num_blocks_to_bring_in(option) <= self._pager.num_available - num_idle:
                return option
        return None

    def open(
        self,
        request_id: RequestId,
        tokens: bytes,
        scope: Scope,
        num_shared_tokens: int,
        path: Path,
        *,
        ahead: bool,
        is_hint: bool,
    ) -> tuple[Lease, int]:
        """A lease on an affordable path, which spells a beginning of packed `tokens`.

        Also how many of its tokens come from the host: in the background where `ahead`.
        """
        tree, block_size = self._tree, self._tree.block_size
        num_sealed = len(path.nodes)
        num_matched = num_sealed * block_size + path.fork_tokens
        lease = Lease(
            request_id=request_id,
            own_tag=tree.tags.acquire(scope),
            num_shared_tokens=num_shared_tokens,
            block_ids=[],
            num_committed=num_matched,
            leaf=path.nodes[-1] if path.nodes else tree.root,
            num_sealed=num_sealed,
            num_foreign=num_sealed,
            tail=path.fork if path.extends_fork else None,
            tag=b"",
            frontier=tokens[num_sealed * block_size * TOKEN_BYTES : num_matched * TOKEN_BYTES],
            is_hint=is_hint,
        )
        if num_shared_tokens % block_size and num_matched < num_shared_tokens:
            lease.freeze_at = num_shared_tokens
        lease.tag = self._publisher.frontier_tag(lease) if lease.tail is None else lease.tail.tag
        if not is_hint:
            tree.adopt(lease.pinned)
        return lease, self._bring_in(lease, path, ahead=ahead)

    def _bring_in(self, lease: Lease, path: Path, *, ahead: bool) -> int:
        """Pin an affordable path and put all of it into the lease's table. How many tokens come from the host."""
        tree, transfers, fork = self._tree, self._transfers, path.fork
        tree.retention.pin(lease.leaf)
        if fork is not None:
            tree.retention.pin(fork)
        new = iter(self._pager.acquire(_num_blocks_to_bring_in(path)))
        num_swapped_in = 0
        for node in path.nodes:
            if node.block_id is None:
                transfers.swap_in(node, next(new), ahead=ahead)
                num_swapped_in += tree.block_size
        lease.block_ids += [node.block_id for node in path.nodes if node.block_id is not None]
        if fork is None:
            return num_swapped_in
        if fork.block_id is None:
            num_swapped_in += path.fork_tokens
        if path.extends_fork:
            if fork.block_id is None:
                transfers.swap_in(fork, next(new), ahead=ahead)
            assert fork.block_id is not None
            fork.has_writer = True
            lease.block_ids.append(fork.block_id)
            tree.retention.unpin(lease.leaf)
            return num_swapped_in
        block_id = next(new)
        if fork.block_id is None or transfers.is_arriving(fork.block_id):
            transfers.load(fork, block_id, ahead=ahead)
        else:
            transfers.copy(fork.block_id, block_id, path.fork_tokens, fork)
        lease.block_ids.append(block_id)
        if fork.is_public:
            tree.protect(fork)
        tree.retention.unpin(fork)
        return num_swapped_in

    # --- ending -------------------------------------------------------------------------------------------------------

    def close(self, lease: Lease, keep_tokens: int | None) -> None:
        """Its first `keep_tokens` computed tokens (None: all) stay cached, unpinned, and whatever others use of it."""
        keep = lease.num_committed if keep_tokens is None else min(keep_tokens, lease.num_committed)
        block_size = self._tree.block_size
        for block_id in lease.private_blocks():
            self._device.release(block_id)
        if lease.tail is not None:
            lease.tail.has_writer = False
            self._publisher.cut_tail(lease, keep - lease.num_sealed * block_size)
        self._tree.retention.unpin(lease.pinned)
        node = lease.leaf
        num_kept = max(-(-keep // block_size), lease.num_foreign)
        while lease.num_sealed > num_kept and lease.tail is None and not node.num_pins and not node.children:
            assert node.parent is not None
            lease.leaf = node.parent
            lease.num_sealed -= 1
            self._pager.forget(node)
            node = lease.leaf
        self._tree.tags.release(lease.own_tag)

    def demote(self, lease: Lease, depth: int, standing: int) -> None:
        """Give the nodes of a closed lease's path another standing, as far as they lie below `depth` blocks."""
        node: Node | None = lease.pinned
        for _ in range(lease.num_published - depth):
            if node is None or (self._tree.leads_on(node) if standing == HINTED else node.num_pins):
                break
            self._tree.demote(node, standing)
            node = node.parent


def _num_blocks_to_bring_in(path: Path) -> int:
    num_blocks = sum(node.block_id is None for node in path.nodes)
    if path.fork is not None:
        num_blocks += not path.extends_fork or path.fork.block_id is None
    return num_blocks
