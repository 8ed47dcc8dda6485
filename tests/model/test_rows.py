"""Rows laid end to end say the same as the requests themselves, token by token."""

from __future__ import annotations

import random
from typing import NamedTuple

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chatserve.model.block_tables import BlockTables
from chatserve.model.rows import BatchRows
from chatserve.sched.plan import Admitted, Row
from chatserve.types import BlockId, RequestId, SamplingParams

BLOCK = 4
GREEDY = SamplingParams(temperature=0.0, seed=0)


class _Known(NamedTuple):
    given: list[int]
    blocks: list[int]


def make_rows(max_slots: int, max_blocks: int) -> BatchRows:
    return BatchRows(BlockTables(max_slots, max_blocks, torch.device("cpu")))


def admitted(name: str, ids: list[int], blocks: list[int], num_computed: int = 0) -> Admitted:
    return Admitted(RequestId(name), tuple(ids), len(ids), num_computed, tuple(map(BlockId, blocks)), GREEDY)


@given(seed=st.integers(0, 10_000), num_steps=st.integers(1, 12))
@settings(max_examples=80, deadline=None)
def test_a_batch_is_its_rows_one_after_the_other(seed: int, num_steps: int) -> None:
    """Random requests come, compute chunks, sample and leave; every array is held against the plain lists."""
    rng = random.Random(seed)
    rows = make_rows(max_slots=4, max_blocks=40)
    known: dict[str, _Known] = {}
    done: dict[str, int] = {}
    sampled: dict[str, int] = {}
    slots: dict[str, int] = {}
    for number in range(num_steps):
        for name in [name for name in known if rng.random() < 0.1]:
            assert rows.remove(RequestId(name)) == slots.pop(name)
            del known[name], done[name], sampled[name]
        while len(known) < 4 and rng.random() < 0.6:
            name = f"r{number}.{len(known)}"
            ids = [rng.randrange(1, 99) for _ in range(rng.randrange(1, 20))]
            sampled[name], done[name] = 0, rng.choice([0, rng.randrange(len(ids))])
            known[name] = _Known(ids, [rng.randrange(500) for _ in range(done[name] // BLOCK + 1)])
            slots[name] = rows.admit(admitted(name, ids, known[name].blocks, done[name]))
        plan = []
        for name, its in known.items():
            left = len(its.given) + sampled[name] - done[name]
            if left == 0 or rng.random() < 0.2:
                continue
            count = rng.randint(1, left)
            new = [rng.randrange(500) for _ in range(-(-(done[name] + count) // BLOCK) - len(its.blocks))]
            its.blocks.extend(new)
            plan.append(Row(RequestId(name), done[name], count, tuple(map(BlockId, new)), sample=count == left))
        if not plan:
            continue
        batch = rows.lay_out(plan)
        packed = rows.packed(batch)
        rows.check(500)
        order = sorted(plan, key=lambda row: row.num_tokens > 1)
        token = 0
        last: dict[str, int] = {}
        for index, row in enumerate(order):
            its = known[row.request_id]
            assert batch.slots[index] == slots[row.request_id]
            assert packed.tables[index, : len(its.blocks)].tolist() == its.blocks
            assert (packed.starts[index], packed.lengths[index]) == (row.start, row.num_tokens)
            for position in range(row.start, row.start + row.num_tokens):
                assert batch.positions[token] == position
                if position < len(its.given):
                    assert (batch.input_ids[token], batch.pooled[token]) == (its.given[position], -1)
                else:
                    assert batch.pooled[token] == slots[row.request_id]
                last[row.request_id] = token
                token += 1
            done[row.request_id] += row.num_tokens
        assert token == len(batch.input_ids)
        drawn = [row for row in plan if row.sample]
        assert batch.logit_rows.tolist() == [last[row.request_id] for row in drawn]
        assert batch.sampled_slots.tolist() == [slots[row.request_id] for row in drawn]
        assert batch.sampled_positions.tolist() == [row.start + row.num_tokens for row in drawn]
        assert batch.is_mixed == any(row.num_tokens > 1 for row in plan)
        for row in drawn:
            sampled[row.request_id] += 1


def test_a_slot_is_used_again_and_tells_nothing_of_its_past() -> None:
    rows = make_rows(max_slots=1, max_blocks=3)
    rows.admit(admitted("a", [5, 6, 7, 8, 9], [3, 4]))
    rows.lay_out([Row(RequestId("a"), 0, 5, (), sample=True)])
    rows.remove(RequestId("a"))
    rows.admit(admitted("b", [1, 2], [2]))
    batch = rows.lay_out([Row(RequestId("b"), 0, 2, (), sample=True)])
    assert rows.packed(batch).tables.tolist() == [[2]]
    assert batch.input_ids.tolist() == [1, 2]
    assert np.all(batch.pooled == -1)
    assert rows.remove(RequestId("a")) is None
