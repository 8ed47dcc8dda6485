"""Sampling parameters by slot, as the sampling kernels read them, and the counts that penalties need.

Owns what is known of each request's sampling between steps; the kernels are `chatserve_kernels.sampling`. Imports
triton with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from chatserve_kernels.sampling import ROW, SamplingWorkspace, count_tokens, greedy_rows, sample_tokens
from chatserve_kernels.staging import send_once

from chatserve.model.sampler import has_penalties

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from chatserve.model.rows import Batch
    from chatserve.sched.plan import Admitted

_ROW_WORDS = ROW.itemsize // 8
WORDS = 2 + _ROW_WORDS
"""int64 words a row that `stage` makes and `sample` reads: slot, position, parameters."""


class DeviceSampling:
    """For up to `max_slots` requests. Slot `max_slots` is where padding's tokens go."""

    def __init__(self, max_slots: int, vocab_size: int, device: torch.device) -> None:
        self._max_slots = max_slots
        self._rows = greedy_rows(max_slots)
        self._counts = torch.zeros((max_slots, vocab_size), dtype=torch.int32, device=device)
        self._workspace = SamplingWorkspace(max_slots, vocab_size, device)

    def admit(self, slot: int, admitted: Admitted) -> None:
        params = admitted.sampling
        penalised = has_penalties(params)
        self._rows[slot] = (
            params.temperature,
            params.top_k,
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            slot if penalised else -1,
            params.seed or 0,
        )
        if penalised:
            ids = send_once(np.array(admitted.token_ids, dtype=np.int64), self._counts.device)
            self._counts[slot] = count_tokens(ids, admitted.num_prompt_tokens, self._counts.shape[1])

    def stage(self, batch: Batch | None, num_rows: int) -> tuple[NDArray[np.int64], ...]:
        """A step's sampled rows, padded to `num_rows`, for `sample`: `WORDS` words a row. None: padding alone."""
        slots = np.full(num_rows, self._max_slots, dtype=np.int64)
        positions = np.zeros(num_rows, dtype=np.int64)
        rows = greedy_rows(num_rows)
        if batch is not None:
            num_sampled = len(batch.sampled_slots)
            slots[:num_sampled] = batch.sampled_slots
            positions[:num_sampled] = batch.sampled_positions
            rows[:num_sampled] = self._rows[batch.sampled_slots]
        return slots, positions, rows.view(np.int64)

    def sample(self, logits: torch.Tensor, words: torch.Tensor, token_pool: torch.Tensor, out: torch.Tensor) -> None:
        """`out` int64 [num_rows] becomes the next tokens by `logits` [num_rows, vocab_size]; the token pool has them
        too."""
        num_rows = len(logits)
        slots, positions, rows = words.split([num_rows, num_rows, _ROW_WORDS * num_rows])
        sample_tokens(
            logits, rows.view(torch.int32).view(num_rows, -1), positions, self._workspace, counts=self._counts, out=out
        )
        token_pool.index_copy_(0, slots, out)
