"""Block tables: rows are stable, changes are told once, and the last of them counts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from chatserve.model.block_tables import ALIGNMENT, BlockTables

CPU = torch.device("cpu")


def apply(tables: BlockTables) -> None:
    changes = tables.take_changes()
    tables.device.view(-1)[torch.from_numpy(changes.entries)] = torch.from_numpy(changes.block_ids).int()


def test_the_device_has_what_the_host_has_however_rows_come_and_go() -> None:
    rng = np.random.default_rng(3)
    tables = BlockTables(5, 20, CPU)
    assert tables.width % ALIGNMENT == 0
    running: dict[int, list[int]] = {}
    for _ in range(300):
        match int(rng.integers(4)):
            case 0 if len(running) < 5:
                blocks = rng.integers(1, 99, int(rng.integers(6))).tolist()
                row = tables.assign(blocks)
                assert row not in running
                running[row] = blocks
            case 1 if running:
                row = int(rng.choice(list(running)))
                tables.release(row)
                del running[row]
            case 2 if running:
                row = int(rng.choice(list(running)))
                blocks = rng.integers(1, 99, int(rng.integers(3))).tolist()
                if len(running[row]) + len(blocks) <= 20:
                    tables.extend(row, blocks)
                    running[row] += blocks
            case 3:
                apply(tables)
                assert tables.num_changes == 0
                for row, blocks in running.items():
                    assert tables.device[row, : len(blocks)].tolist() == blocks
        tables.check()
        for row, blocks in running.items():
            assert tables.host[row, : tables.num_blocks[row]].tolist() == blocks


def test_an_entry_is_told_once_and_as_it_is_now() -> None:
    tables = BlockTables(1, 4, CPU)
    tables.release(tables.assign([7, 8]))
    tables.assign([9])
    changes = tables.take_changes()
    assert dict(zip(changes.entries.tolist(), changes.block_ids.tolist(), strict=True)) == {0: 9, 1: 8}


def test_a_row_has_a_new_version_when_it_is_another_request_s() -> None:
    tables = BlockTables(1, 4, CPU)
    row = tables.assign([1])
    before = int(tables.versions[row])
    tables.extend(row, [2])
    assert tables.versions[row] == before
    tables.release(row)
    assert tables.assign([1]) == row
    assert tables.versions[row] != before


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    tables = BlockTables(1, 16, CPU)
    with pytest.raises(IndexError, match="16 blocks, not 17"):
        tables.assign(list(range(17)))
    row = tables.assign([1])
    with pytest.raises(IndexError, match="all 1 block tables are in use"):
        tables.assign([])
    with pytest.raises(IndexError, match="16 blocks, not 18"):
        tables.extend(row, list(range(17)))
    tables.check()
    assert tables.num_blocks[row] == 1
