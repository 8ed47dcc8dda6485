"""Matrix products with weights that never change, laid out for the device that they run on.

On a CPU the weights are packed once for oneDNN: measured on two AVX-512 cores with this program's default model, one
token's products take 26 ms instead of 44 (of which reading the weights is 22), sixteen tokens' 30 instead of 85. The
packed operators are torch's own, but private, so each is compared with the public one before it is trusted.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own convention

_ROWS_HINT = 16
"""The number of rows that oneDNN chooses the layout for; measured as good at 1 and at 512 as layouts made for those."""


class Linear(Protocol):
    """y = x Wᵀ + b, over float [num_tokens, in_features]."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The residual + x Wᵀ + b; it may be reused for the result."""
        ...


class PlainLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self._weight, self._bias)

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return residual.add_(F.linear(x, self._weight, self._bias))


class PackedLinear:
    """Weights in oneDNN's blocked layout; the residual is added inside the product."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)  # noqa: SLF001
        self._bias = bias
        self._product = torch.ops.mkldnn._linear_pointwise.default  # noqa: SLF001
        self._product_add = torch.ops.mkldnn._linear_pointwise.binary  # noqa: SLF001

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._product(x, self._weight, self._bias, "none", [], "")
        return y

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._product_add(x, residual, self._weight, self._bias, "add")
        return y


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Lay out a weight [out_features, in_features]; where it is packed, the caller's tensor may be dropped."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and _packing_works():
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


_works: bool | None = None


def _packing_works() -> bool:
    """Whether this build of torch has the packed operators and they compute what the public one does."""
    global _works
    if _works is None:
        _works = _try_packing()
    return _works


def _try_packing() -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    generator = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(48, 32, generator=generator), torch.randn(48, generator=generator)
    try:
        packed = PackedLinear(weight, bias)
        for rows in (1, 16, 33):
            x, residual = torch.randn(rows, 32, generator=generator), torch.randn(rows, 48, generator=generator)
            expected = F.linear(x, weight, bias)
            torch.testing.assert_close(packed(x), expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(packed.add_to(residual, x), residual + expected, rtol=1e-5, atol=1e-5)
    except (AttributeError, RuntimeError, TypeError, AssertionError):
        return False
    return True
