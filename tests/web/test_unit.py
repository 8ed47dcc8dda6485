"""The page's modules that need no browser, in Node's own test runner; the vendored libraries against their hashes."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

WEB = Path(__file__).parents[2] / "web"
UNIT = Path(__file__).parent / "unit"


@pytest.mark.skipif(shutil.which("node") is None, reason="the users' machines need no Node; this test does")
@pytest.mark.parametrize("file", sorted(UNIT.glob("*.test.mjs")), ids=lambda file: file.name.removesuffix(".test.mjs"))
def test_unit(file: Path) -> None:
    done = subprocess.run(
        ["node", "--test", "--test-reporter=spec", file], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_vendored_libraries_are_those_of_the_manifest() -> None:
    vendor = WEB / "vendor"
    libraries = json.loads((vendor / "MANIFEST.json").read_text())["libraries"]
    stated = {name: digest for library in libraries for name, digest in library["files"].items()}
    found = {
        str(file.relative_to(vendor)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in vendor.rglob("*")
        if file.is_file()
    }
    del found["MANIFEST.json"]
    assert found == stated
    for library in libraries:
        assert library["version"]
        assert library["licence"]
        assert any(name.endswith("/LICENSE") for name in library["files"])


def test_page_has_nothing_inline_and_names_no_other_host() -> None:
    page = (WEB / "index.html").read_text()
    assert "style=" not in page
    assert "<style" not in page
    assert " on" not in page.replace(" one", "").split("<body>")[0]
    for file in [*WEB.glob("js/**/*.js"), *WEB.glob("css/*.css"), WEB / "index.html"]:
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "://" not in text.replace('`${location.protocol === "https:" ? "wss" : "ws"}://', ""), file
        assert "innerHTML" not in text, file


def luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_is_readable_on_every_surface_it_stands_on(scheme: int) -> None:
    found = re.findall(r"--([a-z-]+): light-dark\((#\w{6}), (#\w{6})\);", (WEB / "css" / "base.css").read_text())
    colours = {name: pair[scheme] for name, *pair in found}
    surfaces = ("paper", "panel", "raised", "code-paper")
    pairs = [(ink, on) for ink in ("ink", "ink-soft", "ink-faint", "accent", "danger") for on in surfaces]
    pairs += [("ink", "bubble"), ("ink", "accent-wash"), ("accent-ink", "accent"), ("danger", "danger-wash")]
    pairs += [("warn", "warn-wash")]
    for ink, surface in pairs:
        light, dark = sorted((luminance(colours[ink]), luminance(colours[surface])), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5, f"{ink} on {surface}"


def test_every_file_that_a_module_imports_is_there() -> None:
    for file in WEB.glob("js/**/*.js"):
        for line in file.read_text().splitlines():
            if line.startswith(("import ", "} from ", "export * from ")) and '"' in line:
                target = line.split('"')[1]
                assert target.startswith("."), f"{file}: {target}"
                assert (file.parent / target).resolve().is_file(), f"{file}: {target}"
