"""What a decoder does between its matrix products: norms, the gated activation, rotary embedding, the store of KV.

Two sets of the same operations: plain torch, on any device, and the fused kernels, where Triton runs. A model is
written once against `Ops`; the numbers agree up to rounding. Knows no weights but those it is handed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

from chatserve.model.attention import StoredAttention

if TYPE_CHECKING:
    from types import ModuleType

    from chatserve.model.attention import StepAttention
    from chatserve.model.linear import Linear


class RotaryAttention(Protocol):
    """One step's attention behind its rotary embedding."""

    def attend(
        self,
        layer: int,
        query_key: torch.Tensor,
        value: torch.Tensor,
        *,
        num_heads: int,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """As `StepAttention.attend`, of queries and keys [num_tokens, num_heads + num_kv_heads, head_dim] that are not
        rotated yet and may be overwritten."""
        ...


class Ops(Protocol):
    """Activations are [num_tokens, width], of the weights' type; sums that a later step reads are rounded to it."""

    def rotary(self, attention: StepAttention, positions: torch.Tensor) -> RotaryAttention:
        """Once a step; `positions` int64 [num_tokens]."""
        ...

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """RMSNorm (Zhang and Sennrich 2019): x / sqrt(mean(x²) + eps) · weight over the last dimension, in float32."""
        ...

    def add_norm(
        self, linear: Linear, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of the residual, which may be reused for it, and `linear(x)`; and its RMSNorm."""
        ...

    def gated(self, gate_up: Linear, x: torch.Tensor) -> torch.Tensor:
        """SiLU of the first half of `gate_up(x)`'s columns, times the second (Shazeer 2020)."""
        ...


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding (Su et al. 2021), halves paired as in GPT-NeoX: radians a token, float32 [head_dim / 2], and the
    factor on cosines and sines."""

    frequencies: torch.Tensor
    factor: float


class TorchOps:
    """Plain torch; residuals are added inside products where the device can."""

    def __init__(self, rope: Rope, dtype: torch.dtype) -> None:
        self._rope = rope
        self._dtype = dtype

    def rotary(self, attention: StepAttention, positions: torch.Tensor) -> TorchRotary:
        angles = torch.outer(positions.float(), self._rope.frequencies)
        cosines, sines = angles.cos().mul_(self._rope.factor), angles.sin().mul_(self._rope.factor)
        return TorchRotary(
            attention,
            torch.cat((cosines, cosines), dim=1).unsqueeze(1).to(self._dtype),
            torch.cat((-sines, sines), dim=1).unsqueeze(1).to(self._dtype),
        )

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if x.is_cuda:
            return F.rms_norm(x, weight.shape, weight, eps)
        # Written out where torch has no fused kernel: its own took 730 µs for 512 rows of 576, this 58.
        wide = x.float()
        scale = (wide * wide).mean(-1, keepdim=True).add_(eps).rsqrt_()
        return (wide * scale).to(x.dtype).mul_(weight)

    def add_norm(
        self, linear: Linear, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = linear.add_to(residual, x)
        return residual, self.rms_norm(residual, weight, eps)

    def gated(self, gate_up: Linear, x: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up(x).chunk(2, dim=1)
        return F.silu(gate).mul_(up)


class TorchRotary:
    def __init__(self, attention: StepAttention, cosines: torch.Tensor, sines: torch.Tensor) -> None:
        """Each [num_tokens, 1, head_dim], the first half of the sines negated."""
        self._attention = attention
        self._cosines = cosines
        self._sines = sines

    def attend(
        self,
        layer: int,
        query_key: torch.Tensor,
        value: torch.Tensor,
        *,
        num_heads: int,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        # x · cos + (x₂, x₁) · (-sin, sin)
        first, second = query_key.chunk(2, dim=-1)
        rotated = torch.cat((second, first), dim=-1).mul_(self._sines).addcmul_(query_key, self._cosines)
        query, key = rotated[:, :num_heads], rotated[:, num_heads:]
        return self._attention.attend(layer, query, key, value, scale=scale, window=window)


class FusedOps:
    """The kernels of `chatserve_kernels.fused`; needs Triton, and a CUDA device or its interpreter.

    Angles are looked up, so that a kernel needs no more than a position: float32 [context_tokens, head_dim].
    """

    def __init__(self, rope: Rope, context_tokens: int) -> None:
        from chatserve_kernels import fused  # noqa: PLC0415 - needs triton, which not every system has

        self._kernels = fused
        positions = torch.arange(context_tokens, dtype=torch.float32, device=rope.frequencies.device)
        angles = torch.outer(positions, rope.frequencies)
        self._cos_sin = torch.cat((angles.cos().mul_(rope.factor), angles.sin().mul_(rope.factor)), dim=1)

    def rotary(self, attention: StepAttention, positions: torch.Tensor) -> FusedRotary:
        assert isinstance(attention, StoredAttention), "the backend cannot attend over KV that is stored already"
        return FusedRotary(self._kernels, attention, positions, self._cos_sin)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def add_norm(
        self, linear: Linear, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return residual, self._kernels.add_rms_norm(linear(x), residual, weight, eps)

    def gated(self, gate_up: Linear, x: torch.Tensor) -> torch.Tensor:
        activated: torch.Tensor = self._kernels.silu_mul(gate_up(x))
        return activated


class FusedRotary:
    """Rotates queries in place, and keys on their way into the pool."""

    def __init__(
        self, kernels: ModuleType, attention: StoredAttention, positions: torch.Tensor, cos_sin: torch.Tensor
    ) -> None:
        self._kernels = kernels
        self._attention = attention
        self._positions = positions
        self._cos_sin = cos_sin

    def attend(
        self,
        layer: int,
        query_key: torch.Tensor,
        value: torch.Tensor,
        *,
        num_heads: int,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        attention = self._attention
        query, key = query_key[:, :num_heads], query_key[:, num_heads:]
        self._kernels.rope_store_kv(
            query, key, value, *attention.caches(layer), self._positions, attention.slots, self._cos_sin,
            kv_scales=attention.kv_scales(layer),
        )  # fmt: skip
        return attention.attend_stored(layer, query, scale=scale, window=window)
