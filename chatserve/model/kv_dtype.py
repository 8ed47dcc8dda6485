"""How keys and values are held: in the model's own type, another, or 8 bits with scales.

float8_e4m3fn (4 bits of exponent, 3 of mantissa: Micikevicius et al. 2022) holds value / scale, so that what is read is
stored * scale. A layer has two scales, of keys and of values: those that the checkpoint was calibrated with, else 1. A
number that a type cannot hold becomes the largest that it can. KV is rounded once, when it is written, and every query
reads the rounded numbers, those of its own step included: so it makes no difference to a text whether its KV was
computed, cached, copied, swapped or restored. Owns no memory but tables.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from chatserve.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

FP8: Final = torch.float8_e4m3fn
_DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "fp8": FP8}
_BITS: Final = {2: torch.int16, 4: torch.int32}


def choose_kv_dtype(setting: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """What `--kv-cache-dtype` asks for; for `auto` `dtype`, the type of the model's weights.

    Raises:
        StartupError: the device cannot convert to that type and back.
    """
    if setting == "auto":
        return dtype
    chosen = _DTYPES[setting]
    try:
        held = to_stored(torch.tensor([0.0, 1.0, -1.5, 448.0], dtype=dtype, device=device), chosen, 1.0)
        is_held = widen(held, torch.empty_like(held, dtype=dtype)).tolist() == [0.0, 1.0, -1.5, 448.0]
    except (RuntimeError, TypeError) as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise StartupError(f"--kv-cache-dtype {setting} cannot be used on {device}: {first}; choose auto") from error
    if not is_held:
        raise StartupError(f"--kv-cache-dtype {setting} cannot be used on {device}: numbers change; choose auto")
    return chosen


def dtype_name(dtype: torch.dtype) -> str:
    """Such as bfloat16."""
    return str(dtype).removeprefix("torch.")


def is_scale(number: float) -> bool:
    """Whether stored numbers may be multiplied by it: finite and above 0, also in float32."""
    return 0.0 < float(torch.tensor(number, dtype=torch.float32)) < math.inf


def to_stored(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Keys or values as a pool of `dtype` holds them: x / scale if that is `FP8`, else x, at most what it can hold."""
    if dtype == x.dtype:
        return x
    wide = x / scale if x.dtype == torch.float32 else x.float().div_(scale)
    largest = torch.finfo(dtype).max
    return wide.clamp_(-largest, largest).to(dtype)


def widen(stored: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """Copy stored numbers, not multiplied by their scale, to memory of the same size; returns that."""
    if stored.dtype == FP8 and stored.device.type == "cpu":
        # Half a million take 0.38 ms by the table, 1.5 by torch's conversion on one thread, 0.75 on two.
        at = stored.view(torch.uint8).numpy()
        np.take(_table(into.dtype), at, out=into.view(_BITS[into.dtype.itemsize]).numpy(), mode="clip")
    else:
        into.copy_(stored)
    return into


@cache
def _table(dtype: torch.dtype) -> NDArray[np.integer]:
    """The bits of all 256 numbers, in their order, as `dtype`."""
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8).to(dtype)
    bits: NDArray[np.integer] = numbers.view(_BITS[dtype.itemsize]).numpy()
    return bits


def layer_scales(
    scales: Sequence[tuple[float, float]], num_layers: int, dtype: torch.dtype
) -> tuple[tuple[float, float], ...]:
    """Of keys and of values, for each layer of a pool of `dtype`: `scales`, or 1 where there are none or need be none.

    Raises:
        ValueError: they are not as many as layers, or one is not above 0.
    """
    if not scales or dtype != FP8:
        return ((1.0, 1.0),) * num_layers
    if len(scales) != num_layers:
        raise ValueError(f"expected scales of {num_layers} layers, got {len(scales)}")
    for layer, pair in enumerate(scales):
        if not all(map(is_scale, pair)):
            raise ValueError(f"expected finite scales above 0, got {pair} for layer {layer}")
    return tuple(scales)
