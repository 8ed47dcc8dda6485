"""`chatserve doctor`: looks at everything that `chatserve serve` needs, and says what to do about what is wrong.

Changes nothing that outlives it. Each check is a function of the settings that returns findings; none stops another.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Literal

import msgspec
from packaging.requirements import Requirement
from rich.console import Console
from rich.markup import escape

import chatserve
from chatserve.config import ServeSettings
from chatserve.errors import StartupError
from chatserve.supervisor import network, paths

Level = Literal["ok", "warn", "fail"]

_GB: Final = 1e9
_MIN_PULL_BYTES: Final = 1_000_000_000
_MIN_MEMORY_BYTES: Final = 2_000_000_000
_PROBE_TIMEOUT_S: Final = 60
_ANSWER_TIMEOUT_S: Final = 5
_COLOURS: Final[dict[Level, str]] = {"ok": "green", "warn": "yellow", "fail": "red"}

_DEVICE_PROBE: Final = (
    "import torch; c = torch.cuda.is_available(); "
    "print(torch.__version__, torch.cuda.get_device_name(0) if c else 'cpu', sep='\\t')"
)


class Finding(msgspec.Struct, frozen=True):
    """One line of the report. `advice` says what to do, where there is something to do."""

    what: str
    level: Level
    said: str
    advice: str = ""


def examine(settings: ServeSettings) -> Iterator[Finding]:
    """All checks, in the order in which a start meets them."""
    checks: tuple[Callable[[ServeSettings], Iterator[Finding]], ...] = (
        _python,
        _packages,
        _memory,
        _address,
        _data_dir,
        _store,
        _model,
        _device,
        _page,
    )
    for check in checks:
        try:
            yield from check(settings)
        except StartupError as error:
            yield Finding(check.__name__.strip("_").replace("_", " "), "fail", str(error))


def show(findings: Iterator[Finding]) -> int:
    """Print them as they come; 1 where something must be done, else 0."""
    console = Console(highlight=False)
    failed = 0
    for each in findings:
        colour = _COLOURS[each.level]
        console.print(f"[{colour}]{each.level:4}[/{colour}] {each.what:9} {escape(each.said)}", soft_wrap=True)
        if each.advice:
            console.print(f"     {'':9} {escape(each.advice)}", soft_wrap=True)
        failed += each.level == "fail"
    console.print("[green]All set: `chatserve serve`[/green]" if not failed else f"[red]{failed} to put right[/red]")
    return int(failed > 0)


def _python(_: ServeSettings) -> Iterator[Finding]:
    said = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if (3, 11) <= sys.version_info < (3, 14):
        yield Finding("python", "ok", said)
    else:
        yield Finding("python", "fail", said, "Python 3.11, 3.12 or 3.13 is needed; scripts/serve finds one")


def _packages(_: ServeSettings) -> Iterator[Finding]:
    try:
        wanted = importlib.metadata.requires("chatserve") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("packages", "warn", "chatserve runs without being installed", "scripts/serve installs it")
        return
    wrong: list[str] = []
    checked = 0
    for requirement in map(Requirement, wanted):
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue
        checked += 1
        try:
            found = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{requirement.name} is missing")
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            wrong.append(f"{requirement.name} is {found}, not {requirement.specifier}")
    if wrong:
        yield Finding("packages", "fail", "; ".join(wrong), "remove .venv and run scripts/serve, or pip install again")
    else:
        yield Finding("packages", "ok", f"chatserve {chatserve.__version__}, {checked} packages as asked for")


def _memory(_: ServeSettings) -> Iterator[Finding]:
    available = _available_memory()
    if available is None:
        return
    said = f"{available / _GB:.1f} GB of memory are available"
    if available < _MIN_MEMORY_BYTES:
        yield Finding("memory", "warn", said, "the default model needs about 2 GB; end other programs")
    else:
        yield Finding("memory", "ok", said)


def _available_memory() -> int | None:
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None


def _address(settings: ServeSettings) -> Iterator[Finding]:
    network.check_exposure(settings.host, settings.tokens_file)
    try:
        network.listen(settings.host, settings.port).close()
    except StartupError:
        if not _is_served(settings):
            raise
        yield Finding("address", "ok", f"{settings.host}:{settings.port} is served by the ChatServe that runs now")
        return
    said = f"{settings.host}:{settings.port} is free"
    if settings.tokens_file is None:
        yield Finding("address", "ok", f"{said}; without tokens, everyone on this machine is the user local")
    else:
        yield Finding("address", "ok", f"{said}; tokens are in {settings.tokens_file}")


def _is_served(settings: ServeSettings) -> bool:
    """Whether what answers at the address is the server whose data directory this is."""
    if not paths.in_use(settings.data_dir):
        return False
    host = network.reachable_host(settings.host)
    return asyncio.run(network.http_status(host, settings.port, "/healthz", timeout_s=_ANSWER_TIMEOUT_S)) == 200


def _data_dir(settings: ServeSettings) -> Iterator[Finding]:
    for what, path, least in (
        ("data", settings.data_dir, paths.MIN_FREE_BYTES),
        ("cache", settings.cache_dir, _MIN_PULL_BYTES),
    ):
        try:
            yield _directory(what, path, least)
        except StartupError as error:
            yield Finding(what, "fail", str(error))


def _directory(what: str, path: Path, least: int) -> Finding:
    existed = path.exists()
    paths.prepare_data_dir(path, min_free_bytes=0)
    free = shutil.disk_usage(path).free
    if not existed:
        path.rmdir()
    said = f"{path} can be written, {free / _GB:.1f} GB free"
    if free < least:
        return Finding(what, "warn", said, f"free some space: {least / _GB:.1f} GB are wanted")
    return Finding(what, "ok", said)


def _store(settings: ServeSettings) -> Iterator[Finding]:
    if settings.redis_url is not None:
        asyncio.run(network.ping_redis(settings.redis_url))
        yield Finding("store", "ok", f"Redis answers at {network.without_password(settings.redis_url)}")
        return
    from chatserve.supervisor.embedded_store import EmbeddedStore  # noqa: PLC0415 - needs the redis package

    with tempfile.TemporaryDirectory(prefix="chatserve-doctor-") as made:
        store = EmbeddedStore(Path(made), Path(made) / "store.sock")
        store.start()
        store.stop()
    yield Finding("store", "ok", "the built-in store starts and answers")


def _model(settings: ServeSettings) -> Iterator[Finding]:
    from chatserve.model import catalog  # noqa: PLC0415 - loads the hub client

    found = catalog.resolve(settings.model, settings.cache_dir)
    if found is None:
        advice = f"`chatserve serve` fetches it, and so does `chatserve model pull {settings.model}`"
        yield Finding("model", "warn", f"{settings.model} is not here yet", advice)
    else:
        yield Finding("model", "ok", f"{settings.model} is whole at {found}")


def _device(settings: ServeSettings) -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        return  # said under packages
    # In a process of its own: torch is large, and a broken driver can take the process that loads it along.
    probe = subprocess.run(  # noqa: S603 - our own interpreter and a constant
        [sys.executable, "-P", "-c", _DEVICE_PROBE],
        capture_output=True,
        text=True,
        timeout=_PROBE_TIMEOUT_S,
        check=False,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    if probe.returncode:
        last = (probe.stderr.strip().splitlines() or ["no reason given"])[-1]
        yield Finding("device", "fail", f"torch does not load: {last}", "remove .venv and run scripts/serve again")
        return
    version, _, name = probe.stdout.strip().partition("\t")
    if name != "cpu":
        yield Finding("device", "ok", f"{name}, torch {version}")
    elif settings.device == "cuda":
        yield Finding("device", "fail", f"torch {version} sees no CUDA device", "install the driver, or --device cpu")
    else:
        yield Finding("device", "ok", f"the CPU, {os.cpu_count()} threads, torch {version}")


def _page(_: ServeSettings) -> Iterator[Finding]:
    from chatserve.server.page import find_web_dir  # noqa: PLC0415 - loads the web framework

    if (found := find_web_dir()) is not None:
        yield Finding("page", "ok", f"the chat page is in {found}")
    else:
        advice = "run from a checkout, or use `chatserve chat`"
        yield Finding("page", "warn", "the folder web is not beside the package: only the APIs work", advice)
