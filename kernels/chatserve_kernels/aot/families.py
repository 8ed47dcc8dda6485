"""Every way to call the launching halves of this package: families of calls, each a product of options.

An option stands for whatever makes Triton compile another binary: a compile-time argument, a type, a number that is 1
or no multiple of 16. What may be anything, as a vocabulary's size, stands with one value of each kind. Whoever adds an
option to a kernel adds it here; `tests/kernels/test_aot.py` fails otherwise.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from chatserve_kernels.aot import calls
from chatserve_kernels.configs import HEAD_DIMS, MAX_GROUP
from chatserve_kernels.dense_prefill import HEAD_DIMS as DENSE_HEAD_DIMS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HOPPER, AMPERE = (9, 0), (8, 0)
BLOCK_SIZES = (16, 1, 8, 32, 64, 128)
GROUP_KINDS = (1, 4, 7, 9, 16)
"""Heads a group: to divide by them is nothing, a shift or a product; a small tile holds several groups or one."""
KV = ("as queries", "fp8", "fp8 by head")
"""Keys and values, the last two with a scale for all heads or for each."""


@dataclass(frozen=True, slots=True)
class Family:
    """Calls that differ in the values of `axes`. Where not all pairs of values are tried, each of the first axis is
    still tried with each of every other one."""

    name: str
    call: Callable[..., object]
    axes: dict[str, tuple[object, ...]]
    classes: dict[str, tuple[object, ...]] = field(default_factory=dict)
    """Of axes with many values that the compiler treats alike, one value of each kind."""
    capability: tuple[int, int] = HOPPER


def families() -> Iterator[Family]:
    floats = tuple(calls.FLOATS)
    masks = {"window": (None, 1024, 1000), "softcap": (None, 30.0)}
    groups = {"group": tuple(range(1, MAX_GROUP + 1)), "kv_heads": (8, 1, 3)}
    yield Family(
        "attention",
        calls.attention,
        {
            "step": ("few rows", "many rows", "shared", "prefill"),
            "elements": tuple(itertools.product(calls.FLOATS, KV)),
            "head_dim": HEAD_DIMS,
            **masks,
            **groups,
            "block_size": BLOCK_SIZES,
            "strides": ("a pool's",),
        },
        classes={"group": GROUP_KINDS},
    )
    yield Family(
        "attention on Hopper",
        calls.attention,
        {
            "step": ("shared", "prefill"),
            "elements": tuple((dtype, "as queries") for dtype in calls.HALF),
            "head_dim": tuple(head_dim for head_dim in HEAD_DIMS if head_dim <= 128),
            **masks,
            **groups,
            "block_size": (16, 8, 32, 64),
            "strides": ("a pool's",),
        },
        classes={"group": GROUP_KINDS},
    )
    yield Family(
        "attention on odd strides",
        calls.attention,
        {
            "step": ("few rows", "many rows", "shared", "prefill"),
            "elements": (("bfloat16", "as queries"), ("float16", "fp8"), ("float32", "as queries")),
            "head_dim": (128, 80, 256),
            "window": (None, 1000),
            "softcap": (None, 30.0),
            "group": (4, 7),
            "kv_heads": (8, 3),
            "block_size": (16, 1),
            "strides": ("odd",),
        },
        classes={
            "elements": (("bfloat16", "as queries"),),
            "head_dim": (80,),
            "window": (1000,),
            "softcap": (30.0,),
            "group": (7,),
            "kv_heads": (3,),
            "block_size": (16,),
        },
    )
    yield Family(
        "RoPE + KV write",
        calls.rope_and_write,
        {
            "cache": ("as keys", calls.FP8),
            "norms": (False, True),
            "rotated": ("all", "half"),
            "dtype": floats,
            "head_dim": HEAD_DIMS,
            "heads": ((32, 8), (9, 3), (16, 1)),
            "block_size": BLOCK_SIZES,
            "num_tokens": (64, 1, 7),
        },
        classes={"head_dim": (128, 80, 8), "block_size": (16, 1)},
    )
    yield Family(
        "KV write",
        calls.write,
        {
            "cache": ("as keys", calls.FP8),
            "dtype": floats,
            "head_dim": HEAD_DIMS,
            "kv_heads": (8, 1, 3),
            "block_size": BLOCK_SIZES,
        },
        classes={"head_dim": (128, 80, 8), "block_size": (16, 1)},
    )
    yield Family(
        "long prompt",
        calls.long_prompt,
        {
            "cache": ("as queries", calls.FP8),
            "prefix": (False, True),
            "dtype": tuple(calls.HALF),
            "head_dim": DENSE_HEAD_DIMS,
            "heads": ((32, 8), (9, 3), (16, 1)),
            "block_size": BLOCK_SIZES,
        },
    )
    yield Family("block tables", calls.change_tables, {"num_updates": (1024, 1, 100)})
    yield Family(
        "block copies", calls.copies, {"rows": (512, 180, 1), "block_size": (16, 24, 1), "head_bytes": (256, 160, 8)}
    )
    yield Family("add + RMSNorm", calls.norm, {"dtype": floats, "width": (4096, 576, 2048, 8192)})
    yield Family("SiLU x mul", calls.gate, {"dtype": floats, "width": (14_336, 1536, 28_672)})
    sampling = {
        "penalties": (False, True),
        "dtype": floats,
        "vocab_size": (128_256, 49_152, 50_257, 151_936, 1000),
        "position_offset": (0, 1, 7),
    }
    kinds = {"vocab_size": (128_256, 50_257, 1000)}
    yield Family("sampling", calls.sample, sampling, kinds)
    # Where an engine samples by these kernels and attends by torch.
    kinds = {"vocab_size": (128_256,), "dtype": ("bfloat16",), "position_offset": (0,)}
    yield Family("sampling on older GPUs", calls.sample, sampling, kinds, capability=AMPERE)
