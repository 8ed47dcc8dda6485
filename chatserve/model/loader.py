"""From a model directory to a model on a device.

Reads safetensors memory-mapped and strictly: a name that is missing, not expected, or of another shape is an error that
names it. Chooses the precision and between our own definition and transformers'. Must not know about KV or requests.
"""

from __future__ import annotations

import logging
import math
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from safetensors import SafetensorError, safe_open

from chatserve.errors import StartupError
from chatserve.model import model_dir

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path
    from types import TracebackType

    from transformers import PreTrainedConfig

    from chatserve.model.shapes import CausalModel

_log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SHOWN_NAMES = 4
_PROGRESS_S = 2.0
_RANDOM_SCALE = 0.02
"""Standard deviation of random weights, as models are initialised with: activations stay of a sane size."""


class TensorSource(Protocol):
    """Named tensors in one precision on one device, each taken once."""

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """One tensor."""
        ...

    def take_merged(self, parts: Sequence[tuple[str, int]], *width: int) -> torch.Tensor:
        """Tensors of (name, rows), each [rows, *width], one under the other, without a second copy of any."""
        ...

    def take_number(self, name: str) -> float | None:
        """The one number of a tensor that may be there."""
        ...

    def ignore(self, name: str) -> None:
        """A tensor that may be there and is not needed."""
        ...


