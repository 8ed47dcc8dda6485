"""Steps of a fixed shape equal the torch implementation, whatever came before in the same buffers.

Where there is a GPU each step is a replay of a captured graph; elsewhere the same launches are interpreted. Pools are
full of NaN where nobody has written, and old table entries name blocks of others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
import torch

from chatserve.model.attention import PackedBatch, StoredAttention, TorchAttention
from chatserve.model.block_tables import BlockTables
from chatserve.model.kv_dtype import FP8
from chatserve.model.kv_storage import KVStorage
from chatserve.model.shapes import KVShape

triton_attention = pytest.importorskip("chatserve.model.triton_attention", reason="Triton is made for Linux only")
static_attention = pytest.importorskip("chatserve.model.static_attention", reason="Triton is made for Linux only")

from chatserve_kernels.forest import CostModel  # noqa: E402 - after the check that it can be imported
from chatserve_kernels.work import PlanError  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

    from chatserve.model.static_attention import StaticStep, StepShape

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYERS, KV_HEADS, GROUP, HEAD_DIM, BLOCK = 2, 2, 3, 16, 4
WINDOWS = (None, 9)
NUM_BLOCKS = 400
MAX_CONTEXT = 160


class Sequence(NamedTuple):
    row: int
    num_tokens: int


class Graph:
    """A step's launches for both variants: captured and replayed on a GPU, else made anew each time."""

    def __init__(self, step: StaticStep) -> None:
        self.step = step
        tokens = step.shape.num_tokens
        self.query = torch.zeros(LAYERS, tokens, KV_HEADS * GROUP, HEAD_DIM, device=DEVICE)
        self.key, self.value = (torch.zeros(LAYERS, tokens, KV_HEADS, HEAD_DIM, device=DEVICE) for _ in range(2))
        self.outputs: dict[bool, list[torch.Tensor]] = {}
        self.replays: dict[bool, Callable[[], None]] = {}
        for with_wide in step.variants:
            step.prepare_capture(with_wide=with_wide)
            self.launch(with_wide=with_wide)
            if DEVICE.type == "cuda":
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    self.launch(with_wide=with_wide)
                self.replays[with_wide] = graph.replay

    def launch(self, *, with_wide: bool) -> None:
        self.step.begin()
        self.outputs[with_wide] = [
            self.step.attend(layer, self.query[layer], self.key[layer], self.value[layer], scale=0.3, window=window)
            for layer, window in enumerate(WINDOWS)
        ]

    def run(self, *, with_wide: bool) -> list[torch.Tensor]:
        if DEVICE.type == "cuda":
            self.replays[with_wide]()
        else:
            self.launch(with_wide=with_wide)
        return self.outputs[with_wide]


