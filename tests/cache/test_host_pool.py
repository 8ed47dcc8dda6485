"""What makes room in host memory."""

from __future__ import annotations

from chatserve.cache.block_tree import BlockTree
from chatserve.cache.host_pool import HostPool
from chatserve.cache.node import Node
from chatserve.cache.scopes import PUBLIC_TAG
from chatserve.cache.siblings import pack
from chatserve.types import BlockId


class Tier:
    """A tree whose nodes, children of the root, are put on the host by hand."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = HostPool(num_blocks)
        self.tree = BlockTree(block_size=1)
        self.num_nodes = 0

    def add(self) -> Node:
        self.num_nodes += 1
        node = self.tree.insert(self.tree.root, PUBLIC_TAG + pack([self.num_nodes]), BlockId(self.num_nodes))
        self.tree.retention.pin(node)
        self.tree.retention.unpin(node)
        return node

    def swap_out(self, node: Node, *, spare: bool = False) -> bool:
        host_block_id = self.pool.acquire_for(node, self.tree)
        self.pool.check()
        if host_block_id is None:
            return False
        if not spare:
            self.tree.displace(node)
        self.tree.place_on_host(node, host_block_id)
        self.tree.check()
        return True


def test_the_least_recently_used_leaf_is_forgotten_first() -> None:
    tier = Tier(2)
    old, young, newcomer = tier.add(), tier.add(), tier.add()
    assert tier.swap_out(young)
    assert tier.swap_out(old)
    assert tier.swap_out(newcomer)
    assert set(tier.tree.walk()) == {young, newcomer}
    assert tier.pool.num_dropped == 1


def test_a_spare_copy_goes_before_an_only_copy() -> None:
    tier = Tier(2)
    old, spare, newcomer = tier.add(), tier.add(), tier.add()
    assert tier.swap_out(old)
    assert tier.swap_out(spare, spare=True)
    assert tier.swap_out(newcomer)
    assert spare.host_block_id is None
    assert spare.block_id is not None
    assert old.host_block_id is not None
    assert tier.pool.num_dropped == 0


def test_a_newcomer_colder_than_all_that_could_go_is_turned_away() -> None:
    tier = Tier(1)
    newcomer, young = tier.add(), tier.add()
    assert tier.swap_out(young)
    assert not tier.swap_out(newcomer)
    assert young.host_block_id is not None


def test_a_block_in_a_copy_makes_no_room() -> None:
    tier = Tier(1)
    old, newcomer = tier.add(), tier.add()
    assert tier.swap_out(old)
    assert old.host_block_id is not None
    tier.pool.hold(old.host_block_id)
    assert not tier.swap_out(newcomer)
    tier.pool.unhold(old.host_block_id)
    assert tier.swap_out(newcomer)


def test_without_host_memory_nothing_is_taken() -> None:
    tier = Tier(0)
    assert not tier.swap_out(tier.add())
