"""Runs batches on a GPU without waiting for it: small steps as captured graphs, long ones kernel by kernel.

A step is two replays. The *body* computes KV and the features of the rows that sample; it is captured for a few shapes
and for both ways in which attention may share. The *head* turns features into tokens; it is captured for a few numbers
of rows, and greedy and drawn rows run in the same one. So a step's logits cost what its sampled rows cost, whatever the
shape of its body. Inputs go to fixed places from pinned rings; ids that the device alone knows are gathered from the
token pool, which lies in one buffer with the ids that come from the host.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from chatserve_kernels.staging import PinnedRing

from chatserve.model.attention_plan import PackedBatch
from chatserve.model.device_sampling import WORDS, DeviceSampling
from chatserve.model.graphs import GraphShape, row_classes
from chatserve.model.static_attention import StaticBatch, StepShape, static_steps
from chatserve.model.triton_attention import TritonAttention

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chatserve.model.attention import AttentionBackend
    from chatserve.model.graphs import Replays
    from chatserve.model.rows import Batch, BatchRows
    from chatserve.model.shapes import CausalModel
    from chatserve.model.static_attention import StaticStep
    from chatserve.sched.plan import Admitted

_log = logging.getLogger(__name__)

_PROGRESS_S = 2.0


class _Body(NamedTuple):
    """A shape of step that is replayed, and where it reads its inputs."""

    shape: GraphShape
    attention: StaticStep
    sources: torch.Tensor
    """int64 [num_tokens], where in the id buffer each token's id is."""
    logit_rows: torch.Tensor
    """int64 [rows that may sample]"""


