"""Runs one laid-out batch through the model and samples from it: the interface, and the way of a CPU.

An executor owns the token pool: for each slot the last token sampled, on the device, so that a step can be launched
before anybody on the CPU knows what the one before it sampled. Must not know requests or plans.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from chatserve.model import sampler

if TYPE_CHECKING:
    from chatserve.model.attention import AttentionBackend
    from chatserve.model.rows import Batch, BatchRows
    from chatserve.model.shapes import CausalModel
    from chatserve.sched.plan import Admitted
    from chatserve.types import SamplingParams


class Executor(Protocol):
    """Steps run in the order of their calls, on the current stream."""

    model: CausalModel
    rows: BatchRows

    def admit(self, slot: int, admitted: Admitted) -> None:
        """A request has taken a slot: note how it wants to be sampled."""
        ...

    def run(self, batch: Batch) -> torch.Tensor:
        """Compute the batch's KV. Returns the sampled ids, int64 [num_sampled], on the device; the next run may
        overwrite them."""
        ...


class HostExecutor:
    """For a CPU: nothing is padded, captured or sent, and sampling is `sampler`'s."""

    def __init__(self, model: CausalModel, backend: AttentionBackend, rows: BatchRows) -> None:
        self.model = model
        self.rows = rows
        self._backend = backend
        self._token_pool = torch.zeros(len(rows.tables.host), dtype=torch.int64)
        self._params: dict[int, SamplingParams] = {}
        self._histories: dict[int, sampler.TokenHistory] = {}

    def admit(self, slot: int, admitted: Admitted) -> None:
        self._params[slot] = admitted.sampling
        self._histories.pop(slot, None)
        if sampler.has_penalties(admitted.sampling):
            self._histories[slot] = sampler.TokenHistory.of(
                admitted.token_ids, admitted.num_prompt_tokens, self.model.info.vocab_size, self._token_pool.device
            )

    def run(self, batch: Batch) -> torch.Tensor:
        self.rows.tables.take_changes()  # tables go with each batch, and nobody else needs to hear of them
        input_ids = torch.from_numpy(batch.input_ids)
        pooled = torch.from_numpy(batch.pooled)
        input_ids = torch.where(pooled >= 0, self._token_pool[pooled.clamp(min=0)], input_ids)
        features = self.model.features(
            input_ids,
            torch.from_numpy(batch.positions),
            self._backend.prepare(self.rows.packed(batch)),
            torch.from_numpy(batch.logit_rows),
        )
        slots: list[int] = batch.sampled_slots.tolist()
        if not slots:
            return input_ids[:0]
        histories = [self._histories.get(slot) for slot in slots]
        token_ids = sampler.sample(
            self.model.logits(features).float(),
            [self._params[slot] for slot in slots],
            batch.sampled_positions.tolist(),
            histories,
        )
        for history, token_id in zip(histories, token_ids, strict=True):
            if history is not None:
                history.append(token_id)
        sampled = torch.tensor(token_ids)
        self._token_pool[torch.from_numpy(batch.sampled_slots)] = sampled
        return sampled
