"""vLLM beside our engine in one run of `gpu`: what it is asked for, and both sides' figures in one table."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, Final

from chatserve.bench import _vllm
from chatserve.bench._engine_process import SHAPES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

_ENGINES: Final[dict[str, dict[str, Any]]] = {
    "main": {"max_model_len": 20480, "max_num_seqs": 256, "gpu_memory_utilization": 0.88},
    # A pool of four of ten histories, and all ten on the host, as our section `turn` has them.
    "turn": {
        "max_model_len": 16384,
        "max_num_seqs": 32,
        "num_gpu_blocks_override": 2112,
        "kv_offloading_size": 16.0,
        "kv_offloading_backend": "native",
    },
}
SECTIONS: Final = ("decode", "shared", "sampling", "prefill", "mixed", "turn")


async def measure(python: Path, shape: str, work: dict[str, Any], wanted: Sequence[str], directory: Path) -> Any:
    """Its figures, named as ours; a section that did not come is left out. `work`: see `Bench.work`."""
    results: dict[str, Any] = {}
    for name, engine in _ENGINES.items():
        sections = [section for section in SECTIONS if section in wanted and (section == "turn") == (name == "turn")]
        if not sections:
            continue
        print(f"vLLM: {', '.join(sections)}", flush=True)
        folder = directory / f"vllm-{name}"
        folder.mkdir()
        asked = {**work, "config": SHAPES[shape], "engine": engine, "sections": sections}
        (folder / "work.json").write_text(json.dumps(asked))
        found = folder / "results.json"
        # -P: this folder has modules whose names are those of the standard library's.
        process = await asyncio.create_subprocess_exec(
            str(python), "-uP", _vllm.__file__, str(folder / "work.json"), str(found)
        )
        try:
            if await process.wait():
                print(f"  vLLM ended with exit code {process.returncode}", flush=True)
        finally:
            if process.returncode is None:
                process.kill()
        results |= json.loads(found.read_text()) if found.is_file() else {}
    return results


def comparison(ours: dict[str, Any], theirs: dict[str, Any]) -> Iterator[str]:
    """A line for every figure that both have."""
    for section in SECTIONS:
        if section not in ours or section not in theirs:
            continue
        mine, other = ours[section], theirs[section]
        for name, a, b in _pairs(section, mine, other):
            yield f"  {name:34} {a:10,.2f} {b:10,.2f} {a / b:7.3f}"


def _pairs(section: str, mine: Any, other: Any) -> Iterator[tuple[str, float, float]]:
    if isinstance(mine, list):
        for a, b in zip(mine, other, strict=True):
            size = f"{a['context']:,}" if "context" in a else f"({a['shared']:,} shared + {a['own']})"
            yield f"{a['batch']} x {size}, ms", a["step_ms"], b["step_ms"]
    else:
        for name in other:
            if isinstance(mine.get(name), (int, float)):
                yield f"{section}: {name.removesuffix('_ms').replace('_', ' ')}", mine[name], other[name]
