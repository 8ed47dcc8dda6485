"""What a model asks of the rest, as plain values: the shape of its KV, and the interface that the runner drives.

Imports torch for annotations alone; knows no particular model, storage or backend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    import torch

    from chatserve.model.attention import StepAttention


class KVShape(msgspec.Struct, frozen=True, kw_only=True):
    """The KV of one block, over all layers."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    @property
    def block_elements(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.block_size * self.head_dim


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a loaded model. `context_tokens` is the longest sequence that it reads."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_tokens: int
    impl: str
    """llama or hf."""
    windows: tuple[int | None, ...] = (None,)
    """Sliding windows that any layer has; None: a layer without one."""
    kv_scales: tuple[tuple[float, float], ...] = ()
    """For each layer what 8-bit keys and values must be multiplied by, as the checkpoint was calibrated, if it was."""


class CausalModel(Protocol):
    """A decoder that keeps its KV through an `AttentionBackend`."""

    info: ModelInfo

    def features(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attention: StepAttention, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """Compute the KV of a packed batch, and all that comes before the logits of some of its tokens.

        `input_ids` and `positions` are int64 [num_tokens]; `logit_rows`, int64 [num_rows], are indices into them.
        Returns [num_rows, features of a token].
        """
        ...

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """[num_rows, vocab_size], in the model's own precision or float32."""
        ...

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attention: StepAttention, logit_rows: torch.Tensor
    ) -> torch.Tensor:
        """Both, in float32."""
        ...
