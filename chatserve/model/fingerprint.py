"""What KV depends on, by name: two runs whose names all agree may use each other's blocks.

Weights are not hashed whole, which would take longer than loading them: of each file the length, the time of its last
change and its header, and of each tensor a stretch in the middle. Another fine-tune of the same shape differs in nearly
every tensor, and an edit of one row in the time.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Final

from chatserve.model import model_dir
from chatserve.model.kv_dtype import dtype_name

if TYPE_CHECKING:
    from pathlib import Path

    from chatserve.model.kv_storage import KVStorage
    from chatserve.model.shapes import ModelInfo

_SAMPLE_BYTES: Final = 4096
_BYTES_MEAN: Final = "1"
"""Raised when the same model comes to write other bytes into a block: another rotation, another order."""


def kv_identity(directory: Path, info: ModelInfo, storage: KVStorage) -> dict[str, str]:
    """`model`, which says the scales of 8-bit KV too, `tokenizer`, `dtype` (what the model computes in),
    `kv_cache_dtype` (what is kept) and `layout`.

    Raises:
        StartupError: the directory has become unusable since the model was loaded.
    """
    shape = storage.shape
    block = (shape.num_layers, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
    return {
        "model": _model_digest(directory, info.impl),
        "tokenizer": _tokenizer_digest(directory),
        "dtype": dtype_name(storage.compute_dtype),
        "kv_cache_dtype": dtype_name(storage.dtype),
        "layout": f"{_BYTES_MEAN}:{','.join(map(str, block))}",
    }


def _model_digest(directory: Path, impl: str) -> str:
    digest = hashlib.blake2b(impl.encode(), digest_size=16)
    digest.update((directory / "config.json").read_bytes())
    for path in model_dir.weight_files(directory):
        found = path.stat()
        digest.update(f"{path.name} {found.st_size} {found.st_mtime_ns}".encode())
        with path.open("rb") as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
            digest.update(header)
            start = file.tell()
            for name, entry in sorted(json.loads(header).items()):
                if name == "__metadata__":
                    continue
                first, end = entry["data_offsets"]
                file.seek(start + (first + end) // 2)
                digest.update(file.read(min(_SAMPLE_BYTES, end - first)))
    return digest.hexdigest()


def _tokenizer_digest(directory: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tokenizer_config.json"):
        path = directory / name
        if path.is_file():
            digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
