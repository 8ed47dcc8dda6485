"""Compiles what an engine of a shape needs on this GPU, several kernels at a time, into Triton's cache on disk.

`python -m chatserve.bench._compile_ahead SHAPE PART DIRECTORY` compiles one part of it, with a model of one layer:
sizes of layers are what is compiled in, and not how many there are.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from chatserve.model.graphs import GraphShape

PARTS: Final = ("few", "many", "mixed", "eager")


async def compile_ahead(shape: str, directory: Path) -> None:
    """All parts, each in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    processes = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "chatserve.bench._compile_ahead", shape, part, str(directory / part)),
            env=environment,
        )
        for part in PARTS
    ]
    for process in processes:
        await process.wait()


def compile_part(shape: str, part: str, directory: Path) -> None:
    """Launch every kernel of a part once."""
    import torch  # noqa: PLC0415 - the parent needs none

    from chatserve.bench._engine_process import SHAPES  # noqa: PLC0415
    from chatserve.model.cuda_setup import CudaSetup  # noqa: PLC0415
    from chatserve.model.graphs import GraphShape  # noqa: PLC0415
    from chatserve.model.kv_storage import KVStorage  # noqa: PLC0415
    from chatserve.model.loader import load_model  # noqa: PLC0415
    from chatserve.model.shapes import KVShape  # noqa: PLC0415

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**SHAPES[shape], "num_hidden_layers": 1}))
    device = torch.device("cuda")
    model, dtype = load_model(directory, device, "llama", "auto", "random")
    info = model.info
    kv_shape = KVShape(num_layers=1, num_kv_heads=info.num_kv_heads, head_dim=info.head_dim, block_size=16)
    setup = CudaSetup(
        model=model,
        shape=kv_shape,
        dtype=dtype,
        kv_dtype=dtype,
        device=device,
        attention="auto",
        max_running=256,
        max_tokens=8192,
        context_tokens=20480,
        graphs=False,
    )
    shapes: dict[str, list[GraphShape]] = {
        "few": [GraphShape(16), GraphShape(1)],
        "many": [GraphShape(256)],
        "mixed": [GraphShape(1, 64, 32)],
        "eager": [],
    }
    storage = KVStorage(kv_shape, num_blocks=4, num_host_blocks=0, dtype=dtype, device=device)
    setup.executor(storage, shapes[part])
    if part == "eager":
        setup.run_largest(storage)
    torch.cuda.synchronize()


if __name__ == "__main__":
    compile_part(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
