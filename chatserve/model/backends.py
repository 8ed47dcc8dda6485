"""Which attention backend serves a model: our kernels where they can, plain torch everywhere else.

The only module that knows both; imports the kernels, and triton with them, when they are chosen and not before.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

from chatserve.errors import StartupError
from chatserve.model.attention import AttentionBackend, TorchAttention

if TYPE_CHECKING:
    import torch

    from chatserve.model.kv_storage import KVStorage

_log = logging.getLogger(__name__)


def check_device(setting: str, device: torch.device) -> None:
    """What can be said of a setting before a model is loaded.

    Raises:
        StartupError: it is triton, and the kernels cannot run on such a device.
    """
    if setting != "triton":
        return
    try:
        from chatserve.model import triton_attention  # noqa: PLC0415 - as below
    except ImportError:
        raise _refused("triton is not installed") from None
    if reason := triton_attention.why_not_device(device):
        raise _refused(reason)


def choose_backend(setting: str, storage: KVStorage, num_heads: int) -> AttentionBackend:
    """The backend that a setting asks for.

    Raises:
        StartupError: the setting is triton where the kernels cannot serve the model.
    """
    if setting == "torch" or (setting == "auto" and storage.device_pool.device.type != "cuda"):
        return TorchAttention(storage)
    try:
        from chatserve.model import triton_attention  # noqa: PLC0415 - needs triton, which not every system has
    except ImportError:
        reason: str | None = "triton is not installed"
    else:
        reason = triton_attention.why_not(storage, num_heads)
        if reason is None:
            return triton_attention.TritonAttention(storage, num_heads)
    if setting == "auto":
        _say_once(f"attention is plain torch's, which is slower than our kernels: {reason}")
        return TorchAttention(storage)
    raise _refused(reason)


@cache
def _say_once(line: str) -> None:
    """A backend is chosen again and again while an engine starts."""
    _log.warning("%s", line)


def _refused(reason: str | None) -> StartupError:
    return StartupError(f"--attention triton cannot be used: {reason}; choose auto or torch")
