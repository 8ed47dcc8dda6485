"""Finds code that stands in two places: `python scripts/_duplicates.py FOLDER ...`; exit code 1 where there is some.

Compares runs of MIN_LINES lines of code, without indentation, blank lines, comments, docstrings, imports and
signatures, by a table of all such runs: one pass, however many files.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

MIN_LINES = 12


def ignored_lines(tree: ast.Module) -> set[int]:
    """Line numbers of imports, docstrings and signatures."""
    ignored: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            ignored.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            ignored.update(range(node.lineno, node.body[0].lineno))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            ignored.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return ignored


def code_lines(path: Path) -> list[tuple[int, str]]:
    text = path.read_text(encoding="utf-8")
    ignored = ignored_lines(ast.parse(text))
    numbered = ((number, line.strip()) for number, line in enumerate(text.splitlines(), start=1))
    return [(number, line) for number, line in numbered if line and line[0] != "#" and number not in ignored]


def duplicates(paths: list[Path]) -> Iterator[str]:
    """One line for each run that stands somewhere before; a longer run is told once, by its beginning."""
    first_seen: dict[tuple[str, ...], tuple[Path, int, int]] = {}
    for path in paths:
        lines = code_lines(path)
        told_until = -1
        for start in range(len(lines) - MIN_LINES + 1):
            run = tuple(line for _, line in lines[start : start + MIN_LINES])
            other, number, index = first_seen.setdefault(run, (path, lines[start][0], start))
            if (other, index) == (path, start) or (other == path and start - index < MIN_LINES):
                continue
            if start > told_until:
                yield f"{path}:{lines[start][0]} repeats {other}:{number}"
            told_until = start + MIN_LINES


def main(folders: list[str]) -> int:
    found = list(duplicates([path for folder in folders for path in sorted(Path(folder).rglob("*.py"))]))
    for line in found:
        print(line)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
