"""What is installed is what is here: the list of packages and of other files in pyproject.toml misses none."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
DIRECTORIES = {name: ROOT / folder for name, folder in SETUPTOOLS["package-dir"].items()}


def is_compiled(path: Path) -> bool:
    return "__pycache__" in path.parts


def directory_of(package: str) -> Path:
    """Where a package lies: in the directory given for it, or for the nearest package above it."""
    if package in DIRECTORIES:
        return DIRECTORIES[package]
    parent, _, name = package.rpartition(".")
    return directory_of(parent) / name


def test_every_package_is_installed() -> None:
    found = {
        ".".join((name, *file.parent.relative_to(directory).parts))
        for name, directory in DIRECTORIES.items()
        for file in directory.rglob("*.py")
        if not is_compiled(file)
    }
    assert sorted(SETUPTOOLS["packages"]) == sorted(found | {"chatserve.web"})


def test_every_file_that_is_no_module_is_installed() -> None:
    globs = SETUPTOOLS["package-data"].items()
    installed = {file for package, patterns in globs for glob in patterns for file in directory_of(package).glob(glob)}
    found = {file for directory in DIRECTORIES.values() for file in directory.rglob("*") if file.is_file()}
    modules = {file for file in found if file.suffix == ".py" or is_compiled(file)}
    assert found - modules <= installed
    assert ROOT / "web" / "index.html" in installed
