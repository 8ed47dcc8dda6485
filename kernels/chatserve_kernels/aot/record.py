"""What Triton would compile for the launches that a piece of code makes, on any machine and without a GPU.

Inside `recording` tensors on the device `CUDA` have no memory, and launches run nothing: Triton's own front end sorts
each launch's arguments into types, constants and divisibilities, as it does on a GPU of that capability, and a hook
takes them down where it would compile. Must not know any kernel.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget

from chatserve_kernels import early_launch

if TYPE_CHECKING:
    from collections.abc import Iterator

CUDA = torch.device("cuda", 0)
_WARP = 32


@dataclass(frozen=True, slots=True, eq=False)
class Specialisation:
    """What Triton's compiler needs for one binary."""

    kernel: Any
    """A `triton.JITFunction`."""
    capability: tuple[int, int]
    signature: dict[str, str]
    """Types by parameter; constexpr: a constant."""
    constants: dict[tuple[int, ...], Any]
    """By the parameter's index."""
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    key: str
    """The same for launches that share a binary."""

    @property
    def target(self) -> GPUTarget:
        return _target(self.capability)

    @property
    def name(self) -> str:
        return str(self.kernel.__name__)

    @property
    def constant_values(self) -> dict[str, Any]:
        """The compile-time arguments by name."""
        names = self.kernel.arg_names
        return {names[index]: value for (index, *_), value in self.constants.items()}


@contextlib.contextmanager
def recording(capability: tuple[int, int]) -> Iterator[list[Specialisation]]:
    """The specialisations of the launches made inside, one a launch, for a GPU of `capability`.

    Not for a process that uses a GPU, nor one whose kernels are interpreted.

    Raises:
        RuntimeError: kernels are interpreted.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("expected compiled kernels, got interpreted ones; unset TRITON_INTERPRET")
    recorded: list[Specialisation] = []

    def take_down(*, key: str, fn: Any, compile: dict[str, Any], **_: object) -> bool:  # noqa: A002 - Triton's name
        options = json.loads(compile["specialization_data"])["options"]
        recorded.append(
            Specialisation(
                kernel=fn.jit_function,
                capability=capability,
                signature=compile["signature"],
                constants=compile["constants"],
                attributes=compile["configs"][0],
                options={name: _tuple(value) for name, value in options.items()},
                key=f"{fn.module}.{fn.name} {capability} {key}",
            )
        )
        return True  # there is nothing to compile or to run

    driver = triton.runtime.driver
    before = driver._active  # noqa: SLF001 - `active` would look for a GPU
    hook = triton.knobs.runtime.jit_cache_hook
    get_capability = torch.cuda.get_device_capability
    early_launch.can_launch_early.cache_clear()
    driver.set_active(_Driver(capability))
    triton.knobs.runtime.jit_cache_hook = take_down
    torch.cuda.get_device_capability = lambda _=None: capability
    try:
        with _WithoutMemory():
            yield recorded
    finally:
        torch.cuda.get_device_capability = get_capability
        triton.knobs.runtime.jit_cache_hook = hook
        driver.set_active(before)
        early_launch.can_launch_early.cache_clear()


class _WithoutMemory(TorchFunctionMode):
    """Tensors made on a CUDA device are on torch's device without memory, and say that they are on CUDA."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        del types
        kwargs = kwargs or {}
        if func == torch.Tensor.is_cuda.__get__:
            return args[0].is_meta
        if func == torch.Tensor.device.__get__:
            device = func(*args, **kwargs)
            return CUDA if device.type == "meta" else device
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


class _Driver:
    """What Triton's front end asks a GPU's driver for."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        """A device for each capability, since Triton remembers a device's target."""
        return _arch(self._capability)

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return _target(self._capability)


def _arch(capability: tuple[int, int]) -> int:
    return 10 * capability[0] + capability[1]


def _target(capability: tuple[int, int]) -> GPUTarget:
    return GPUTarget("cuda", _arch(capability), _WARP)


def _tuple(value: Any) -> Any:
    """JSON has lists where options have tuples."""
    return tuple(map(_tuple, value)) if isinstance(value, list) else value
