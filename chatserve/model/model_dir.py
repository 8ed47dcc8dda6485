"""What a usable model directory is, and how a damaged one is told apart.

Owns the manifest that the catalog writes beside a model it made, and the checks that need no torch: a configuration
that parses, weights that are all there and as long as their headers say, a tokenizer. Must not know where models come
from.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from chatserve.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Callable

MANIFEST_NAME: Final = "chatserve-manifest.json"
MANIFEST_FORMAT: Final = 1
MAX_HASHED_BYTES: Final = 1 << 30
"""Longer files are checked by length alone at each start: hashing them would take longer than loading."""
_MAX_HEADER_BYTES: Final = 100 << 20


class FileEntry(msgspec.Struct, frozen=True):
    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Written last, so that a directory that has one was complete."""

    format: int = MANIFEST_FORMAT
    model: str
    source_sha256: str
    files: dict[str, FileEntry]


def sha256_of(path: Path, progress: Callable[[int, int], None] | None = None) -> str:
    """Hex digest of a file's bytes. `progress` gets (bytes done, bytes in all)."""
    digest = hashlib.sha256()
    total = path.stat().st_size
    done = 0
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            digest.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress(done, total)
    return digest.hexdigest()


def write_manifest(directory: Path, *, model: str, source_sha256: str) -> None:
    """Record every file that stands in `directory` now."""
    files = {
        path.name: FileEntry(path.stat().st_size, sha256_of(path))
        for path in sorted(directory.iterdir())
        if path.is_file() and path.name != MANIFEST_NAME
    }
    manifest = Manifest(model=model, source_sha256=source_sha256, files=files)
    (directory / MANIFEST_NAME).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=2))


def read_manifest(directory: Path) -> Manifest | None:
    """None: there is none, or another version of this program wrote it."""
    try:
        manifest = msgspec.json.decode((directory / MANIFEST_NAME).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError):
        return None
    return manifest if manifest.format == MANIFEST_FORMAT else None


def verify_manifest(directory: Path, manifest: Manifest, *, repair: str) -> None:
    """Compare the directory with its manifest.

    Raises:
        StartupError: names the first file that differs, and ends in `repair`, what to do.
    """
    for name, expected in manifest.files.items():
        path = directory / name
        try:
            size = path.stat().st_size
            if size != expected.size:
                raise StartupError(f"{path} is damaged: {size} bytes, expected {expected.size}; {repair}")
            if size <= MAX_HASHED_BYTES and sha256_of(path) != expected.sha256:
                raise StartupError(f"{path} is damaged: its SHA-256 is not the recorded one; {repair}")
        except OSError as error:
            raise StartupError(f"{path} cannot be read ({error.strerror}); {repair}") from error


def check_directory(directory: Path) -> None:
    """Check that a directory holds a whole model: configuration, safetensors and a tokenizer.

    Raises:
        StartupError: one line that names the file and what is wrong with it.
    """
    read_config(directory)
    for path in weight_files(directory):
        _check_weights(path)
    if not any((directory / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise StartupError(f"{directory} has no tokenizer.json; a model directory needs its tokenizer's files too")


def read_config(directory: Path) -> dict[str, Any]:
    """`config.json` as an object.

    Raises:
        StartupError: missing, unreadable or not an object with a `model_type`.
    """
    path = directory / "config.json"
    config = _read_json(path, hint="a model directory holds config.json, *.safetensors and tokenizer.json")
    if not isinstance(config.get("model_type"), str):
        raise StartupError(f"{path} names no model_type; is it the configuration of a transformers model?")
    return config


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model, following the index of a sharded one.

    Raises:
        StartupError: there are none, or the index names one that is missing.
    """
    index_path = directory / "model.safetensors.index.json"
    if index_path.is_file():
        weight_map = _read_json(index_path, hint="download the model again").get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise StartupError(f"{index_path} has no weight_map; download the model again")
        files = [directory / name for name in sorted(set(weight_map.values()))]
    else:
        files = [path for path in sorted(directory.glob("*.safetensors")) if not path.name.startswith("consolidated")]
    if not files:
        raise StartupError(f"{directory} has no *.safetensors; other weight formats are not read (a .gguf file is)")
    for path in files:
        if not path.is_file():
            raise StartupError(f"{path} is missing, though {index_path.name} names it; download the model again")
    return files


def _check_weights(path: Path) -> None:
    """A safetensors file is 8 bytes of header length, a JSON header with each tensor's offsets, and the data."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if size < 8 or header_bytes > min(size - 8, _MAX_HEADER_BYTES):
            raise StartupError(f"{path} is not a whole safetensors file ({size} bytes); download the model again")
        try:
            header = json.loads(file.read(header_bytes))
            end = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StartupError(f"{path} has an unreadable safetensors header; download the model again") from error
    expected = 8 + header_bytes + end
    if size != expected:
        raise StartupError(f"{path} is truncated: {size} bytes, its header says {expected}; download the model again")


def _read_json(path: Path, *, hint: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise StartupError(f"{path} is missing; {hint}") from error
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise StartupError(f"{path} is not valid JSON (truncated?): {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value
