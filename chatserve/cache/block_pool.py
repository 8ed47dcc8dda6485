"""Who owns each block of one tier of memory.

A pool hands out block numbers and takes them back; it neither knows what a block holds nor which tree or request its
owner is. Besides an owner, a block may have *holds*: copies, planned or running, that read or write it. A block that
its owner gives up while it is held becomes free only when the last of these copies has finished.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar, cast

from chatserve.engine.messages import PoolCounts

FREE: Final = 0
PRIVATE: Final = 1
"""Owned by one running request, unknown to the tree."""
CACHED: Final = 2
"""Owned by a node of the tree."""
VACATED: Final = 3
"""Given up by its owner, still read or written by a copy."""

IdT = TypeVar("IdT", bound=int)


class BlockPool(Generic[IdT]):
    """Block numbers 0 to `num_blocks`, exclusive, each free, private, cached or vacated.

    Numbers are handed out lowest first from a new pool, later the last one returned first.
    """

    __slots__ = ("_free", "_holds", "_num_by_owner", "_num_held_by_owner", "_owner", "_reusable", "num_blocks")

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._owner = bytearray(num_blocks)
        self._holds = [0] * num_blocks
        self._free = cast("list[IdT]", list(range(num_blocks - 1, -1, -1)))
        self._reusable: dict[IdT, None] = {}
        self._num_by_owner = [num_blocks, 0, 0, 0]
        self._num_held_by_owner = [0, 0, 0, 0]

    @property
    def num_free(self) -> int:
        """Blocks that `acquire` can hand out now."""
        return len(self._free) + len(self._reusable)

    @property
    def num_free_soon(self) -> int:
        """Blocks that nobody owns: free, or about to be."""
        return self._num_by_owner[FREE] + self._num_by_owner[VACATED]

    @property
    def num_owned(self) -> int:
        return self._num_by_owner[PRIVATE] + self._num_by_owner[CACHED]

    def owner(self, block_id: IdT) -> int:
        return self._owner[block_id]

    def is_held(self, block_id: IdT) -> bool:
        return self._holds[block_id] > 0

    def is_used(self, block_id: IdT) -> bool:
        """Somebody owns it, or a copy reads or writes it."""
        return self._owner[block_id] in (PRIVATE, CACHED) or self._holds[block_id] > 0

    def acquire(self) -> IdT:
        """Take a free block as private. The caller has looked at `num_free`."""
        block_id = self._free.pop() if self._free else self._reusable.popitem()[0]
        self._set_owner(block_id, PRIVATE)
        return block_id

    def cache(self, block_id: IdT) -> None:
        """A private block becomes a node's."""
        assert self._owner[block_id] == PRIVATE, f"block {block_id} is not private"
        self._set_owner(block_id, CACHED)

    def uncache(self, block_id: IdT) -> None:
        """A node's block becomes a request's own again."""
        assert self._owner[block_id] == CACHED, f"block {block_id} is not cached"
        self._set_owner(block_id, PRIVATE)

    def release(self, block_id: IdT) -> None:
        """The owner gives the block up: free now, or once nothing holds it."""
        assert self._owner[block_id] in (PRIVATE, CACHED), f"block {block_id} has no owner to release it"
        if self._holds[block_id]:
            self._set_owner(block_id, VACATED)
        else:
            self._set_owner(block_id, FREE)
            self._free.append(block_id)

    def vacate(self, block_id: IdT) -> None:
        """Release a block that is copied out before anything else of the next step runs.

        Whatever that step writes comes after the copy, so until `close_step` the block can be acquired at once.
        """
        assert self._owner[block_id] == CACHED, f"block {block_id} is not cached"
        assert not self._holds[block_id], f"block {block_id} is held by another copy"
        self._set_owner(block_id, VACATED)
        self._reusable[block_id] = None

    def close_step(self) -> tuple[IdT, ...]:
        """The step's copies are handed out. Vacated blocks that it did not take are held now; the caller lets go."""
        vacated = tuple(self._reusable)
        self._reusable.clear()
        for block_id in vacated:
            self.hold(block_id)
        return vacated

    def hold(self, block_id: IdT) -> None:
        """A copy that reads or writes the block has been planned."""
        owner = self._owner[block_id]
        assert owner != FREE, f"block {block_id} is free and cannot be copied"
        if not self._holds[block_id]:
            self._num_held_by_owner[owner] += 1
        self._holds[block_id] += 1

    def unhold(self, block_id: IdT) -> None:
        """That copy has finished, or will not be made."""
        assert self._holds[block_id] > 0, f"block {block_id} is not held"
        self._holds[block_id] -= 1
        if self._holds[block_id]:
            return
        self._num_held_by_owner[self._owner[block_id]] -= 1
        if self._owner[block_id] == VACATED:
            self._set_owner(block_id, FREE)
            self._free.append(block_id)

    def counts(self, *, pinned: int) -> PoolCounts:
        """Every block once; a held block counts as in transit, whoever owns it."""
        owned, held = self._num_by_owner, self._num_held_by_owner
        return PoolCounts(
            total=self.num_blocks,
            free=owned[FREE],
            cached=owned[CACHED] - held[CACHED],
            private=owned[PRIVATE] - held[PRIVATE],
            transit=owned[VACATED] + held[CACHED] + held[PRIVATE],
            pinned=pinned,
        )

    def letter(self, block_id: IdT) -> str:
        """f(ree), p(rivate), c(ached) or t(ransit)."""
        return "t" if self._holds[block_id] else "fpct"[self._owner[block_id]]

    def check(self) -> None:
        num_by_owner, num_held = [0, 0, 0, 0], [0, 0, 0, 0]
        for owner, holds in zip(self._owner, self._holds, strict=True):
            num_by_owner[owner] += 1
            num_held[owner] += holds > 0
        assert num_by_owner == self._num_by_owner, f"{num_by_owner} blocks by owner, counted {self._num_by_owner}"
        assert num_held == self._num_held_by_owner, f"{num_held} held blocks, counted {self._num_held_by_owner}"
        assert num_held[FREE] == 0, "a free block is held"
        num_waiting = num_held[VACATED] + len(self._reusable)
        assert num_waiting == num_by_owner[VACATED], "a vacated block that nothing holds is lost"
        assert len(set(self._free)) == len(self._free) == num_by_owner[FREE], "the free list is not the free blocks"
        assert all(self._owner[block_id] == FREE for block_id in self._free)
        assert all(self._owner[block_id] == VACATED and not self._holds[block_id] for block_id in self._reusable)

    def _set_owner(self, block_id: IdT, owner: int) -> None:
        before = self._owner[block_id]
        self._owner[block_id] = owner
        self._num_by_owner[before] -= 1
        self._num_by_owner[owner] += 1
        if self._holds[block_id]:
            self._num_held_by_owner[before] -= 1
            self._num_held_by_owner[owner] += 1
