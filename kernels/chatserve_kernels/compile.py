"""Ahead-of-time compilation for a Hopper GPU, on any machine: what each specialisation needs of a multiprocessor.

`python -m chatserve_kernels.compile` prints registers, spills and shared memory as JSON. Needs no GPU: Triton's own
assembler makes the binary, and its `cuobjdump` reads the resource usage back.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from chatserve_kernels import attend_hopper, compile_step
from chatserve_kernels.attend import attend_kernel
from chatserve_kernels.configs import default_configs, prefill_configs
from chatserve_kernels.launch import MERGE_WARPS, MIN_DOT, merge_constants
from chatserve_kernels.merge import merge_kernel
from chatserve_kernels.tiles import TileConfig

TARGET = GPUTarget("cuda", 90, 32)
OLDER_TARGET = GPUTarget("cuda", 80, 32)
"""A GPU without Hopper's instructions, where the engine samples by our kernels and attends by torch."""
_ELEMENTS = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "float8_e4m3fn": "*fp8e4nv"}
_ATTEND_TENSORS = 14
_ATTEND_FLOATS = ("score_scale", "score_cap")


class Usage(NamedTuple):
    registers: int
    """A thread."""
    stack_bytes: int
    """A thread; more than 0 means that registers spilled."""
    shared_bytes: int
    """A program."""


def compile_attend(
    config: TileConfig,
    *,
    head_dim: int = 128,
    group_size: int = 4,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    window: bool = False,
    softcap: bool = False,
    num_kv_heads: int = 8,
    block_size: int = 16,
    merges: bool = True,
    causal: bool = False,
) -> Usage:
    """Compile `attend_kernel` as `forest_decode` would launch it; a `kv_dtype` of its own comes with scales."""
    names = attend_kernel.arg_names
    floats = ("partial_out", "partial_sum", "key_scale", "value_scale")
    types = ["*fp32" if name in floats else "*i32" for name in names[:_ATTEND_TENSORS]]
    for name in ("out", "query"):
        types[names.index(name)] = _ELEMENTS[dtype]
    for name in ("key", "value"):
        types[names.index(name)] = _ELEMENTS[kv_dtype or dtype]
    constants = {
        **merge_constants(num_kv_heads * group_size, num_kv_heads, head_dim),
        "HEAD_PAD": max(MIN_DOT, triton.next_power_of_2(head_dim)),
        "BLOCK": block_size,
        "M": config.query_rows,
        "N": config.key_tokens,
        "HAS_WINDOW": window,
        "IS_CAUSAL": causal,
        "HAS_CAP": softcap,
        "PRECISION": "ieee" if dtype == "float32" else "tf32",
        "SAME_STRIDES": True,
        "WIDEN": False,
        "MERGES": merges,
        "DEPENDS": 1,
    }
    if kv_dtype is None:
        constants |= {"key_scale": None, "value_scale": None}
    signature = {}
    for index, name in enumerate(names):
        if name in constants:
            signature[name] = "constexpr"
        elif index < _ATTEND_TENSORS:
            signature[name] = types[index]
        else:
            signature[name] = "fp32" if name in _ATTEND_FLOATS else "i32"
    divisible = [name for name in names if name not in constants and name not in _ATTEND_FLOATS and name != "window"]
    return _compile(attend_kernel, signature, constants, divisible, config.options)


def compile_hopper(
    config: TileConfig,
    *,
    head_dim: int = 128,
    group_size: int = 4,
    dtype: str = "bfloat16",
    window: bool = False,
    softcap: bool = False,
    num_kv_heads: int = 8,
    block_size: int = 16,
    causal: bool = False,
    depends: int = 1,
) -> Usage:
    """Compile `attend_hopper_kernel` as `forest_decode` would launch it."""
    kernel = attend_hopper.attend_hopper_kernel
    constants = {
        **attend_hopper.constants(config, num_kv_heads * group_size, num_kv_heads, head_dim, block_size),
        "HAS_WINDOW": window,
        "HAS_CAP": softcap,
        "IS_CAUSAL": causal,
        "DEPENDS": depends,
    }
    rows = f"tensordesc<{_ELEMENTS[dtype][1:]}[{block_size},{attend_hopper.BOX_COLUMNS}],{attend_hopper.TILE_LAYOUT!r}>"
    types = dict.fromkeys(("tables", "starts", "items", "entries", "last_positions"), "*i32")
    types |= dict.fromkeys(("partial_out", "partial_sum"), "*fp32") | dict.fromkeys(_ATTEND_FLOATS, "fp32")
    types |= dict.fromkeys(("out", "query"), _ELEMENTS[dtype]) | dict.fromkeys(("key_rows", "value_rows"), rows)
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
    odd = {"key_rows", "value_rows", "window", *_ATTEND_FLOATS, *constants}
    divisible = [name for name in kernel.arg_names if name not in odd]
    assert config.hopper is not None
    return _compile(kernel, signature, constants, divisible, config.hopper.options, source=GluonASTSource)


