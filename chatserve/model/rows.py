"""The requests of the batch as numpy keeps them: each in a slot, from its admission until it is forgotten.

Turns the rows of a plan into the flat arrays that a step needs, without a Python loop over tokens or blocks. A sampled
token is counted when its row is laid out, though only the device may know its id by then: ids of tokens that were not
sampled here come from this side, the others from the device's token pool, under the request's slot. Knows no device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from chatserve.model.attention_plan import PackedBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from chatserve.model.block_tables import BlockTables
    from chatserve.sched.plan import Admitted, Row
    from chatserve.types import RequestId

_NO_IDS = np.zeros(0, dtype=np.int64)


class Batch(NamedTuple):
    """One step's rows, laid end to end: first those of one token, then the others, each in the plan's order."""

    slots: NDArray[np.int64]
    """[num_rows]; likewise"""
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]
    input_ids: NDArray[np.int64]
    """[num_tokens]; 0 where the id comes from the token pool."""
    pooled: NDArray[np.int64]
    """[num_tokens]: the slot whose last sampled token this is, or -1."""
    positions: NDArray[np.int64]
    """[num_tokens]"""
    logit_rows: NDArray[np.int64]
    """[num_sampled], indices into the tokens, in the order of the plan's rows."""
    sampled_slots: NDArray[np.int64]
    """[num_sampled]"""
    sampled_positions: NDArray[np.int64]
    """[num_sampled]: the places that the new tokens take in their sequences."""
    is_mixed: bool
    """Whether any row has more than one token."""


class BatchRows:
    """As many requests as `tables` has rows; a request's slot is its row there."""

    def __init__(self, tables: BlockTables) -> None:
        self.tables = tables
        max_slots = len(tables.host)
        self._slots: dict[RequestId, int] = {}
        self._token_ids = [_NO_IDS] * max_slots
        self._num_given = np.zeros(max_slots, dtype=np.int64)
        """Tokens whose ids came with the request."""
        self._num_skipped = np.zeros(max_slots, dtype=np.int64)
        """Of those the ones that are not kept: their KV came with the request, too."""
        self._num_tokens = np.zeros(max_slots, dtype=np.int64)

    def admit(self, admitted: Admitted) -> int:
        """Take a request in; its slot."""
        assert admitted.request_id not in self._slots, f"{admitted.request_id} is here already"
        slot = self._slots[admitted.request_id] = self.tables.assign(admitted.block_ids)
        # No row asks for ids whose KV is there, which are most of a long conversation's.
        self._token_ids[slot] = np.array(admitted.token_ids[admitted.num_computed :], dtype=np.int64)
        self._num_skipped[slot] = admitted.num_computed
        self._num_given[slot] = self._num_tokens[slot] = len(admitted.token_ids)
        return slot

    def remove(self, request_id: RequestId) -> int | None:
        """Forget a request, if it is here; the slot it had."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._token_ids[slot] = _NO_IDS
            self.tables.release(slot)
        return slot

    def lay_out(self, rows: Sequence[Row]) -> Batch:
        """Lengthen tables, count the tokens that will be sampled, and lay the rows end to end."""
        num_rows = len(rows)
        slots = np.fromiter((self._slots[row.request_id] for row in rows), np.int64, num_rows)
        starts = np.fromiter((row.start for row in rows), np.int64, num_rows)
        lengths = np.fromiter((row.num_tokens for row in rows), np.int64, num_rows)
        sample = np.fromiter((row.sample for row in rows), np.bool_, num_rows)
        for index, row in enumerate(rows):
            if row.new_block_ids:
                self.tables.extend(int(slots[index]), row.new_block_ids)
        ends = starts + lengths
        assert (lengths > 0).all()
        assert (np.where(sample, ends == self._num_tokens[slots], ends <= self._num_tokens[slots])).all()

        long = lengths > 1
        order = np.argsort(long, kind="stable")
        places = np.empty(num_rows, dtype=np.int64)  # each row's last token in the batch, in the plan's order
        places[order] = np.cumsum(lengths[order]) - 1
        input_ids, pooled, positions = self._tokens(slots[order], starts[order], lengths[order])
        self._num_tokens[slots[sample]] += 1
        return Batch(
            slots=slots[order],
            starts=starts[order],
            lengths=lengths[order],
            input_ids=input_ids,
            pooled=pooled,
            positions=positions,
            logit_rows=places[sample],
            sampled_slots=slots[sample],
            sampled_positions=ends[sample],
            is_mixed=bool(long.any()),
        )

    def packed(self, batch: Batch) -> PackedBatch:
        """The batch with its tables, as an `AttentionBackend` prepares it."""
        width = int(self.tables.num_blocks[batch.slots].max())
        return PackedBatch(batch.starts, batch.lengths, self.tables.host[batch.slots, :width].astype(np.int64))

    def check(self, num_blocks: int) -> None:
        """Every table names blocks that exist, and every slot has one owner."""
        self.tables.check()
        slots = list(self._slots.values())
        assert len(set(slots)) == len(slots)
        for slot in slots:
            table = self.tables.host[slot, : self.tables.num_blocks[slot]]
            assert ((table >= 0) & (table < num_blocks)).all()
            assert self._num_given[slot] == self._num_skipped[slot] + len(self._token_ids[slot])
            assert self._num_given[slot] <= self._num_tokens[slot]

    def _tokens(
        self, slots: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        ends = np.cumsum(lengths)
        firsts = ends - lengths
        num_tokens = int(ends[-1])
        positions = np.arange(num_tokens) + np.repeat(starts - firsts, lengths)
        input_ids = np.zeros(num_tokens, dtype=np.int64)
        pooled = np.full(num_tokens, -1, dtype=np.int64)
        given = self._num_given[slots]
        for index in np.flatnonzero(starts < given).tolist():
            start, first = int(starts[index]), int(firsts[index])
            count = min(int(lengths[index]), int(given[index]) - start)
            kept = start - int(self._num_skipped[slots[index]])
            assert kept >= 0, f"token {start} is computed already"
            input_ids[first : first + count] = self._token_ids[slots[index]][kept : kept + count]
        # Of the tokens that were sampled here a row computes the last one only.
        newest = starts + lengths > given
        assert (np.maximum(starts, given)[newest] == (starts + lengths)[newest] - 1).all()
        pooled[(ends - 1)[newest]] = slots[newest]
        return input_ids, pooled, positions
