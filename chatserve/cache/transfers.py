"""Copies between blocks: planned, handed out, running, finished.

A step makes all its swaps out, then all swaps in, then all copies on the device, and then computes. Beside it run the
background's: swaps that are *ahead* of need. The book keeps the blocks of each transfer held, and the nodes that one
reads or fills pinned, from the moment it is planned until it is done. So nothing is freed, evicted or overwritten under
a copy, whatever becomes of the request that wanted it.
"""

from __future__ import annotations

from dataclasses import dataclass

from chatserve.cache.block_pool import BlockPool
from chatserve.cache.block_tree import BlockTree
from chatserve.cache.host_pool import HostPool
from chatserve.cache.node import Node
from chatserve.sched.plan import BlockCopy, SwapIn, SwapOut, Transfers
from chatserve.types import BlockId, HostBlockId


@dataclass(slots=True)
class _Batch:
    """Transfers that were handed out together."""

    transfers: Transfers
    left: tuple[BlockId, ...]
    """Sources of swaps out that it holds: of a step, those that the step itself does not use again; else all."""
    pinned: list[Node]
    is_ahead: bool

    def touches(self, block_id: BlockId) -> bool:
        copies, swaps = self.transfers.copies, self.transfers.swap_in
        return (
            block_id in self.left
            or any(swap.dst == block_id for swap in swaps)
            or any(block_id in (copy.src, copy.dst) for copy in copies)
        )