class DeviceExecutor:
    """See `Executor`. `shapes` are those of steps to replay, the largest first; a step that fits none runs eagerly."""

    def __init__(
        self,
        model: CausalModel,
        backend: AttentionBackend,
        rows: BatchRows,
        shapes: Sequence[GraphShape],
        replays: Replays,
    ) -> None:
        self.model = model
        self.rows = rows
        self._backend = backend
        self._replays = replays
        self._device = rows.tables.device.device
        max_slots = len(rows.tables.host)
        self._sampling = DeviceSampling(max_slots, model.info.vocab_size, self._device)
        self._head_rows = row_classes(max_slots)
        self._first_id = max_slots + 1
        most_tokens = max((shape.num_tokens for shape in shapes), default=0)
        self._ids = self._words(self._first_id + 3 * most_tokens)
        """The token pool, a slot for padding, ids from the host, then the rest of a body's inputs."""
        self._token_pool = self._ids[: self._first_id]
        self._head_words = self._words(WORDS * max_slots)
        self._sampled = self._words(max_slots)
        self._staging = PinnedRing(4 * most_tokens + WORDS * max_slots, torch.int64, self._device, num_buffers=6)
        self._features = self._first_features()
        self._bodies = self._make_bodies(shapes)
        self.last_graph_bytes = 0
        """Device memory that the last body's graph took, in a pool that was large enough already."""

    def _words(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int64, device=self._device)

    # --- capture ------------------------------------------------------------------------------------------------------

    def capture(self) -> None:
        """Capture everything on the current stream, saying how far it is."""
        started = time.monotonic()
        say_at = started + _PROGRESS_S
        largest_first = reversed(self._bodies)
        pending = [(body, with_wide) for body in largest_first for with_wide in body.attention.variants]
        for done, (body, with_wide) in enumerate(pending):
            body.attention.prepare_capture(with_wide=with_wide)
            free = _free_bytes(self._device)
            self._replays.capture((body.shape, with_wide), partial(self._launch_body, body))
            self.last_graph_bytes = free - _free_bytes(self._device)
            if time.monotonic() > say_at:
                say_at = time.monotonic() + _PROGRESS_S
                _log.info("graphs: %d of %d captured", done + 1, len(pending) + len(self._head_rows))
        for num_rows in reversed(self._head_rows):
            self._send_head(None, num_rows)
            self._replays.capture(num_rows, partial(self._launch_head, num_rows))
        seconds = time.monotonic() - started
        _log.info("graphs: %d captured in %.1f s", len(pending) + len(self._head_rows), seconds)

    def _make_bodies(self, shapes: Sequence[GraphShape]) -> list[_Body]:
        if not shapes or not isinstance(self._backend, TritonAttention):
            return []
        steps = static_steps(
            self._backend, self.rows.tables, [StepShape(*shape) for shape in shapes], self.model.info.windows
        )
        bodies = []
        for shape, attention in zip(shapes, steps, strict=True):
            sources = self._ids[self._first_id + shape.num_tokens :][: shape.num_tokens]
            most_sampled = min(shape.max_rows + shape.max_prompts, len(self._sampled))
            logit_rows = self._ids[self._first_id + 2 * shape.num_tokens :][:most_sampled]
            bodies.append(_Body(shape, attention, sources, logit_rows))
        return sorted(bodies, key=lambda body: body.shape.num_tokens)

    def _first_features(self) -> torch.Tensor:
        """Room for the features of every row that samples: their size is seen from a first token."""
        zero = np.zeros(1, dtype=np.int64)
        ids = self._words(1)
        attention = self._backend.prepare(PackedBatch(zero, zero + 1, zero[None]))
        features = self.model.features(ids, ids, attention, ids)
        return features.new_zeros((len(self._sampled), features.shape[1]))

    # --- one step -----------------------------------------------------------------------------------------------------

    def admit(self, slot: int, admitted: Admitted) -> None:
        self._sampling.admit(slot, admitted)

    def run(self, batch: Batch) -> torch.Tensor:
        body = self._body_for(batch)
        if body is None:
            self._run_eagerly(batch)
        else:
            with_wide = body.attention.send(StaticBatch(batch.slots, batch.starts, batch.lengths))
            self._send_body(body, batch)
            self._replays.replay((body.shape, with_wide))
        num_sampled = len(batch.sampled_slots)
        if num_sampled:
            num_rows = next(rows for rows in self._head_rows if rows >= num_sampled)
            self._send_head(batch, num_rows)
            self._replays.replay(num_rows)
        return self._sampled[:num_sampled]

    def _body_for(self, batch: Batch) -> _Body | None:
        num_rows = len(batch.slots)
        num_decodes = int((batch.lengths == 1).sum())
        num_new, num_prompts = len(batch.input_ids) - num_decodes, num_rows - num_decodes
        for body in self._bodies:
            max_rows, max_tokens, max_prompts = body.shape
            if num_decodes <= max_rows and num_new <= max_tokens and num_prompts <= max_prompts:
                return body
        return None

    def _launch_body(self, body: _Body) -> None:
        attention = body.attention
        attention.begin()
        features = self.model.features(self._ids[body.sources], attention.positions, attention, body.logit_rows)
        self._features[: len(features)] = features

    def _send_body(self, body: _Body, batch: Batch) -> None:
        """Tokens of decode rows come first, and those of prompts from index `max_rows` on."""
        shape, num_tokens = body.shape, len(batch.input_ids)
        num_decodes = int((batch.lengths == 1).sum())
        places = np.arange(num_tokens)
        places[num_decodes:] += shape.max_rows - num_decodes
        ids = np.zeros(shape.num_tokens, dtype=np.int64)
        ids[places] = batch.input_ids
        sources = np.arange(self._first_id, self._first_id + shape.num_tokens)
        sources[places] = np.where(batch.pooled >= 0, batch.pooled, sources[places])
        logit_rows = np.zeros(len(body.logit_rows), dtype=np.int64)
        logit_rows[: len(batch.logit_rows)] = places[batch.logit_rows]
        self._staging.send_parts((ids, sources, logit_rows), self._ids[self._first_id :])

    def _run_eagerly(self, batch: Batch) -> None:
        if not self._bodies:
            self.rows.tables.take_changes()  # nobody else reads the tables on the device
        num_tokens, num_sampled = len(batch.input_ids), len(batch.logit_rows)
        words = torch.empty(3 * num_tokens + num_sampled, dtype=torch.int64, device=self._device)
        self._staging.send_parts((batch.input_ids, batch.pooled, batch.positions, batch.logit_rows), words)
        input_ids, pooled, positions, logit_rows = words.split([num_tokens, num_tokens, num_tokens, num_sampled])
        input_ids = torch.where(pooled >= 0, self._token_pool[pooled.clamp(min=0)], input_ids)
        attention = self._backend.prepare(self.rows.packed(batch))
        self._features[:num_sampled] = self.model.features(input_ids, positions, attention, logit_rows)

    def _send_head(self, batch: Batch | None, num_rows: int) -> None:
        self._staging.send_parts(self._sampling.stage(batch, num_rows), self._head_words)

    def _launch_head(self, num_rows: int) -> None:
        self._sampling.sample(
            self.model.logits(self._features[:num_rows]),
            self._head_words[: WORDS * num_rows],
            self._token_pool,
            self._sampled[:num_rows],
        )


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