def compile_merge(*, num_kv_heads: int = 8, group_size: int = 4, head_dim: int = 128, dtype: str = "bfloat16") -> Usage:
    """Compile `merge_kernel` as `forest_decode` would launch it."""
    constants = merge_constants(num_kv_heads * group_size, num_kv_heads, head_dim) | {"DEPENDS": 1}
    types = {
        "out": _ELEMENTS[dtype],
        "partial_out": "*fp32",
        "partial_sum": "*fp32",
        "num_merges": "*i32",
        "merges": "*i32",
        "out_row_stride": "i32",
        "out_head_stride": "i32",
    }
    signature = types | dict.fromkeys(constants, "constexpr")
    return _compile(merge_kernel, signature, constants, list(types), {"num_warps": MERGE_WARPS})


def _compile(kernel, signature, constants, divisible, options, source=ASTSource, target=TARGET) -> Usage:
    recipe = source(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in divisible},
    )
    compiled = triton.compile(recipe, target=target, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        listing = subprocess.run(  # noqa: S603 - Triton's own tool, on a file of ours
            [str(tool), "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    usage = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", listing)}
    return Usage(usage["REG"], usage["STACK"] + usage["LOCAL"], compiled.metadata.shared)


def specialisations(head_dim: int, dtype: str, *, plain: bool = False) -> dict[str, Usage]:
    """All that `forest_decode` and `paged_prefill` may launch for such heads: each plain and, unless only that is asked
    for, with a window and a soft cap, and with 8-bit keys and values."""
    is_half = dtype != "float32"
    few, many = (default_configs(head_dim, is_half=is_half, max_rows=max_rows) for max_rows in (1, 256))
    prefill = prefill_configs(head_dim, is_half=is_half)
    usages = {}
    for name, config, merges, causal, depends in (
        ("alone, few rows:", few.alone, True, False, 1),
        ("alone:", many.alone, True, False, 1),
        ("beside:", many.beside, False, False, 2),
        ("wide:", many.wide, False, False, 1),
        ("prefill:", prefill.wide, False, True, 1),
    ):
        shape = {"head_dim": head_dim, "dtype": dtype, "causal": causal}
        bent = {"window": True, "softcap": True}
        for options in ({}, bent, {"kv_dtype": "float8_e4m3fn"})[: 1 if plain else None]:
            label = " ".join([name, dtype, str(head_dim), *map(str, options)])
            usages[label] = compile_attend(config, merges=merges, **shape, **options)
        for options in ({}, bent)[: 1 if plain else None] if config.hopper is not None else ():
            label = " ".join(["hopper", name, dtype, str(head_dim), *options])
            usages[label] = compile_hopper(config, depends=depends, **shape, **options)
    usages[f"merge: {dtype} {head_dim}"] = compile_merge(head_dim=head_dim, dtype=dtype)
    return usages


def step_specialisations(dtype: str) -> dict[str, Usage]:
    """The kernels around attention (see `compile_step`), and those that older GPUs run too as these do."""
    usages = {label: _compile(*recipe) for label, *recipe in compile_step.recipes(dtype)}
    for label, *recipe in compile_step.sampling_recipes(dtype, early=False):
        usages[f"{label} sm_{OLDER_TARGET.arch}"] = _compile(*recipe, target=OLDER_TARGET)
    return usages


def main() -> None:
    """Print every default specialisation's usage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head-dim", type=int, nargs="*", default=[64, 80, 96, 128, 256])
    parser.add_argument(
        "--dtype", nargs="*", default=["bfloat16", "float32"], choices=["bfloat16", "float16", "float32"]
    )
    parser.add_argument("--plain", action="store_true", help="without windows, soft caps and 8-bit keys and values")
    parser.add_argument("--step", action="store_true", help="the kernels around attention instead")
    chosen = parser.parse_args()
    usages: dict[str, Usage] = {}
    for dtype in chosen.dtype:
        if chosen.step:
            usages |= step_specialisations(dtype)
        else:
            for head_dim in chosen.head_dim:
                usages |= specialisations(head_dim, dtype, plain=chosen.plain)
    results = {label: usage._asdict() for label, usage in usages.items()}
    json.dump(results, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