class TransferBook:
    """Writes holds and pins; decides nothing."""

    __slots__ = (
        "_arriving",
        "_copies",
        "_device",
        "_fetches",
        "_host",
        "_kept",
        "_running",
        "_swap_in",
        "_swap_out",
        "_tree",
        "_writes",
        "num_copies",
        "num_swapped_in",
        "num_swapped_out",
        "num_writing_through",
    )

    def __init__(self, tree: BlockTree, device: BlockPool[BlockId], host: HostPool) -> None:
        self._tree = tree
        self._device = device
        self._host = host
        self._swap_out: dict[HostBlockId, SwapOut] = {}
        self._swap_in: dict[BlockId, tuple[SwapIn, Node]] = {}
        self._copies: dict[BlockId, tuple[BlockCopy, Node]] = {}
        self._fetches: dict[BlockId, tuple[SwapIn, Node]] = {}
        """Swaps in that are ahead of need."""
        self._writes: list[tuple[SwapOut, Node]] = []
        """Swaps out that are ahead of need: the node stays on the device."""
        self._arriving: set[BlockId] = set()
        """Device blocks that fetches fill, planned or running."""
        self._kept: list[Node] = []
        self._running: list[_Batch] = []
        self.num_copies = 0
        self.num_swapped_in = 0
        self.num_swapped_out = 0
        self.num_writing_through = 0
        """Blocks being copied out ahead of need."""

    # --- planning -----------------------------------------------------------------------------------------------------

    def swap_out(self, node: Node, dst: HostBlockId) -> None:
        """Move an idle leaf to the host. Its device block can be used again by the very step that copies it out.

        A host block is held from when the swap is handed out: a long path that leaves at once for a small host pool
        pushes its own end out again, and only the last swap into a block is made.
        """
        src = self._tree.displace(node)
        self._tree.place_on_host(node, dst)
        self._device.vacate(src)
        self._swap_out[dst] = SwapOut(src=src, dst=dst)

    def write_through(self, node: Node, dst: HostBlockId) -> None:
        """Copy a node to the host ahead of need. It stays on the device, and can leave it later at no cost.

        Planned only to be handed out at once. Being copied is not being used: the node's place in the order of eviction
        stays as it is.
        """
        src = node.block_id
        assert src is not None
        self._tree.place_on_host(node, dst)
        self._host.hold(dst)
        self._device.hold(src)
        self._tree.retention.pin(node, used=False)
        self._writes.append((SwapOut(src=src, dst=dst), node))
        self.num_writing_through += 1

    def swap_in(self, node: Node, dst: BlockId, *, ahead: bool = False) -> None:
        """Bring a node back to the device, into a private block that becomes its own. It stays on the host as well."""
        self._device.cache(dst)
        self._tree.place(node, dst)
        self.load(node, dst, ahead=ahead)

    def load(self, node: Node, dst: BlockId, *, ahead: bool = False) -> None:
        """Copy a node that is on the host into a request's private block: copy-on-write without a block in between.

        With `ahead` no step waits for it: who needs the block waits until it is no longer `is_arriving`.
        """
        assert node.host_block_id is not None
        assert node not in self._tree.unread, "its host block has not been filled"
        self._host.hold(node.host_block_id)
        self._device.hold(dst)
        self._tree.retention.pin(node)
        planned = self._fetches if ahead else self._swap_in
        planned[dst] = SwapIn(src=node.host_block_id, dst=dst), node
        if ahead:
            self._arriving.add(dst)

    def is_arriving(self, block_id: BlockId | None) -> bool:
        """Whether a copy that no step waits for has still to fill the block."""
        return block_id in self._arriving

    def copy(self, src: BlockId, dst: BlockId, num_tokens: int, node: Node) -> None:
        """Copy the first slots of `src`, and keep `node`, from which or for which it is made, in place until then.

        Copies of one step may run in any order, so one from the target of another reads that one's source instead.
        """
        if src in self._copies:
            src = self._copies[src][0].src
        self._device.hold(src)
        self._device.hold(dst)
        self._tree.retention.pin(node)
        self._copies[dst] = BlockCopy(src=src, dst=dst, num_tokens=num_tokens), node

    def abandon(self, dst: BlockId) -> bool:
        """Take back the copy or swap that fills a device block; False if it has been handed out."""
        if dst in self._copies:
            copy, node = self._copies.pop(dst)
            self._device.unhold(copy.src)
        elif dst in self._swap_in or dst in self._fetches:
            swap, node = (self._swap_in if dst in self._swap_in else self._fetches).pop(dst)
            self._arriving.discard(dst)
            self._host.unhold(swap.src)
        else:
            return False
        self._device.unhold(dst)
        self._tree.retention.unpin(node)
        for kept in [kept for kept in self._kept if not self._is_planned(kept)]:
            self._kept.remove(kept)
            self._tree.retention.unpin(kept)
        return True

    def keep(self, node: Node) -> None:
        """A request's block has become this node's while copies may still read or write it: pin it until they end."""
        assert node.block_id is not None
        if not self._device.is_held(node.block_id):
            return
        if self._is_planned(node):
            self._tree.retention.pin(node)
            self._kept.append(node)
        for batch in self._running:
            if batch.touches(node.block_id):
                self._tree.retention.pin(node)
                batch.pinned.append(node)

    # --- a step's life ------------------------------------------------------------------------------------------------

    def take(self) -> Transfers:
        """Hand out all that is planned for the step itself."""
        transfers = Transfers(
            swap_out=tuple(out for out in self._swap_out.values() if self._host.is_used(out.dst)),
            swap_in=tuple(swap for swap, _ in self._swap_in.values()),
            copies=tuple(copy for copy, _ in self._copies.values()),
        )
        pinned = [*(node for _, node in (*self._swap_in.values(), *self._copies.values())), *self._kept]
        batch = _Batch(transfers, self._device.close_step(), pinned, is_ahead=False)
        for out in transfers.swap_out:
            self._host.hold(out.dst)
        self._kept.clear()
        self._swap_out.clear()
        self._swap_in.clear()
        self._copies.clear()
        if not transfers:
            self._let_go(batch)
        return self._hand_out(batch)

    def take_ahead(self) -> Transfers:
        """Hand out all that is planned ahead of need, to run beside steps and after what `take` gave before."""
        transfers = Transfers(
            swap_out=tuple(out for out, _ in self._writes), swap_in=tuple(swap for swap, _ in self._fetches.values())
        )
        pinned = [node for _, node in (*self._writes, *self._fetches.values())]
        self._writes.clear()
        self._fetches.clear()
        return self._hand_out(_Batch(transfers, tuple(out.src for out in transfers.swap_out), pinned, is_ahead=True))

    def _hand_out(self, batch: _Batch) -> Transfers:
        transfers = batch.transfers
        if transfers:
            self._running.append(batch)
        self.num_swapped_out += len(transfers.swap_out)
        self.num_swapped_in += len(transfers.swap_in)
        self.num_copies += len(transfers.copies)
        return transfers

    def done(self, transfers: Transfers) -> None:
        """The step that made these transfers has finished."""
        if not transfers:
            return
        index = next((i for i, batch in enumerate(self._running) if batch.transfers is transfers), None)
        assert index is not None, "these transfers are not running"
        self._let_go(self._running.pop(index))

    def _let_go(self, batch: _Batch) -> None:
        transfers = batch.transfers
        for block_id in batch.left:
            self._device.unhold(block_id)
        for out in transfers.swap_out:
            self._host.unhold(out.dst)
        for swap in transfers.swap_in:
            self._host.unhold(swap.src)
            self._device.unhold(swap.dst)
        for copy in transfers.copies:
            self._device.unhold(copy.src)
            self._device.unhold(copy.dst)
        if batch.is_ahead:
            self.num_writing_through -= len(transfers.swap_out)
            self._arriving.difference_update(swap.dst for swap in transfers.swap_in)
        for node in batch.pinned:
            self._tree.retention.unpin(node, used=not batch.is_ahead)

    def pinned(self) -> list[Node]:
        """Nodes that transfers keep in place, once for each transfer."""
        planned = (*self._swap_in.values(), *self._copies.values(), *self._fetches.values(), *self._writes)
        return [node for batch in self._running for node in batch.pinned] + [node for _, node in planned] + self._kept

    def check(self) -> None:
        written = [*self._swap_in, *self._fetches, *self._copies]
        assert len(set(written)) == len(written), "two copies of one step write the same block"
        read = {copy.src for copy, _ in self._copies.values()}
        assert not read & set(self._copies), "a copy reads what another one of the same step writes"
        for block_id in (*written, *read):
            assert self._device.is_held(block_id), f"device block {block_id} is copied but not held"
        for swap, _ in (*self._swap_in.values(), *self._fetches.values()):
            assert self._host.is_held(swap.src), f"host block {swap.src} is copied but not held"
        ahead = [batch.transfers for batch in self._running if batch.is_ahead]
        filled = [swap.dst for transfers in ahead for swap in transfers.swap_in]
        assert self._arriving == {*self._fetches, *filled}
        num_writing = len(self._writes) + sum(len(transfers.swap_out) for transfers in ahead)
        assert self.num_writing_through == num_writing

    def _is_planned(self, node: Node) -> bool:
        return any(node.block_id in (copy.src, copy.dst) for copy, _ in self._copies.values())