class WeightReader:
    """The tensors of a directory's safetensors files, memory-mapped until `close`.

    Raises:
        StartupError: from `take`, a missing name or another shape; from `finish`, names that nobody took.
    """

    def __init__(self, directory: Path, *, dtype: torch.dtype, device: torch.device) -> None:
        self._directory = directory
        self._dtype = dtype
        self._device = device
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._bytes = self._total_bytes = 0
        self._say_at = time.monotonic() + _PROGRESS_S
        for path in model_dir.weight_files(directory):
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                self._stack.close()
                raise StartupError(f"{path} cannot be read: {error}; fetch the model again") from error
            self._files.update(dict.fromkeys(file.keys(), file))
            self._total_bytes += path.stat().st_size
        self._left = set(self._files)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._mapped(name, shape).to(device=self._device, dtype=self._dtype)
        self._tell()
        return tensor

    def take_merged(self, parts: Sequence[tuple[str, int]], *width: int) -> torch.Tensor:
        if len(parts) == 1:
            (name, rows), *_ = parts
            return self.take(name, (rows, *width))
        merged = torch.empty((sum(rows for _, rows in parts), *width), dtype=self._dtype, device=self._device)
        for (name, rows), part in zip(parts, merged.split([rows for _, rows in parts]), strict=True):
            part.copy_(self._mapped(name, (rows, *width)))
            self._tell()
        return merged

    def take_number(self, name: str) -> float | None:
        if name not in self._files:
            return None
        shape = tuple(self._files[name].get_slice(name).get_shape())
        if math.prod(shape) != 1:
            raise StartupError(f"{self._directory}: {name} has shape {shape}, one number is expected")
        return float(self._mapped(name, shape))

    def ignore(self, name: str) -> None:
        self._left.discard(name)

    def _mapped(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A view of the file."""
        file = self._files.get(name)
        if file is None:
            raise StartupError(f"{self._directory} lacks the weight {name}; is it a whole model of this architecture?")
        tensor: torch.Tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise StartupError(
                f"{self._directory}: {name} has shape {tuple(tensor.shape)}, the configuration says {shape}"
            )
        if not tensor.dtype.is_floating_point:
            raise StartupError(f"{self._directory}: {name} is {tensor.dtype}; quantised weights are not read")
        self._left.discard(name)
        self._bytes += tensor.nbytes
        return tensor

    def _tell(self) -> None:
        """Say how far it is, where it takes long enough for somebody to wonder."""
        now = time.monotonic()
        if now >= self._say_at:
            self._say_at = now + _PROGRESS_S
            _log.info("weights: %.1f of %.1f GB", self._bytes / 1e9, self._total_bytes / 1e9)

    def finish(self) -> None:
        if self._left:
            names = sorted(self._left)
            more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
            shown = ", ".join(names[:_SHOWN_NAMES])
            raise StartupError(f"{self._directory} holds weights that this architecture does not have: {shown}{more}")


class RandomWeights:
    """Normal numbers in place of a checkpoint, the same for the same seed: they time like real ones.

    Those of norms are near 1.
    """

    def __init__(self, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self._dtype = dtype
        self._device = device
        self._generator = torch.Generator(device).manual_seed(seed)

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        mean = 1.0 if name.endswith("norm.weight") else 0.0
        return tensor.normal_(mean, _RANDOM_SCALE, generator=self._generator)

    def take_merged(self, parts: Sequence[tuple[str, int]], *width: int) -> torch.Tensor:
        return self.take(parts[0][0], (sum(rows for _, rows in parts), *width))

    def take_number(self, name: str) -> float | None:
        """Has none that may be missing."""

    def ignore(self, name: str) -> None:
        """Has none that could be left over."""


def read_config(directory: Path) -> PreTrainedConfig:
    """The configuration as transformers understands it, so that old spellings are read as it reads them.

    Raises:
        StartupError: unreadable, or of a kind that this version of transformers does not know.
    """
    from transformers import AutoConfig  # noqa: PLC0415 - seconds to import; errors before it come at once

    raw = model_dir.read_config(directory)
    if "quantization_config" in raw and not _quantises_kv_alone(raw["quantization_config"]):
        raise StartupError(f"{directory} is quantised; serve the original weights, or a .gguf file, which is widened")
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise StartupError(f"{directory / 'config.json'} is not usable: {first}") from error
    return config


def _quantises_kv_alone(quantization: object) -> bool:
    """Whether weights are as they were, and the checkpoint has scales for 8-bit KV beside them: what llm-compressor
    writes (the format `compressed-tensors`) where it was asked for a `kv_cache_scheme` and nothing else."""
    return (
        isinstance(quantization, dict)
        and bool(quantization.get("kv_cache_scheme"))
        and not quantization.get("config_groups")
        and quantization.get("quant_method") == "compressed-tensors"
    )


def choose_device(name: str) -> torch.device:
    """`auto`, `cpu`, `cuda` or `cuda:1` as a device that is there.

    Raises:
        StartupError: names what was asked for and what is allowed.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind not in {"cpu", "cuda"} or (index and not index.isdigit()) or (kind == "cpu" and index):
        raise StartupError(f"device must be auto, cpu, cuda or cuda:N, not {name!r}")
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise StartupError(f"device {name} was asked for, but torch {torch.__version__} sees no CUDA device")
        if index and int(index) >= torch.cuda.device_count():
            raise StartupError(f"device {name} was asked for, but there are {torch.cuda.device_count()} CUDA devices")
    return torch.device(name)


def choose_dtype(setting: str, config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """What was asked for; for `auto` float32 on a CPU, where it is both exact and fastest, and on CUDA the checkpoint's
    16 bits, else bfloat16."""
    if setting in DTYPES:
        return DTYPES[setting]
    assert setting == "auto", f"dtype {setting!r} was not checked"
    if device.type == "cpu":
        return torch.float32
    stored = getattr(config, "dtype", None)
    return stored if stored in {torch.float16, torch.bfloat16} else torch.bfloat16


def load_model(
    directory: Path, device: torch.device, impl: str, dtype_setting: str = "auto", load_format: str = "safetensors"
) -> tuple[CausalModel, torch.dtype]:
    """The model of a directory, and the precision that it and its KV are held in.

    `impl` is `llama` (our own definition), `hf` (transformers' model through our attention) or `auto`: the first that
    can run it. `load_format` `random` needs a configuration alone and makes weights up, for measurements.

    Raises:
        StartupError: the directory is damaged, or this program cannot run what is in it.
    """
    if load_format not in {"safetensors", "random"}:
        raise StartupError(f"load-format must be safetensors or random, not {load_format!r}")
    is_random = load_format == "random"
    if not is_random:
        model_dir.check_directory(directory)
    config = read_config(directory)
    dtype = choose_dtype(dtype_setting, config, device)
    from chatserve.model import llama  # noqa: PLC0415 - needs transformers, seconds to import

    if is_random:
        return llama.LlamaModel(config, RandomWeights(dtype=dtype, device=device)), dtype
    if impl == "llama" or (impl == "auto" and llama.why_not(config) is None):
        with WeightReader(directory, dtype=dtype, device=device) as weights:
            model = llama.LlamaModel(config, weights)
            weights.finish()
        return model, dtype
    from chatserve.model import hf  # noqa: PLC0415

    return hf.HFModel(directory, config, dtype=dtype, device=device), dtype
