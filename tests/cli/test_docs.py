"""What the documents point at is there, and what they name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from chatserve import cli
from chatserve.terminal.commands import COMMANDS

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)", document.read_text(encoding="utf-8"))
    assert [each for each in links if "://" not in each and not (document.parent / each).exists()] == []


def test_options_and_variables_in_the_documents_are_real() -> None:
    text = "\n".join(
        document.read_text(encoding="utf-8") for document in (ROOT / "README.md", ROOT / "docs/operations.md")
    )
    parameters = [parameter for command in cli.cli.commands.values() for parameter in command.params]
    variables = {str(getattr(parameter, "envvar", None)) for parameter in parameters} | {"CHATSERVE_PYTHON"}
    assert set(re.findall(r"CHATSERVE_[A-Z_]+[A-Z]", text)) <= variables
    options = {name for parameter in parameters for name in parameter.opts}
    table = re.findall(
        r"^\| ((?:`--[a-z-]+`(?:, )?)+) \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert table
    assert {name for cell in table for name in re.findall(r"--[a-z-]+", cell)} <= options


def test_terminal_commands_in_the_readme_are_real() -> None:
    found = re.search(
        r"\*\*In the terminal\.\*\*(.*?)\n\n", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    assert found
    named = set(re.findall(r"`/([a-z]+)`", found[1]))
    assert named
    assert named <= set(COMMANDS)