class World:
    """Sequences that grow step by step, in two pools of the same KV."""

    def __init__(self, shapes: list[StepShape], *, max_rows: int = 24, kv_dtype: torch.dtype = torch.float32) -> None:
        shape = KVShape(num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=BLOCK)
        self.pools = [
            KVStorage(
                shape,
                num_blocks=NUM_BLOCKS,
                num_host_blocks=0,
                dtype=kv_dtype,
                device=DEVICE,
                compute_dtype=torch.float32,
                scales=[(0.4, 1.7)] * LAYERS,
            )
            for _ in range(2)
        ]
        for pool in self.pools:
            pool.device_pool.fill_(torch.nan)
        self.torch = TorchAttention(self.pools[0])
        cost = CostModel(min_tokens=1, partial_tokens=0.0)  # the few tokens of a test are worth sharing
        backend = triton_attention.TritonAttention(self.pools[1], KV_HEADS * GROUP, cost=cost)
        self.tables = BlockTables(max_rows, MAX_CONTEXT // BLOCK, DEVICE)
        self.graphs = [
            Graph(step) for step in static_attention.static_steps(backend, self.tables, shapes, windows=WINDOWS)
        ]
        self.generator = torch.Generator().manual_seed(7)
        self.free = np.random.default_rng(7).permutation(NUM_BLOCKS).tolist()
        self.sequences: dict[int, Sequence] = {}

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(DEVICE)

    def admit(self, num_tokens: int, shared: list[int] | None = None) -> int:
        """A sequence with so many tokens of history, the first blocks of which may be others'."""
        blocks = list(shared or [])
        while len(blocks) * BLOCK < num_tokens:
            blocks.append(self.free.pop())
            part = self.random(LAYERS, 2, KV_HEADS, BLOCK, HEAD_DIM)
            part[:, :, :, max(0, num_tokens - (len(blocks) - 1) * BLOCK) :] = torch.nan
            for pool in self.pools:
                pool.device_pool[blocks[-1]] = part
        row = self.tables.assign(blocks)
        self.sequences[row] = Sequence(row, num_tokens)
        return row

    def blocks(self, num_tokens: int) -> list[int]:
        row = self.admit(num_tokens)
        blocks: list[int] = self.tables.host[row, : num_tokens // BLOCK].tolist()
        self.leave(row)
        return blocks

    def leave(self, row: int) -> None:
        """Its blocks stay as they are, and its table row is for whoever comes next."""
        del self.sequences[row]
        self.tables.release(row)

    def step(self, graph: Graph, lengths: dict[int, int]) -> bool:
        """Compute so many new tokens of each row, by both; decode rows must come first."""
        for row, length in lengths.items():
            missing = -(-(self.sequences[row].num_tokens + length) // BLOCK) - int(self.tables.num_blocks[row])
            self.tables.extend(row, [self.free.pop() for _ in range(missing)])
        rows, counts = (np.array(list(each), dtype=np.int64) for each in (lengths, lengths.values()))
        starts = np.array([self.sequences[row].num_tokens for row in lengths], dtype=np.int64)
        with_wide = graph.step.send(static_attention.StaticBatch(rows, starts, counts))
        num_decodes = int((counts == 1).sum())
        shape = graph.step.shape
        where = torch.cat([torch.arange(num_decodes), shape.max_rows + torch.arange(int(counts[num_decodes:].sum()))])
        where = where.to(DEVICE)
        for buffer in (graph.query, graph.key, graph.value):
            buffer.fill_(torch.nan)
            buffer[:, where] = self.random(LAYERS, len(where), *buffer.shape[2:])
        outputs = graph.run(with_wide=with_wide)
        positions = [start + index for start, count in zip(starts, counts, strict=True) for index in range(count)]
        assert graph.step.positions[where].tolist() == positions
        if lengths:
            reference = self.torch.prepare(PackedBatch(starts, counts, self.tables.host[rows].astype(np.int64)))
        for layer, window in enumerate(WINDOWS if lengths else ()):
            given = (each[layer, where] for each in (graph.query, graph.key, graph.value))
            expected = reference.attend(layer, *given, scale=0.3, window=window)
            error = (outputs[layer][where].double() - expected.double()).norm() / expected.double().norm()
            assert float(error) < 1e-5, f"layer {layer}"
        theirs, ours = (pool.device_pool.float().nan_to_num(7.0) for pool in self.pools)
        assert torch.equal(theirs, ours), "the same slots are written, and no others"
        for row, length in lengths.items():
            self.sequences[row] = Sequence(row, self.sequences[row].num_tokens + length)
        self.tables.check()
        return with_wide


def decode(*rows: int) -> dict[int, int]:
    return dict.fromkeys(rows, 1)


def test_rows_come_grow_and_go() -> None:
    world = World([static_attention.StepShape(5)])
    (graph,) = world.graphs
    rows = [world.admit(length) for length in (0, 3, 4, 17, 60)]
    for _ in range(2):
        world.step(graph, decode(*rows))
    world.leave(rows.pop(1))
    world.step(graph, decode(*rows))
    rows.append(world.admit(33))  # in the row that became free
    world.step(graph, decode(*rows[::-1]))
    world.step(graph, decode(rows[0]))
    world.step(graph, {})


def test_rows_that_share_widely_take_the_other_graph() -> None:
    world = World([static_attention.StepShape(8)])
    (graph,) = world.graphs
    shared = world.blocks(24)
    rows = [world.admit(24 + 3 * index, shared) for index in range(6)]
    alone = [world.admit(5)]
    assert graph.step.variants == (False, True)
    assert world.step(graph, decode(*alone)) is False
    assert world.step(graph, decode(*rows, *alone)) is True
    assert world.step(graph, decode(*rows, *alone)) is True
    assert world.step(graph, decode(*rows[:1], *alone)) is False


@pytest.mark.parametrize("kv_dtype", [torch.float32, FP8])
def test_prompts_beside_decoding_rows(kv_dtype: torch.dtype) -> None:
    world = World([static_attention.StepShape(4, 24, 3), static_attention.StepShape(4)], kv_dtype=kv_dtype)
    mixed, plain = world.graphs
    shared = world.blocks(12)
    rows = [world.admit(9), world.admit(30)]
    prompts = [world.admit(0), world.admit(12, shared)]
    world.step(mixed, decode(*rows) | {prompts[0]: 13, prompts[1]: 7})
    world.step(mixed, {prompts[0]: 2})
    world.step(plain, decode(*rows, *prompts))
    world.step(mixed, decode(*rows, *prompts))
    world.step(mixed, decode(rows[1]) | {rows[0]: 24})


def test_more_changes_than_a_step_carries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static_attention, "MAX_CHANGES", 5)
    world = World([static_attention.StepShape(3)])
    rows = [world.admit(length) for length in (70, 9, 41)]
    assert world.tables.num_changes > 25
    world.step(world.graphs[0], decode(*rows))
    world.step(world.graphs[0], decode(*rows))
    assert world.tables.num_changes == 0


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ([1, 1, 1], "got 3 rows"),
        ([1, 9], "9 of 1 more"),
        ([2, 2], "4 of 2 more"),
        ([2, 1], "rows of one token before all others"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(lengths: list[int], words: str) -> None:
    world = World([static_attention.StepShape(2, 8, 1)])
    rows = [world.admit(4) for _ in lengths]
    batch = static_attention.StaticBatch(np.array(rows), np.full(len(rows), 4), np.array(lengths))
    with pytest.raises(PlanError, match=words):
        world.graphs[0].step.send(batch)
    with pytest.raises(PlanError, match="expected a window of None, 9, got 3"):
        world.graphs[0].step.attend_stored(0, world.graphs[0].query[0], scale=1.0, window=3)


def test_keys_may_be_stored_by_somebody_else() -> None:
    world = World([static_attention.StepShape(2)])
    step = world.graphs[0].step
    assert isinstance(step, StoredAttention)
    keys, values = step.caches(1)
    assert keys.shape == values.shape == (NUM_BLOCKS, KV_HEADS, BLOCK, HEAD_DIM)
    row = world.admit(5)
    step.send(static_attention.StaticBatch(np.array([row]), np.array([5]), np.array([1])))
    assert step.slots.tolist() == [int(world.tables.host[row, 1]) * BLOCK + 1, -1]
