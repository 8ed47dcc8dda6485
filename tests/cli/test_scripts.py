"""The scripts that set a checkout up, in small checkouts of their own."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import venv
from pathlib import Path

import pip
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPTS = ("serve", "test", "check", "_env.sh", "_setup.py")
TOOLS = ("bash", "dirname", "readlink", "sha256sum", "grep", "env", "id")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    made = tmp_path / "a check out"
    (made / "scripts").mkdir(parents=True)
    for name in SCRIPTS:
        shutil.copy(ROOT / "scripts" / name, made / "scripts")
    (made / "pyproject.toml").write_text('[project]\nname = "x"\nversion = "1"\ndependencies = ["numpy"]\n')
    return made


def pretend_installed(checkout: Path, *groups: str) -> None:
    """An environment whose interpreter only tells how it was called."""
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "path=$PYTHONPATH venv=$VIRTUAL_ENV target=$PIP_TARGET"\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    digest = hashlib.sha256((checkout / "pyproject.toml").read_bytes()).hexdigest()
    (checkout / ".venv" / "chatserve-stamp").write_text("\n".join([f"{digest} {checkout}", *groups, ""]))


def run(script: Path, *arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [script, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        timeout=100,
    )


def test_an_installed_checkout_serves_at_once_from_anywhere_whatever_is_active(checkout: Path, tmp_path: Path) -> None:
    pretend_installed(checkout)
    link = tmp_path / "serve-link"
    link.symlink_to(checkout / "scripts" / "serve")
    for script in (checkout / "scripts" / "serve", link):
        done = run(
            *(script, "--port", "1", "--model", "a b"),
            cwd=tmp_path,
            PYTHONPATH="/elsewhere",
            VIRTUAL_ENV="/other",
            PIP_TARGET="/third",
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [
            "path= venv= target=",
            *("-P", "-m", "chatserve", "serve", "--port", "1", "--model", "a b"),
        ]


def test_a_changed_pyproject_is_noticed(checkout: Path, tmp_path: Path) -> None:
    pretend_installed(checkout)
    with (checkout / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    done = run(checkout / "scripts" / "serve", cwd=tmp_path, PATH=str(tools(tmp_path)))
    assert done.returncode == 1
    assert "Python 3.11" in done.stderr


def test_a_missing_group_is_noticed(checkout: Path, tmp_path: Path) -> None:
    pretend_installed(checkout, "test")
    done = run(checkout / "scripts" / "check", cwd=tmp_path, PATH=str(tools(tmp_path)))
    assert done.returncode == 1
    assert "Python 3.11" in done.stderr


def tools(tmp_path: Path) -> Path:
    """A PATH with what the scripts need and a Python that is too old."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    for name in TOOLS:
        found = shutil.which(name)
        assert found
        (folder / name).symlink_to(found)
    (folder / "python3").write_text("#!/bin/sh\nexit 1\n")
    (folder / "python3").chmod(0o755)
    return folder


def test_a_wrong_python_is_one_clear_line(checkout: Path, tmp_path: Path) -> None:
    done = run(checkout / "scripts" / "serve", cwd=tmp_path, PATH=str(tools(tmp_path)))
    assert done.returncode == 1
    assert re.fullmatch(r"chatserve: Python 3\.11, 3\.12 or 3\.13 is needed.*\n", done.stderr)
    assert not (checkout / ".venv").exists()


def test_no_network_is_said_plainly_and_nothing_counts_as_installed(checkout: Path, tmp_path: Path) -> None:
    # An environment with a borrowed pip, which is quicker to make than one of its own.
    venv.create(checkout / ".venv", symlinks=True)
    (site,) = (checkout / ".venv").glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(f"{Path(pip.__file__).parent.parent}\n")
    done = run(
        checkout / "scripts" / "serve",
        cwd=tmp_path,
        PIP_CONFIG_FILE=os.devnull,
        PIP_INDEX_URL="http://127.0.0.1:1/simple",
        PIP_EXTRA_INDEX_URL="",
        PIP_FIND_LINKS="",
        PIP_RETRIES="1",
    )
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("chatserve: the package index cannot be reached; check the network"), done.stderr
    assert not (checkout / ".venv" / "chatserve-stamp").exists()


def test_every_script_can_be_run() -> None:
    for script in (*(ROOT / "scripts" / name for name in ("serve", "test", "test-gpu", "check")), ROOT / ".ci" / "run"):
        assert os.access(script, os.X_OK), script
        assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
