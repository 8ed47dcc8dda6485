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

from chatserve_kernels import compile_step
from chatserve_kernels.attend import attend_kernel, merge_kernel
from chatserve_kernels.configs import default_configs, prefill_configs
from chatserve_kernels.forest_decode import MERGE_WARPS, MIN_DOT, TileConfig, merge_constants

TARGET = GPUTarget("cuda", 90, 32)
_ELEMENTS = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32"}
_ATTEND_TENSORS = 12
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
    window: bool = False,
    softcap: bool = False,
    num_kv_heads: int = 8,
    block_size: int = 16,
    merges: bool = True,
    causal: bool = False,
) -> Usage:
    """Compile `attend_kernel` as `forest_decode` would launch it."""
    element = _ELEMENTS[dtype]
    names = attend_kernel.arg_names
    types = ["*fp32" if name.startswith("partial") else "*i32" for name in names[:_ATTEND_TENSORS]]
    for name in ("out", "query", "key", "value"):
        types[names.index(name)] = element
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


def _compile(kernel, signature, constants, divisible, options) -> Usage:
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(kernel.arg_names.index(name),): value for name, value in constants.items()},
        attrs={(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in divisible},
    )
    compiled = triton.compile(source, target=TARGET, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        listing = subprocess.run(  # noqa: S603 - Triton's own tool, on a file of ours
            [str(tool), "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
        ).stdout
    usage = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", listing)}
    return Usage(usage["REG"], usage["STACK"] + usage["LOCAL"], compiled.metadata.shared)


def specialisations(head_dim: int, dtype: str) -> dict[str, Usage]:
    """All that `forest_decode` may launch for such heads, each plain and with window and soft cap."""
    usages = {}
    for max_rows in (1, 256):
        configs = default_configs(head_dim, is_half=dtype != "float32", max_rows=max_rows)
        for name in ("alone", "beside", "wide"):
            for options in ({}, {"window": True, "softcap": True}):
                usage = compile_attend(
                    getattr(configs, name), head_dim=head_dim, dtype=dtype, merges=name == "alone", **options
                )
                usages[" ".join([name, dtype, str(head_dim), f"up to {max_rows} rows", *options])] = usage
    prefill = prefill_configs(head_dim, is_half=dtype != "float32").wide
    usages[f"prefill {dtype} {head_dim}"] = compile_attend(
        prefill, head_dim=head_dim, dtype=dtype, merges=False, causal=True
    )
    usages[f"merge {dtype} {head_dim}"] = compile_merge(head_dim=head_dim, dtype=dtype)
    return usages


def step_specialisations(dtype: str) -> dict[str, Usage]:
    """The kernels around attention (see `compile_step`)."""
    return {label: _compile(*recipe) for label, *recipe in compile_step.recipes(dtype)}


def main() -> None:
    """Print every default specialisation's usage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head-dim", type=int, nargs="*", default=[64, 80, 96, 128, 256])
    parser.add_argument("--dtype", nargs="*", default=["bfloat16", "float32"], choices=list(_ELEMENTS))
    parser.add_argument("--step", action="store_true", help="the kernels around attention instead")
    chosen = parser.parse_args()
    usages: dict[str, Usage] = {}
    for dtype in chosen.dtype:
        if chosen.step:
            usages |= step_specialisations(dtype)
        else:
            for head_dim in chosen.head_dim:
                usages |= specialisations(head_dim, dtype)
    results = {label: usage._asdict() for label, usage in usages.items()}
    json.dump(results, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
