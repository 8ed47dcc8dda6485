"""Which blocks a request computes into, which it finds already computed, and what makes room for them.

The one face of the cache towards the scheduler. It owns device blocks, host blocks, the tree of what they hold, and the
leases of running requests; it plans copies but makes none, and knows nothing of fairness, text or torch.

A request's life: `admit` (find the longest cached path, pin it), `grow` (blocks for the next tokens), `commit` (they
have been computed: seal, share), and `finish` or `preempt`, after which its path is idle: cached until the room is
needed.
A step's: `take_transfers` and `take_background`, then the runner makes them and computes, then `transfers_done` for
each when it is done.

Its parts: `block_pool` and `host_pool` know who owns a block, `block_tree` what it holds, `search` finds it and
`publisher` puts it there; `leasing` begins and ends a request's share, `deletion` forgets; `pager` makes room,
`retention` says what may leave for it and `evictor` what goes first, and `transfers` knows which copies are planned or
running.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from chatserve.cache import deletion, search
from chatserve.cache.block_pool import CACHED, PRIVATE, BlockPool
from chatserve.cache.block_tree import BlockTree
from chatserve.cache.evictor import HINTED, PREEMPTED
from chatserve.cache.host_pool import HostPool
from chatserve.cache.invariants import check_cache
from chatserve.cache.lease import Lease
from chatserve.cache.leasing import Leasing
from chatserve.cache.manifest_builder import ManifestBuilder
from chatserve.cache.pager import Pager
from chatserve.cache.publisher import Publisher
from chatserve.cache.search import Path
from chatserve.cache.siblings import TOKEN_BYTES, pack
from chatserve.cache.transfers import TransferBook
from chatserve.cache.unread import UnreadBlocks
from chatserve.engine.messages import PoolCounts
from chatserve.sched.plan import Transfers
from chatserve.types import BlockId, RequestId, Scope, UserId


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Tokens of a sequence whose KV exists: on the device, and beyond these on the host."""

    num_cached: int
    num_swapped: int
    path: Path
    """For `KVManager.admit`, as long as nothing has changed."""


@dataclass(frozen=True, slots=True)
class Admission:
    """KV of the first `num_cached + num_swapped_in` tokens stands in `block_ids` once the step's transfers are done."""

    num_cached: int
    num_swapped_in: int
    block_ids: tuple[BlockId, ...]

    @property
    def num_computed(self) -> int:
        return self.num_cached + self.num_swapped_in


