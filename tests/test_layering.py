"""Imports point down only, and what must not know torch imports without it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHARED = ("chatserve", "chatserve.types", "chatserve.errors", "chatserve.config", "chatserve.options")

# A module belongs to the longest prefix here, and may import from that prefix, from what is named, and from SHARED. A
# name that ends in a dot stands for a whole package.
LAYERS: dict[str, tuple[str, ...]] = {
    "chatserve.types": (),
    "chatserve.errors": (),
    "chatserve.config": (),
    "chatserve.options": (),
    # Plain values that cross layers; they import nothing but what all share.
    "chatserve.sched.plan": (),
    "chatserve.engine.messages": (),
    "chatserve.cache": ("chatserve.sched.plan", "chatserve.engine.messages"),
    "chatserve.sched": ("chatserve.cache.", "chatserve.engine.messages"),
    "chatserve.model": ("chatserve.sched.plan", "chatserve_kernels."),
    "chatserve.engine": ("chatserve.sched.", "chatserve.cache."),
    # The one place where the engine meets a runner made of torch.
    "chatserve.engine.process": ("chatserve.engine.", "chatserve.sched.", "chatserve.cache.", "chatserve.model.runner"),
    "chatserve.engine.framing": ("chatserve.engine.messages",),
    "chatserve.engine.client": ("chatserve.engine.messages", "chatserve.engine.framing"),
    "chatserve.chat": ("chatserve.engine.client", "chatserve.engine.messages"),
    "chatserve.server": ("chatserve.chat.", "chatserve.engine.client", "chatserve.engine.messages"),
    # The terminal client shares no code with the server that it talks to.
    "chatserve.terminal": (),
    "chatserve.progress": (),
    "chatserve.supervisor": (
        "chatserve.server.auth",
        "chatserve.server.origin",
        "chatserve.model.catalog",
        # What a store's URL may look like is known in one place.
        "chatserve.chat.redis_link",
    ),
    "chatserve.doctor": ("chatserve.supervisor.", "chatserve.server.", "chatserve.model.catalog"),
    "chatserve.bench": ("chatserve.",),
    "chatserve.cli": ("chatserve.",),
    "chatserve.cli_options": ("chatserve.supervisor.paths",),
    "chatserve.__main__": ("chatserve.cli",),
    "chatserve_kernels": (),
}

TORCH_FREE = ("chatserve.cache", "chatserve.sched", "chatserve.chat", "chatserve.server", "chatserve.supervisor")
TORCH_FREE_MODULES = (
    "chatserve.cli",
    "chatserve.cli_options",
    "chatserve.options",
    "chatserve.doctor",
    "chatserve.engine.client",
    "chatserve.engine.messages",
    "chatserve.model.catalog",
    "chatserve.terminal.app",
)


def modules() -> dict[str, Path]:
    """Every module of ours by its dotted name."""
    found = {}
    for base, package in ((ROOT, "chatserve"), (ROOT / "kernels", "chatserve_kernels")):
        for path in sorted((base / package).rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, anywhere in it; `from package import name` as `package.name`."""
    known = modules()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides what it reaches"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in known else node.module


def layer_of(module: str) -> str:
    return max((name for name in LAYERS if module == name or module.startswith(f"{name}.")), key=len, default="")


def allowed(module: str, imported: str) -> bool:
    layer = layer_of(module)
    if imported in SHARED or imported == layer or imported.startswith(f"{layer}."):
        return True
    return any(imported == name or (name.endswith(".") and f"{imported}.".startswith(name)) for name in LAYERS[layer])


def test_every_module_has_a_layer() -> None:
    assert [name for name in modules() if name != "chatserve" and not layer_of(name)] == []


def test_imports_point_down_only() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module, path in modules().items()
        if module != "chatserve"
        for imported in imports(path)
        if imported.split(".")[0] in {"chatserve", "chatserve_kernels"} and not allowed(module, imported)
    ]
    assert wrong == []


def test_kernels_import_torch_triton_and_numpy_only() -> None:
    ours = {"torch", "triton", "numpy", "chatserve_kernels"} | sys.stdlib_module_names
    # The benchmark may measure a rival where one happens to be installed.
    rivals = {"chatserve_kernels.bench.rivals": {"flashinfer"}}
    wrong = [
        f"{module} imports {imported}"
        for module, path in modules().items()
        if module.startswith("chatserve_kernels")
        for imported in imports(path)
        if imported.split(".")[0] not in ours | rivals.get(module, set())
    ]
    assert wrong == []


def test_the_product_imports_no_tests() -> None:
    assert [
        name for name, path in modules().items() if any(each.split(".")[0] == "tests" for each in imports(path))
    ] == []


def test_the_rule_can_fail() -> None:
    assert not allowed("chatserve.cache.block_pool", "chatserve.sched.scheduler")
    assert not allowed("chatserve.chat.tree", "chatserve.engine.engine")
    assert not allowed("chatserve.sched.scheduler", "chatserve.model.runner")
    assert allowed("chatserve.server.hub", "chatserve.chat.events")


def test_what_needs_no_torch_imports_without_it() -> None:
    names = [
        name
        for name in modules()
        if name in TORCH_FREE_MODULES or any(name == each or name.startswith(f"{each}.") for each in TORCH_FREE)
    ]
    program = (
        f"import importlib, sys\nsys.modules['torch'] = None\nfor name in {names!r}: importlib.import_module(name)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
