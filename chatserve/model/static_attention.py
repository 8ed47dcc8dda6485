"""Attention for captured graphs: steps of a fixed shape over buffers whose addresses never change.

A `StaticStep` is a `StepAttention` whose launches are the same for every batch that fits its shape; what differs lies
in device memory, and `send` puts it there before a replay. Its tokens have fixed places: decode row i is token i,
padded to `max_rows`, and the tokens of prompts follow from there, one row's after another's, padded to `max_tokens`.
Padding is stored nowhere and reads nothing; what attention gives it is unspecified, but rows never mix.

A step sends two copies from pinned rings: the plan, and positions, slots and new table entries in one. All steps of a
`static_steps` call share the tables and the memory of partial results: one stream, one step at a time. Must not know
models, requests or sampling. Imports triton, as `triton_attention` does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from chatserve_kernels.device_plan import DevicePlan
from chatserve_kernels.forest_decode import DecodeWorkspace, forest_decode, paged_prefill
from chatserve_kernels.paged_kv import update_tables
from chatserve_kernels.staging import PinnedRing
from chatserve_kernels.work import PlanError, rename_tables

from chatserve.model.step_parts import PagedStep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatserve_kernels.work import DecodePlan
    from numpy.typing import NDArray

    from chatserve.model.block_tables import BlockTables
    from chatserve.model.triton_attention import TritonAttention

MAX_CHANGES = 1024
"""Table entries that go with a step's other numbers; if more are new, as after the admission of a long history, they
are sent ahead."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a graph is captured for: so many decode rows, and `max_tokens` tokens of up to `max_prompts` other rows."""

    max_rows: int
    max_tokens: int = 0
    max_prompts: int = 0

    @property
    def num_tokens(self) -> int:
        return self.max_rows + self.max_tokens


class StaticBatch(NamedTuple):
    """Int64 [num_rows] each: rows of one token first."""

    rows: NDArray[np.int64]
    """Of the block tables."""
    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]