class KVManager:
    """See the module. Watermarks count free device blocks: below the low one the page daemon works up to the high."""

    def __init__(
        self,
        *,
        num_blocks: int,
        num_host_blocks: int,
        block_size: int,
        low_watermark: int | None = None,
        high_watermark: int | None = None,
    ) -> None:
        assert num_blocks > 0, "a cache needs a block"
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.block_size = block_size
        self._low = num_blocks // 50 if low_watermark is None else low_watermark
        self._high = max(self._low, num_blocks // 25 if high_watermark is None else high_watermark)
        self._device: BlockPool[BlockId] = BlockPool(num_blocks)
        self._host = HostPool(num_host_blocks)
        self._tree = BlockTree(block_size)
        self._transfers = TransferBook(self._tree, self._device, self._host)
        self._pager = Pager(self._tree, self._device, self._host, self._transfers)
        self._publisher = Publisher(self._tree, self._device, self._transfers, self._pager)
        self._leasing = Leasing(self._tree, self._device, self._transfers, self._pager, self._publisher)
        self.unread = UnreadBlocks(self._tree, self._host, self._pager)
        """What a snapshot holds and nobody has needed yet."""
        self._leases: dict[RequestId, Lease] = {}
        self._num_preemptions = 0

    # --- a request's life ---------------------------------------------------------------------------------------------

    def match(self, token_ids: Sequence[int], user: UserId) -> PrefixMatch:
        """How much of a sequence is cached, short of its last token, whose logits are wanted. Changes nothing."""
        path = search.find(self._tree, pack(token_ids[:-1]), Scope(user))
        num_swapped = sum(self.block_size for node in path.nodes if node.block_id is None)
        if path.fork is not None and path.fork.block_id is None:
            num_swapped += path.fork_tokens
        return PrefixMatch(len(path.nodes) * self.block_size + path.fork_tokens - num_swapped, num_swapped, path)

    def awaits_reading(self, token_ids: Sequence[int], user: UserId) -> bool:
        """Whether some of the sequence's KV has still to be read from a snapshot; it is read first from now on."""
        return self.unread.want(token_ids[:-1], user)

    def admit(
        self,
        request_id: RequestId,
        token_ids: Sequence[int],
        user: UserId,
        num_shared_tokens: int,
        *,
        match: PrefixMatch | None = None,
        ahead: bool = False,
        is_hint: bool = False,
    ) -> Admission | None:
        """Pin the longest cached path of a request that starts, and plan what brings all of it to the device.

        `match` is what `match` has just found for these tokens, if that was asked. With `ahead`, what comes from the
        host does so in the background, and the request waits until `is_resident`. With `is_hint` it computes what may
        never be asked for, and ends in `finish_hint`.

        Its first `num_shared_tokens` may be shared between users once they are computed; what may be found was decided
        when it was computed. None if there are not enough blocks for that now; then nothing has changed.
        """
        assert request_id not in self._leases, f"{request_id} was admitted twice"
        assert user, "a user must have a name"
        tokens = pack(token_ids)
        found = match.path if match is not None else search.find(self._tree, tokens[:-TOKEN_BYTES], Scope(user))
        if is_hint and found.extends_fork and found.fork is not None and found.fork.standing != HINTED:
            found = replace(found, extends_fork=False)  # a conversation's end stays what it is, whatever is drafted
        path = self._leasing.affordable(found)
        if path is None:
            if self._pager.take_back():
                return self.admit(request_id, token_ids, user, num_shared_tokens, ahead=ahead, is_hint=is_hint)
            return None
        lease, num_swapped_in = self._leasing.open(
            request_id, tokens, Scope(user), num_shared_tokens, path, ahead=ahead, is_hint=is_hint
        )
        self._leases[request_id] = lease
        return Admission(lease.num_committed - num_swapped_in, num_swapped_in, tuple(lease.block_ids))

    def is_resident(self, request_id: RequestId) -> bool:
        """Whether all that it was admitted with is on the device, or will be once the next step's transfers are done.

        Not so only as long as copies in the background have still to fill some of it, for this request or another one.
        """
        return not any(self._transfers.is_arriving(block_id) for block_id in self._leases[request_id].block_ids)

    def grow(self, request_id: RequestId, num_tokens: int) -> tuple[BlockId, ...] | None:
        """Make room for KV of the first `num_tokens` tokens. The new end of the table; None (and no change) if full."""
        lease = self._leases[request_id]
        num_new = -(-num_tokens // self.block_size) - len(lease.block_ids)
        if num_new <= 0:
            return ()
        if not self._pager.can_acquire(num_new):
            return None
        new = self._pager.acquire(num_new)
        lease.block_ids.extend(new)
        return tuple(new)

    def commit(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        """KV of these next tokens stands in the table's blocks: extend the path, seal and share full blocks."""
        lease = self._leases[request_id]
        assert lease.num_committed + len(token_ids) <= len(lease.block_ids) * self.block_size, "no room was made"
        self._publisher.append(lease, pack(token_ids))

    def finish(self, request_id: RequestId, keep_tokens: int | None = None) -> None:
        """End a request. Its first `keep_tokens` computed tokens (None: all) stay cached, unpinned.

        Blocks without computed tokens are freed, and so are those past `keep_tokens` that only this request has used. A
        sealed block that `keep_tokens` ends in stays as it is: who continues there copies it.
        """
        self._leasing.close(self._leases.pop(request_id), keep_tokens)

    def preempt(self, request_id: RequestId) -> None:
        """End a request that will be admitted again: the blocks that are its own are evicted before any other."""
        lease = self._leases.pop(request_id)
        self._leasing.close(lease, None)
        self._leasing.demote(lease, lease.num_foreign, PREEMPTED)
        self._num_preemptions += 1

    def finish_hint(self, request_id: RequestId, num_settled: int) -> None:
        """End a request for a hint: what it has computed past its first `num_settled` tokens is a draft."""
        lease = self._leases.pop(request_id)
        self._leasing.close(lease, None)
        self._leasing.demote(lease, max(lease.num_foreign, num_settled // self.block_size), HINTED)

    # --- transfers ----------------------------------------------------------------------------------------------------

    def take_transfers(self) -> Transfers:
        """What the next step must do before it computes: all swaps out, then all swaps in, then all copies."""
        self._pager.close_step()
        return self._transfers.take()

    def take_background(self, *, write_through: bool = True) -> Transfers:
        """What may run beside steps, from the next one on and after the transfers that were taken before.

        Swaps in that were planned `ahead`, and the page daemon's work: copies of cold leaves where free blocks become
        few, and with `write_through` of whatever is idle, so that evicting it later moves nothing.
        """
        self._pager.close_step()
        self._pager.reclaim(self._low, self._high)
        if write_through:
            self._pager.write_idle_through()
        return self._transfers.take_ahead()

    def transfers_done(self, transfers: Transfers) -> None:
        """The step that made them, or the copies in the background, have finished."""
        self._transfers.done(transfers)

    # --- letting go ---------------------------------------------------------------------------------------------------

    def release(self, token_ids: Sequence[int], user: UserId, num_kept_tokens: int = 0) -> None:
        """Forget a deleted path, from its end up to what is public, running, or part of another path.

        A block in which any of the first `num_kept_tokens` stands is kept: the conversation goes on from there.
        """
        num_kept_blocks = -(-num_kept_tokens // self.block_size)
        deletion.forget_path(self._tree, self._pager, pack(token_ids), Scope(user), num_kept_blocks)

    def release_hint(self, token_ids: Sequence[int], user: UserId, num_kept_tokens: int = 0) -> None:
        """Forget what was computed for a draft alone, past its first `num_kept_tokens`."""
        num_kept_blocks = -(-num_kept_tokens // self.block_size)
        deletion.forget_draft(self._tree, self._pager, pack(token_ids), Scope(user), num_kept_blocks)

    def manifest_builder(self) -> ManifestBuilder:
        """For a snapshot of all that is cached. Nothing may run, and no transfer be planned or under way."""
        return ManifestBuilder(self._tree)

    # --- reports ------------------------------------------------------------------------------------------------------

    def counts(self) -> tuple[PoolCounts, PoolCounts]:
        """Device and host. On the device, what is owned and not idle is pinned."""
        pinned = self._device.num_owned - self._tree.retention.num_idle
        return self._device.counts(pinned=pinned), self._host.counts(pinned=0)

    def block_map(self) -> str:
        """One letter a device block: f(ree), c(ached), p(rivate), t(ransit); capitals where it is pinned."""
        idle = {node.block_id for node in self._tree.walk() if not node.num_pins}
        letters = []
        for index in range(self.num_blocks):
            block_id = BlockId(index)
            letter = self._device.letter(block_id)
            pinned = self._device.owner(block_id) in (PRIVATE, CACHED) and block_id not in idle
            letters.append(letter.upper() if pinned else letter)
        return "".join(letters)

    @property
    def counters(self) -> dict[str, int]:
        """Totals since the start."""
        return {
            "copies": self._transfers.num_copies,
            "swapped_out_blocks": self._transfers.num_swapped_out,
            "swapped_in_blocks": self._transfers.num_swapped_in,
            "dropped_blocks": self._pager.num_dropped + self._host.num_dropped,
            "preemptions": self._num_preemptions,
            "restored_blocks": self.unread.num_read,
            "damaged_blocks": self.unread.num_damaged,
        }

    def wasted_slots(self) -> int:
        """Token slots in device blocks that are taken and hold nothing: the ends of sequences, and room just made."""
        private = sum(lease.num_unused_slots(self.block_size) for lease in self._leases.values())
        return self._tree.num_unused_slots + private

    # --- invariants ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Every invariant of the cache, by a walk over all of it."""
        check_cache(self._device, self._host, self._tree, self._transfers, list(self._leases.values()))
