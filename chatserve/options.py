"""What the engine's options may be: known before anything is started, and the same whoever starts the engine.

Reads values and nothing of the machine, and imports no torch: whether there is so much memory, or such a device, is
found out where it is used.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Final

from chatserve.errors import StartupError

if TYPE_CHECKING:
    from chatserve.config import EngineOptions

MODEL_IMPLS: Final = ("auto", "llama", "hf")
DTYPES: Final = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES: Final = ("auto", "float32", "bfloat16", "float16", "fp8")
ATTENTIONS: Final = ("auto", "torch", "triton")
MAX_BLOCK_SIZE: Final = 256
"""Tokens."""
MIN_BLOCKS: Final = 2
"""Of the device pool: while a block is copied on write, a request holds both."""

_UNITS: Final = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZES: Final = "bytes with an optional suffix (512M, 4G) or a number of blocks (64blocks)"
_SIZE: Final = re.compile(
    # So many digits hold every size that there is, and no number that float or int would choke on.
    r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*(?:([KMGT]?)(?:i?B)?|(blocks?))",
    re.IGNORECASE,
)


def check_options(options: EngineOptions) -> None:
    """See that each value is one that its option may have.

    Raises:
        StartupError: one line: the option, what was given and what is allowed.
    """
    _check_choice("--model-impl", options.model_impl, MODEL_IMPLS)
    _check_choice("--dtype", options.dtype, DTYPES)
    _check_choice("--kv-cache-dtype", options.kv_cache_dtype, KV_CACHE_DTYPES)
    _check_choice("--attention", options.attention, ATTENTIONS)
    if re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", options.device) is None:
        raise StartupError(f"--device must be auto, cpu, cuda or cuda:N, not {options.device!r}")
    if options.attention == "triton" and options.device == "cpu" and os.environ.get("TRITON_INTERPRET", "0") == "0":
        raise StartupError("--attention triton needs a CUDA device, not --device cpu; choose auto or torch")
    if not 1 <= options.block_size <= MAX_BLOCK_SIZE:
        raise StartupError(
            f"--block-size must be at least 1 token and at most {MAX_BLOCK_SIZE}, not {options.block_size}"
        )
    if options.threads < 0:
        raise StartupError(f"--threads must be 0 (one a physical core) or more, not {options.threads}")
    # A block has at least one byte, so that what is too little for blocks of one byte is too little for any.
    if options.kv_cache_memory != "auto":
        check_num_blocks("--kv-cache-memory", options.kv_cache_memory, 1, MIN_BLOCKS)
    if options.host_cache_memory != "auto":
        parse_size("--host-cache-memory", options.host_cache_memory, 1)
    check_num_blocks("--kv-snapshot-limit", options.kv_snapshot_limit, 1, 1, has_auto=False)


def check_num_blocks(option: str, setting: str, block_bytes: int, least: int, *, has_auto: bool = True) -> int:
    """`parse_size`, and at least so many blocks.

    Raises:
        StartupError: names the option, what was given and what is allowed.
    """
    blocks = parse_size(option, setting, block_bytes, has_auto=has_auto)
    if blocks < least:
        of_bytes = f" of {block_bytes} bytes" if block_bytes > 1 else ""
        noun = "block" if least == 1 else "blocks"
        raise StartupError(f"{option} must have room for at least {least} {noun}{of_bytes}, not {setting!r}")
    return blocks


def parse_size(option: str, setting: str, block_bytes: int, *, has_auto: bool = True) -> int:
    """Whole blocks for `512M`, `4G`, `1048576` or `64blocks`. `has_auto`: the option takes `auto` as well.

    Raises:
        StartupError: names the option, what was given and what is allowed.
    """
    match = _SIZE.fullmatch(setting.strip())
    if match is None or (match[3] and "." in match[1]):
        shown = setting if len(setting) <= 64 else f"{setting[:61]}..."
        raise StartupError(f"{option} must be {'auto, ' if has_auto else ''}{_SIZES}, not {shown!r}")
    if match[3]:
        return int(match[1])
    return int(float(match[1]) * _UNITS[match[2].upper()]) // block_bytes


def _check_choice(option: str, setting: str, choices: tuple[str, ...]) -> None:
    if setting not in choices:
        raise StartupError(f"{option} must be {', '.join(choices[:-1])} or {choices[-1]}, not {setting!r}")
