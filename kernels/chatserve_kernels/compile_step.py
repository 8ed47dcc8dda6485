"""What `compile` compiles of the kernels around attention: sampling, and the fused ones, at an 8B Llama's sizes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from chatserve_kernels import rope, sampling
from chatserve_kernels.sampling import NUM_WARPS, SamplingWorkspace, chunk_constants

if TYPE_CHECKING:
    from collections.abc import Iterator

ELEMENTS = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}
VOCAB_SIZE = 128_256


class Recipe(NamedTuple):
    """What Triton's compiler needs to make one specialisation of a kernel."""

    label: str
    kernel: Any
    signature: dict[str, str]
    constants: dict[str, object]
    divisible: list[str]
    """Arguments known to be multiples of 16."""
    options: dict[str, object]


def recipes(dtype: str) -> Iterator[Recipe]:
    """For logits or activations of `dtype`."""
    yield from sampling_recipes(dtype, early=True)
    yield from _rope(dtype)


def sampling_recipes(dtype: str, *, early: bool) -> Iterator[Recipe]:
    """`early`: for devices that can launch kernels early (see `early_launch`)."""
    space = SamplingWorkspace(1, VOCAB_SIZE, torch.device("meta"))
    types = dict.fromkeys(("floats", "maxima", "agreed", "open_scores"), "*fp32")
    types |= dict.fromkeys(("rows", "counts", "ints", "open_ids"), "*i32")
    types |= {"logits": ELEMENTS[dtype], "positions": "*i64", "tokens": "*i64"}
    for name in ("chunk", "bound", "draw", "choose"):
        for has_counts in (False, True):
            constants = chunk_constants(space) | {"HAS_COUNTS": has_counts, "DEPENDS": early}
            yield _recipe(
                f"sampling {name} {dtype}{' penalties' * has_counts}",
                getattr(sampling, f"{name}_kernel"),
                types,
                constants,
                {"num_chunks", "num_groups", "position_offset"},
                {"num_warps": NUM_WARPS[name]},
            )


def _rope(dtype: str) -> Iterator[Recipe]:
    for is_fp8 in (False, True):
        for has_norm in (False, True):
            caches = "*fp8e4nv" if is_fp8 else ELEMENTS[dtype]
            types = dict.fromkeys(("query", "key", "value", "query_norm", "key_norm"), ELEMENTS[dtype])
            types |= {"key_cache": caches, "value_cache": caches, "cos_sin": "*fp32", "kv_scales": "*fp32"}
            types |= {"positions": "*i64", "slots": "*i64", "eps": "fp32"}
            options = rope.constants(32, 8, 128, 64, 16) | {"HAS_NORM": has_norm, "IS_FP8": is_fp8, "DEPENDS": True}
            label = f"RoPE + KV write {dtype}{' fp8' * is_fp8}{' norms' * has_norm}"
            odd = {"num_tokens", "eps", "kv_scales"}
            yield _recipe(label, rope.rope_store_kv_kernel, types, options, odd, {"num_warps": rope.NUM_WARPS})


def _recipe(label, kernel, types, constants, odd, options) -> Recipe:
    """Arguments without a type are int32; all but the odd ones are multiples of 16."""
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    divisible = [name for name in names if name not in constants and name not in odd]
    return Recipe(label, kernel, signature, {n: constants[n] for n in names if n in constants}, divisible, options)
