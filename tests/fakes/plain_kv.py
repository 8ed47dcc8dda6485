"""A KV manager without any cache: the interface of `KVManager`, and nothing is ever shared, kept or moved.

What runs on it computes every token itself, so it is the "cache off" against which "cache on" is compared, and lets the
scheduler be tested alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from chatserve.sched.plan import Transfers
from chatserve.types import BlockId, RequestId, UserId


class Match(NamedTuple):
    num_cached: int = 0
    num_swapped: int = 0


class PlainAdmission(NamedTuple):
    num_cached: int = 0
    num_swapped_in: int = 0
    num_computed: int = 0
    block_ids: tuple[BlockId, ...] = ()


class Counts(NamedTuple):
    total: int
    free: int
    cached: int
    private: int
    transit: int
    pinned: int


class PlainKV:
    """Blocks belong to one running request or are free."""

    def __init__(self, *, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.counters: dict[str, int] = {}
        self._free = [BlockId(index) for index in reversed(range(num_blocks))]
        self._tables: dict[RequestId, list[BlockId]] = {}
        self._num_tokens: dict[RequestId, int] = {}

    def match(self, token_ids: Sequence[int], user: UserId) -> Match:
        return Match()

    def awaits_reading(self, token_ids: Sequence[int], user: UserId) -> bool:
        return False

    def admit(
        self,
        request_id: RequestId,
        token_ids: Sequence[int],
        user: UserId,
        num_shared_tokens: int,
        *,
        match: Match | None = None,
        ahead: bool = False,
    ) -> PlainAdmission | None:
        assert request_id not in self._tables
        self._tables[request_id] = []
        self._num_tokens[request_id] = 0
        return PlainAdmission()

    def is_resident(self, request_id: RequestId) -> bool:
        return True

    def grow(self, request_id: RequestId, num_tokens: int) -> tuple[BlockId, ...] | None:
        table = self._tables[request_id]
        num_new = -(-num_tokens // self.block_size) - len(table)
        if num_new > len(self._free):
            return None
        new = tuple(self._free.pop() for _ in range(num_new))
        table.extend(new)
        return new

    def commit(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        self._num_tokens[request_id] += len(token_ids)
        assert self._num_tokens[request_id] <= len(self._tables[request_id]) * self.block_size

    def finish(self, request_id: RequestId, keep_tokens: int | None = None) -> None:
        self._free.extend(self._tables.pop(request_id))
        del self._num_tokens[request_id]

    def preempt(self, request_id: RequestId) -> None:
        self.finish(request_id)

    def take_transfers(self) -> Transfers:
        return Transfers()

    def transfers_done(self, transfers: Transfers) -> None:
        assert not transfers

    def take_background(self, *, write_through: bool = True) -> Transfers:
        return Transfers()

    def hint(self, token_ids: Sequence[int], user: UserId) -> None:
        pass

    def release(self, token_ids: Sequence[int], user: UserId, num_kept_tokens: int = 0) -> None:
        pass

    def counts(self) -> tuple[Counts, Counts]:
        held = sum(len(table) for table in self._tables.values())
        return Counts(self.num_blocks, len(self._free), 0, held, 0, held), Counts(0, 0, 0, 0, 0, 0)

    def block_map(self) -> str:
        held = {block_id for table in self._tables.values() for block_id in table}
        return "".join("P" if block_id in held else "f" for block_id in range(self.num_blocks))

    def wasted_slots(self) -> int:
        return sum(
            len(table) * self.block_size - self._num_tokens[request_id] for request_id, table in self._tables.items()
        )

    def check(self) -> None:
        held = [block_id for table in self._tables.values() for block_id in table]
        assert sorted(held + self._free) == list(range(self.num_blocks))
