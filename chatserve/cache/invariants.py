"""What must hold between the parts of the cache after every operation. Each part checks itself; this is the rest.

A violation is a bug of ours, so everything here is an `assert`. The cost is a walk over all blocks: for tests.
"""

from __future__ import annotations

from collections.abc import Sequence

from chatserve.cache.block_pool import CACHED, PRIVATE, BlockPool
from chatserve.cache.block_tree import BlockTree
from chatserve.cache.host_pool import HostPool
from chatserve.cache.lease import Lease
from chatserve.cache.node import Node
from chatserve.cache.siblings import TOKEN_BYTES
from chatserve.cache.transfers import TransferBook
from chatserve.types import BlockId


def check_cache(
    device: BlockPool[BlockId], host: HostPool, tree: BlockTree, transfers: TransferBook, leases: Sequence[Lease]
) -> None:
    for part in (device, host, tree, transfers):
        part.check()
    nodes = list(tree.walk())
    _check_ownership(device, host, nodes, leases)
    _check_pins(tree, nodes, transfers, leases)
    tree.tags.check([*(node.tag for node in nodes), *(lease.own_tag for lease in leases)])
    idle = [node.block_id for node in nodes if node.block_id is not None and not node.num_pins]
    assert not any(device.is_held(block_id) for block_id in idle), "a block in a copy could be evicted"
    writers = [lease.tail for lease in leases if lease.tail is not None]
    assert len(set(writers)) == len(writers), "a tail has two writers"
    assert set(writers) == {node for node in nodes if node.has_writer}, "a tail without a writer is written"
    for lease in leases:
        _check_lease(lease, tree.block_size)


def _check_ownership(
    device: BlockPool[BlockId], host: HostPool, nodes: Sequence[Node], leases: Sequence[Lease]
) -> None:
    """Each block that is not free has exactly one owner."""
    owned = {owner: {i for i in range(device.num_blocks) if device.owner(BlockId(i)) == owner} for owner in range(4)}
    assert owned[CACHED] == {node.block_id for node in nodes} - {None}, "cached blocks are not the tree's"
    assert host.num_owned == len({node.host_block_id for node in nodes} - {None}), "a host block is lost"
    private = [block_id for lease in leases for block_id in lease.private_blocks()]
    assert len(set(private)) == len(private), "two requests write the same block"
    assert owned[PRIVATE] == set(private), "private blocks are not the running requests'"


def _check_pins(tree: BlockTree, nodes: Sequence[Node], transfers: TransferBook, leases: Sequence[Lease]) -> None:
    """Each pin is a lease's, a transfer's, or a pinned child's."""
    num_pins = dict.fromkeys([tree.root, *nodes], 0)
    pinned_by_transfers = transfers.pinned()
    for node in (*pinned_by_transfers, *(lease.pinned for lease in leases)):
        num_pins[node] = num_pins.get(node, 0) + 1
    removed = {node for node in pinned_by_transfers if not tree.is_attached(node)}
    for node in (*removed, *reversed(nodes)):
        if num_pins[node]:
            assert node.parent is not None
            num_pins[node.parent] += 1
    for node, expected in num_pins.items():
        assert node.num_pins == expected, f"{node.num_pins} pins where {expected} are accounted for"


def _check_lease(lease: Lease, block_size: int) -> None:
    """The table spells the path: its first blocks are the path's nodes or twins of theirs."""
    assert lease.num_sealed * block_size + len(lease.frontier) // TOKEN_BYTES == lease.num_committed
    assert lease.num_committed <= len(lease.block_ids) * block_size, "committed past the end of the table"
    assert len(set(lease.block_ids)) == len(lease.block_ids), "a block stands in a table twice"
    if lease.tail is not None:
        assert lease.tail.key == lease.tag + lease.frontier
        assert lease.tail.parent is lease.leaf
        assert lease.tail.block_id == lease.block_ids[lease.num_sealed]
    node, depth, twins = lease.leaf, lease.num_sealed, set(lease.twins)
    while node.parent is not None:
        depth -= 1
        assert node.block_id is not None, "a running request's path is not on the device"
        block_id = lease.block_ids[depth]
        assert node.block_id == block_id or block_id in twins, "the table has another block than the path"
        node = node.parent
    assert depth == 0, "the path is longer or shorter than its depth"
