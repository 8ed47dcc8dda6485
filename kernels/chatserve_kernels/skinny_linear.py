"""Matrix products of a few rows, as decoding one or a few sessions needs them: bound by reading the weights.

    linear           y = x W^T + b
    gated            y = silu(x G^T) * (x U^T), G and U the two halves of W            (Shazeer 2020, SwiGLU)

A program owns a few output features and reads their weights once, whole rows of them, so nothing is reduced between
programs. What limits such a product is how early and how evenly the weights are asked for. So there are more programs
than a wave needs, none of them large; and a program asks the L2 cache for the beginning of its weights *before* it
waits for the kernel before it, which made its inputs and not its weights (programmatic dependent launch): memory stays
busy while norms and small attention kernels run, and through every launch.

Rows are padded to 16, the least that a tensor core multiplies. Past that torch's own products are better.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MAX_ROWS = 16
_LINE_ELEMENTS = 64
"""Of two bytes, in a line of 128 bytes."""
LINES = 16
"""Lines of a weight row that one round asks for."""


class SkinnyConfig(NamedTuple):
    """`outputs` features a program, `inputs` of them a step of its loop; the first `prefetch` inputs are asked for
    early."""

    outputs: int = 16
    inputs: int = 256
    warps: int = 4
    stages: int = 4
    prefetch: int = 2048


@triton.jit
def _prefetch(at, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LINE: tl.constexpr, LINES: tl.constexpr, row_stride):
    """Ask the L2 cache for `COLUMNS` elements of `ROWS` rows."""
    rows = tl.arange(0, ROWS).to(tl.int64)[:, None]
    lines = tl.arange(0, LINES)[None, :]
    for begin in tl.static_range(0, COLUMNS, LINE * LINES):
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [at + rows * row_stride + begin + lines * LINE],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit(do_not_specialize=["num_rows"])  # one compilation serves all numbers of rows
def skinny_linear_kernel(
    out,  # [num_rows, WIDTH]
    x,  # [num_rows, INPUTS]
    weight,  # [WIDTH, INPUTS], or [2 * WIDTH, INPUTS] if gated
    bias,  # [WIDTH]
    num_rows,
    out_stride,
    x_stride,
    weight_stride,
    WIDTH: tl.constexpr,
    INPUTS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,  # output features a program; divides WIDTH
    K: tl.constexpr,  # inputs a step; divides INPUTS
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PREFETCH: tl.constexpr,
    LINE: tl.constexpr,
    LINES: tl.constexpr,
    DEPENDS: tl.constexpr,
    WIDEN: tl.constexpr,  # the interpreter multiplies no 16-bit numbers
):
    first = tl.program_id(0) * N
    features = first + tl.arange(0, N)
    rows = tl.arange(0, M)
    is_row = rows < num_rows
    inputs = tl.arange(0, K)
    mine = weight + first.to(tl.int64) * weight_stride
    gate_to_up = WIDTH * weight_stride.to(tl.int64)
    if DEPENDS:
        gdc_launch_dependents()
        if PREFETCH > 0:
            _prefetch(mine, N, PREFETCH, LINE, LINES, weight_stride)
            if GATED:
                _prefetch(mine + gate_to_up, N, PREFETCH, LINE, LINES, weight_stride)
        gdc_wait()
    at = mine + tl.arange(0, N).to(tl.int64)[:, None] * weight_stride + inputs[None, :]
    x_at = x + rows.to(tl.int64)[:, None] * x_stride + inputs[None, :]
    acc = tl.zeros([M, N], tl.float32)
    up = tl.zeros([M, N], tl.float32)
    for begin in range(0, INPUTS, K):
        row = tl.load(x_at + begin, mask=is_row[:, None], other=0.0)
        its = tl.load(at + begin)
        if WIDEN:
            row, its = row.to(tl.float32), its.to(tl.float32)
        acc = tl.dot(row, tl.trans(its), acc)
        if GATED:
            its = tl.load(at + gate_to_up + begin)
            if WIDEN:
                its = its.to(tl.float32)
            up = tl.dot(row, tl.trans(its), up)
    if HAS_BIAS:
        acc += tl.load(bias + features).to(tl.float32)[None, :]
    if GATED:
        # Rounded as the product alone would be, so that it does not matter which kernel made it.
        gate = acc.to(out.dtype.element_ty).to(tl.float32)
        acc = gate * tl.sigmoid(gate) * up.to(out.dtype.element_ty).to(tl.float32)
    tl.store(
        out + rows.to(tl.int64)[:, None] * out_stride + features[None, :],
        acc.to(out.dtype.element_ty),
        mask=is_row[:, None],
    )


def fits(weight: torch.Tensor, config: SkinnyConfig, *, gated: bool = False) -> bool:
    """Whether the kernel takes a weight [out_features, in_features]: 16 bits, whole tiles."""
    width, inputs = weight.shape
    if gated:
        width //= 2
    return (
        weight.element_size() == 2
        and weight.stride(1) == 1
        and width % config.outputs == 0
        and inputs % config.inputs == 0
        and config.prefetch <= inputs
        and config.prefetch % (_LINE_ELEMENTS * LINES) == 0
    )


def constants(width: int, inputs: int, config: SkinnyConfig, *, gated: bool) -> dict[str, int]:
    """The sizes that are compiled in."""
    return {
        "WIDTH": width,
        "INPUTS": inputs,
        "M": MAX_ROWS,
        "N": config.outputs,
        "K": config.inputs,
        "GATED": gated,
        "PREFETCH": config.prefetch,
        "LINE": _LINE_ELEMENTS,
        "LINES": LINES,
    }


def config_of(weight: torch.Tensor) -> SkinnyConfig | None:
    """How to multiply by a weight, gated or not; None: not by this kernel."""
    config = SkinnyConfig()
    return config if fits(weight, config) and fits(weight, config, gated=True) else None


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    config: SkinnyConfig | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x` [num_rows, in_features] times `weight` [out_features, in_features], for at most `MAX_ROWS` rows.

    Returns [num_rows, out_features]; gated, which takes no bias, [num_rows, out_features / 2].

    Raises:
        ValueError: more rows, or a weight that the configuration's tiles do not divide (`fits`).
    """
    num_rows, inputs = x.shape
    config = config or SkinnyConfig()
    if not 0 < num_rows <= MAX_ROWS or x.stride(1) != 1:
        raise ValueError(f"expected 1 to {MAX_ROWS} contiguous rows, got {num_rows} of strides {x.stride()}")
    if not fits(weight, config, gated=gated) or inputs != weight.shape[1] or (gated and bias is not None):
        raise ValueError(f"expected a weight of 16-bit numbers in whole tiles of {config}, got {list(weight.shape)}")
    width = weight.shape[0] // 2 if gated else weight.shape[0]
    if out is None:
        out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    launch_early = {"launch_pdl": True} if x.is_cuda else {}
    skinny_linear_kernel[(width // config.outputs,)](
        out,
        x,
        weight,
        weight if bias is None else bias,
        num_rows,
        out.stride(0),
        x.stride(0),
        weight.stride(0),
        **constants(width, inputs, config, gated=gated),
        HAS_BIAS=bias is not None,
        DEPENDS=x.is_cuda,
        WIDEN=not x.is_cuda,
        num_warps=config.warps,
        num_stages=config.stages,
        **launch_early,
    )
    return out
