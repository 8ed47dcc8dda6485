"""Which attention backend serves a model: our kernels where they can, plain torch everywhere else.

The only module that knows both; imports the kernels, and triton with them, when they are chosen and not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from chatserve.errors import StartupError
from chatserve.model.attention import AttentionBackend, TorchAttention

if TYPE_CHECKING:
    from chatserve.model.kv_storage import KVStorage

CHOICES = ("auto", "torch", "triton")


def check_choice(setting: str) -> None:
    """Raises:
    StartupError: not one of `CHOICES`.
    """
    if setting not in CHOICES:
        raise StartupError(f"attention must be auto, torch or triton, not {setting!r}")


def choose_backend(setting: str, storage: KVStorage, num_heads: int) -> AttentionBackend:
    """The backend that a setting asks for.

    Raises:
        StartupError: the setting is not one of `CHOICES`, or is triton where the kernels cannot serve the model.
    """
    check_choice(setting)
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
        return TorchAttention(storage)
    raise StartupError(f"attention triton cannot be used: {reason}; choose auto or torch")
