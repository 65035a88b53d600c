"""The table of docs/conformance.md, made from the tests themselves: their numbers, words and marks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[1] / "docs" / "conformance.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
ITEMS = range(1, 26)
"""1 to 22 are what upstream's own tests check of drivers, 23 to 25 what else can go wrong."""

_NAME = re.compile(r"test_c(\d\d)_\w+")


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """One test."""

    number: int
    on_cluster: bool
    test: str
    what: str


def entries() -> list[Entry]:
    """All conformance tests in order of their numbers; those at the sockets first."""
    return sorted(entry for file in HERE.glob("test_*.py") for entry in _of_file(file))


def _of_file(file: Path) -> Iterator[Entry]:
    tree = ast.parse(file.read_text())
    on_cluster = "pytestmark = pytest.mark.cluster" in file.read_text()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and (match := _NAME.fullmatch(node.name)):
            what = " ".join((ast.get_docstring(node) or "").split())
            yield Entry(int(match[1]), on_cluster, f"{file.name}::{node.name}", what)


def table() -> str:
    """The entries as Markdown."""
    lines = ["| No. | What | Where | Test |", "|---|---|---|---|"]
    for entry in entries():
        where = "real cluster" if entry.on_cluster else "socket"
        lines.append(f"| {entry.number} | {entry.what} | {where} | `{entry.test}` |")
    return "\n".join(lines)


def in_document(text: str) -> str:
    """The table that the document shows."""
    return text.split(BEGIN)[1].split(END, maxsplit=1)[0].strip()


def with_table(text: str) -> str:
    """The document with the table of now."""
    head, tail = text.split(BEGIN, maxsplit=1)[0], text.split(END)[1]
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"