class StaticInputs:
    """Positions, slots and changes to the tables, for whichever step is next: one buffer, filled by one copy."""

    def __init__(self, tables: BlockTables, max_tokens: int) -> None:
        self.tables = tables
        self.buffer = torch.zeros(2 * (MAX_CHANGES + max_tokens), dtype=torch.int64, device=tables.device.device)
        self._ring = PinnedRing(len(self.buffer), torch.int64, self.buffer.device)
        self._entries = self.buffer[:MAX_CHANGES]
        self._block_ids = self.buffer[MAX_CHANGES : 2 * MAX_CHANGES]

    def views(self, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Where a step of so many tokens finds its positions and slots, each int64 [num_tokens]."""
        return self.buffer[2 * MAX_CHANGES :][:num_tokens], self.buffer[2 * MAX_CHANGES + num_tokens :][:num_tokens]

    def send(self, positions: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Positions and slots as long as the step, and the changes that `update` will make."""
        entries, block_ids = self.tables.take_changes()
        while len(entries) > MAX_CHANGES:
            self._stage(entries[:MAX_CHANGES], block_ids[:MAX_CHANGES])
            self._ring.send(self.buffer[: 2 * MAX_CHANGES])
            self.update()
            entries, block_ids = entries[MAX_CHANGES:], block_ids[MAX_CHANGES:]
        staged = self._stage(entries, block_ids)
        num_tokens = len(positions)
        staged[2 * MAX_CHANGES :][:num_tokens] = positions
        staged[2 * MAX_CHANGES + num_tokens :][:num_tokens] = slots
        self._ring.send(self.buffer[: 2 * (MAX_CHANGES + num_tokens)])

    def update(self) -> None:
        """Make the changes that are in the buffer; making them twice does no harm."""
        update_tables(self.tables.device, self._entries, self._block_ids)

    def _stage(self, entries: NDArray[np.int64], block_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        staged: NDArray[np.int64] = self._ring.acquire(len(self.buffer))
        staged[:MAX_CHANGES] = -1
        staged[: len(entries)] = entries
        staged[MAX_CHANGES:][: len(block_ids)] = block_ids
        return staged


class StaticStep(PagedStep):
    """`StepAttention` for one shape of graph.

    To capture: `prepare_capture`, and inside the graph `begin`, then the model over `positions`. To run a batch:
    `send`, then replay the graph that was captured for the variant that it returns.
    """

    def __init__(
        self,
        backend: TritonAttention,
        inputs: StaticInputs,
        shape: StepShape,
        windows: Sequence[int | None],
    ) -> None:
        self.shape = shape
        self._backend = backend
        self._inputs = inputs
        self._windows = tuple(windows)
        self._block_size = backend.block_size
        self.positions, self.slots = inputs.views(shape.num_tokens)
        self._decode_planner, configs = backend.decode_planner(shape.max_rows)
        self._decode_plans = {
            window: DevicePlan(self._decode_planner.layout, configs, backend.device) for window in self._windows
        }
        self.layouts = [self._decode_planner.layout]
        if shape.max_tokens:
            self._prefill_planner, configs = backend.prefill_planner(shape.max_tokens, shape.max_prompts)
            self._prefill_plans = {
                window: DevicePlan(self._prefill_planner.layout, configs, backend.device) for window in self._windows
            }
            self.layouts.append(self._prefill_planner.layout)
        self.variants = (False, True) if shape.max_rows > backend.small_rows else (False,)
        """Of `with_wide`: few rows never share widely."""
        self._planned: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
        """Rows and their versions, as the decode planner knows them."""
        self._is_idle = False
        """Whether the plan on the device is one of no rows."""
        self.workspace: DecodeWorkspace | None = None

    def prepare_capture(self, *, with_wide: bool) -> None:
        """Send a step of nothing but padding, for the launches that follow to be captured as this variant."""
        assert with_wide in self.variants
        nothing = np.zeros(0, dtype=np.int64)
        self._send(StaticBatch(nothing, nothing, nothing), with_wide=with_wide)

    def begin(self) -> None:
        """Bring the tables up to date: the first launch of the graph."""
        self._inputs.update()

    def send(self, batch: StaticBatch) -> bool:
        """Plan a batch, and put all of it where the graph reads it, in the order of the current stream.

        Blocks of its rows' tables must exist up to the last new token. Returns the `with_wide` of the graph to replay.

        Raises:
            PlanError: the batch does not fit the shape.
        """
        return self._send(batch, with_wide=None if len(self.variants) > 1 else False)

    def _send(self, batch: StaticBatch, *, with_wide: bool | None) -> bool:
        shape = self.shape
        rows, starts, lengths = batch
        num_decodes = int((lengths == 1).sum())
        if (lengths[:num_decodes] != 1).any():
            raise PlanError("expected rows of one token before all others")
        num_prompts, num_new = len(rows) - num_decodes, int(lengths[num_decodes:].sum())
        if num_decodes > shape.max_rows or num_prompts > shape.max_prompts or num_new > shape.max_tokens:
            raise PlanError(f"expected a batch within {shape}, got {num_decodes} rows, {num_new} of {num_prompts} more")
        positions = np.zeros(shape.num_tokens, dtype=np.int64)
        slots = np.full(shape.num_tokens, -1, dtype=np.int64)
        positions[:num_decodes] = starts[:num_decodes]
        slots[:num_decodes] = self._slots(rows[:num_decodes], starts[:num_decodes])
        with_wide = self._send_decodes(rows[:num_decodes], starts[:num_decodes] + 1, with_wide=with_wide)
        if shape.max_tokens:
            own, firsts, counts = rows[num_decodes:], starts[num_decodes:], lengths[num_decodes:]
            new = slice(shape.max_rows, shape.max_rows + num_new)
            positions[new] = np.arange(num_new) + np.repeat(firsts - (np.cumsum(counts) - counts), counts)
            slots[new] = self._slots(np.repeat(own, counts), positions[new])
            for window, device_plan in self._prefill_plans.items():
                plan = self._prefill_planner.plan(firsts, counts, window=window, num_padding=shape.max_tokens - num_new)
                device_plan.send(rename_tables(self._prefill_planner.layout, plan, own))
        self._inputs.send(positions, slots)
        return with_wide

    def _send_decodes(self, rows: NDArray[np.int64], lengths: NDArray[np.int64], *, with_wide: bool | None) -> bool:
        tables, planner = self._inputs.tables, self._decode_planner
        if self._is_idle and not len(rows) and not with_wide:
            return False  # what lies on the device says so already, as it does from turn to turn of one session
        versions = tables.versions[rows]
        same = (
            self._planned is not None
            and np.array_equal(rows, self._planned[0])
            and np.array_equal(versions, self._planned[1])
        )
        # The tables are looked at only where rows are new, and only as far as they go.
        known = tables.host if same else tables.host[rows, : int(tables.num_blocks[rows].max(initial=1))]
        self._planned, self._is_idle = None, False
        for window, device_plan in self._decode_plans.items():
            plan: DecodePlan = planner.plan(
                known,
                lengths,
                window=window,
                same_rows=same,
                num_padding=self.shape.max_rows - len(rows),
                with_wide=with_wide,
            )
            device_plan.send(rename_tables(planner.layout, plan, rows))
            same, with_wide = True, plan.with_wide
        self._planned = rows.copy(), versions
        assert with_wide is not None
        self._is_idle = not len(rows) and not with_wide
        return with_wide

    def _slots(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        tables = self._inputs.tables
        column, in_block = np.divmod(positions, self._block_size)
        blocks = tables.host.reshape(-1).take(rows * tables.width + column)
        return blocks * np.int64(self._block_size) + in_block

    def attend_stored(
        self,
        layer: int,
        query: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        if window not in self._decode_plans:
            raise PlanError(f"expected a window of {', '.join(map(str, self._windows))}, got {window}")
        assert self.workspace is not None
        kv = self._backend.layers[layer]
        tables, num_rows = self._inputs.tables.device, self.shape.max_rows
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        forest_decode(
            query[:num_rows], kv.keys, kv.values, tables, self._decode_plans[window], self.workspace,
            scale=scale, softcap=softcap, key_scale=kv.key_scale, value_scale=kv.value_scale, out=out[:num_rows],
        )  # fmt: skip
        if self.shape.max_tokens:
            paged_prefill(
                query[num_rows:], kv.keys, kv.values, tables, self._prefill_plans[window], self.workspace,
                scale=scale, softcap=softcap, key_scale=kv.key_scale, value_scale=kv.value_scale, out=out[num_rows:],
            )  # fmt: skip
        return out


def static_steps(
    backend: TritonAttention,
    tables: BlockTables,
    shapes: Sequence[StepShape],
    windows: Sequence[int | None] = (None,),
) -> list[StaticStep]:
    """A step for each shape. `windows`: those of the model's layers, None for layers without one."""
    inputs = StaticInputs(tables, max(shape.num_tokens for shape in shapes))
    steps = [StaticStep(backend, inputs, shape, windows) for shape in shapes]
    layouts = [layout for step in steps for layout in step.layouts]
    largest = replace(
        layouts[0],
        max_rows=max(layout.max_rows for layout in layouts),
        max_partials=max(layout.max_partials for layout in layouts),
    )
    workspace = backend.workspace(largest)
    for step in steps:
        step.workspace = workspace
    return steps
