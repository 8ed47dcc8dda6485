"""What one running request holds of the cache."""

from __future__ import annotations

from dataclasses import dataclass, field

from chatserve.cache.node import Node
from chatserve.types import BlockId, RequestId


@dataclass(slots=True, eq=False)
class Lease:
    """A block table, and the path in the tree that spells the tokens computed so far.

    The request's path is `leaf` and all above it (full nodes), then the *frontier*: the tokens of the first block that
    is not full. The frontier is published as `tail`, unless a sibling has the very same tokens; then its block stays
    private until the two part or the block is full. The lease pins the end of its path.
    """

    request_id: RequestId
    own_tag: bytes
    """Scope of what only its user may reuse."""
    num_shared_tokens: int
    block_ids: list[BlockId]
    num_committed: int
    """Tokens whose KV is known to stand in the table's blocks."""
    leaf: Node
    num_sealed: int
    """Depth of `leaf`: the number of full blocks on the path."""
    num_foreign: int
    """Full nodes from the start of the path down to the last that this request did not make."""
    tail: Node | None
    tag: bytes
    """Scope of the frontier block."""
    frontier: bytes
    """Packed token ids of the frontier block."""
    twins: list[BlockId] = field(default_factory=list)
    """Private blocks that hold what a node of the path held already when they were full."""
    is_hint: bool = False
    """What it computes may never be asked for: it is no use of the path."""
    freeze_at: int | None = None
    """Index of the first token that is not shared, until the partial end of the shared prefix is in the tree."""

    @property
    def pinned(self) -> Node:
        return self.leaf if self.tail is None else self.tail

    @property
    def num_published(self) -> int:
        """Blocks of the table whose tokens are in the tree."""
        return self.num_sealed + (self.tail is not None)

    def private_blocks(self) -> list[BlockId]:
        return [*self.twins, *self.block_ids[self.num_published :]]

    def num_unused_slots(self, block_size: int) -> int:
        """Slots of private blocks that hold nothing yet; those of `tail` are the tree's to count."""
        unused = len(self.block_ids) * block_size - self.num_committed
        return unused if self.tail is None else unused - (block_size - self.tail.num_tokens)
