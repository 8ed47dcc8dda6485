"""Makes the checkout's `.venv` and installs into it what pyproject.toml asks for.

Run as `python -I scripts/_setup.py VENV [GROUP ...]` by the other scripts, when the stamp in the environment differs
from what they want. Uses the standard library only. Safe to run twice and at once: one works, the others wait.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MIN_FREE_BYTES = 3_000_000_000
"""What an environment with a CPU build of torch takes, roughly."""

NO_NETWORK = (
    "Failed to establish a new connection",
    "Temporary failure in name resolution",
    "Name or service not known",
    "Network is unreachable",
    "Connection refused",
    "ConnectTimeoutError",
    "Read timed out",
    "ProxyError",
    "Max retries exceeded",
)


def fail(sentence: str) -> None:
    print(f"chatserve: {sentence}", file=sys.stderr)
    raise SystemExit(1)


def stamp_text(groups: list[str]) -> str:
    """What the environment was made from; the shell scripts compute the first line the same way."""
    digest = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    return f"{digest} {ROOT}\n" + "".join(f"{group}\n" for group in sorted(groups))


def installed_groups(stamp: Path) -> list[str] | None:
    """The dependency groups that are in; None where the stamp is missing or of another pyproject or place."""
    try:
        text = stamp.read_text()
    except OSError:
        return None
    return text.split("\n")[1:-1] if text.startswith(stamp_text([])) else None


def works(python: Path) -> bool:
    """Whether the environment's interpreter runs (the Python that it was made from may be gone) and has pip."""
    if not python.exists():
        return False
    return subprocess.run([python, "-I", "-c", "import pip"], check=False, capture_output=True).returncode == 0


def make_environment(venv: Path) -> None:
    if works(venv / "bin" / "python"):
        return
    print(f"Making {venv}", file=sys.stderr, flush=True)
    shutil.rmtree(venv, ignore_errors=True)
    made = subprocess.run([sys.executable, "-m", "venv", venv], check=False, capture_output=True, text=True)
    if made.returncode:
        said = (made.stdout + made.stderr).strip()
        if "ensurepip" in said:
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            fail(
                f"this Python cannot make virtual environments; install its venv package (Debian: python{version}-venv)"
            )
        fail(f"cannot make {venv}: {said.splitlines()[-1] if said else 'python -m venv failed'}")


def install(venv: Path, groups: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = [requirement for group in groups for requirement in project["dependency-groups"][group]]
    print(
        "Installing ChatServe" + (f" and what {', '.join(groups)} needs" if groups else ""), file=sys.stderr, flush=True
    )
    command = [venv / "bin" / "python", "-I", "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
    # A person sees pip's progress; a log gets its errors alone, after a failure. All of it is in the log file.
    watched = sys.stderr.isatty()
    command += ["--progress-bar", "on"] if watched else ["--progress-bar", "off", "--quiet"]
    log = venv / "install.log"
    log.unlink(missing_ok=True)
    pip = subprocess.run(
        [*command, "--log", log, "--editable", ROOT, *needed],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        stderr=None if watched else subprocess.PIPE,
        text=True,
        check=False,
    )
    if pip.returncode:
        errors = [line for line in (pip.stderr or "").splitlines() if not line.startswith("WARNING")]
        print("\n".join(errors), file=sys.stderr)
        explain(log, pip.returncode)


def explain(log: Path, exit_code: int) -> None:
    """Say in one line why pip failed."""
    said = log.read_text(errors="replace") if log.exists() else ""
    if "No space left on device" in said or "Disk quota exceeded" in said:
        fail(f"the disk of {ROOT} is full; free about {MIN_FREE_BYTES / 1e9:.0f} GB and run this again")
    if any(mark in said for mark in NO_NETWORK):
        fail("the package index cannot be reached; check the network (or pip's settings) and run this again")
    fail(f"pip ended with exit code {exit_code}; the lines above and {log} say why")


def main(venv: Path, groups: list[str]) -> None:
    stamp = venv / "chatserve-stamp"
    directory = os.open(ROOT, os.O_RDONLY)
    try:
        try:
            fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("Waiting for another run that installs", file=sys.stderr, flush=True)
            fcntl.flock(directory, fcntl.LOCK_EX)
        have = installed_groups(stamp)
        if have is not None and set(groups) <= set(have) and works(venv / "bin" / "python"):
            return
        if have is None and not stamp.exists() and shutil.disk_usage(ROOT).free < MIN_FREE_BYTES:
            fail(f"the disk of {ROOT} is nearly full; free about {MIN_FREE_BYTES / 1e9:.0f} GB and run this again")
        groups = sorted({*groups, *(have or [])})
        make_environment(venv)
        install(venv, groups)
        part = stamp.with_suffix(".part")
        part.write_text(stamp_text(groups))
        part.replace(stamp)
    except OSError as error:
        fail(f"cannot set up {venv}: {error.strerror or error}")
    finally:
        os.close(directory)


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2:])
    except KeyboardInterrupt:
        raise SystemExit(130) from None
