"""The table of docs/conformance.md, made from the tests themselves: their numbers, words and marks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DOCUMENT = ROOT / "docs" / "conformance.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
ITEMS = range(1, 26)
"""1 to 22 are what upstream's own tests check of drivers, 23 to 25 what else can go wrong."""

ELSEWHERE = yaml.safe_load((HERE / "elsewhere.yaml").read_text())

_NAME = re.compile(r"test_c(\d\d)_\w+")
_ON_CLUSTER = re.compile(r"^pytestmark = \[?pytest\.mark\.cluster", re.MULTILINE)


@dataclass(frozen=True, slots=True, order=True)
class Entry:
    """One test."""

    number: int
    on_cluster: bool
    test: str
    what: str

    @property
    def where(self) -> str:
        """As the document explains it."""
        if self.on_cluster:
            return "real cluster"
        return "part" if "/" in self.test else "socket"


def entries() -> list[Entry]:
    """All conformance tests in order of their numbers; those at the sockets first."""
    return sorted(entry for file in HERE.glob("test_*.py") for entry in _of_file(file))


def entries_elsewhere() -> list[Entry]:
    """Tests of other directories that count as well. Raises: LookupError if one of them is not there."""
    return [_elsewhere(**row) for row in ELSEWHERE]


def _elsewhere(number: int, test: str, shows: str) -> Entry:
    file, name = test.split("::")
    text = (ROOT / file).read_text() if (ROOT / file).is_file() else ""
    if name not in {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}:
        raise LookupError(f"there is no test {test}; correct the list of tests elsewhere")
    return Entry(number, bool(_ON_CLUSTER.search(text)), test, shows)


def _of_file(file: Path) -> Iterator[Entry]:
    tree = ast.parse(file.read_text())
    on_cluster = bool(_ON_CLUSTER.search(file.read_text()))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and (match := _NAME.fullmatch(node.name)):
            what = " ".join((ast.get_docstring(node) or "").split())
            yield Entry(int(match[1]), on_cluster, f"{file.name}::{node.name}", what)


def table() -> str:
    """The entries as Markdown."""
    lines = ["| No. | What | Where | Test |", "|---|---|---|---|"]
    for entry in sorted([*entries(), *entries_elsewhere()]):
        lines.append(f"| {entry.number} | {entry.what} | {entry.where} | `{entry.test}` |")
    return "\n".join(lines)


def in_document(text: str) -> str:
    """The table that the document shows."""
    return text.split(BEGIN)[1].split(END, maxsplit=1)[0].strip()


def with_table(text: str) -> str:
    """The document with the table of now."""
    head, tail = text.split(BEGIN, maxsplit=1)[0], text.split(END)[1]
    return f"{head}{BEGIN}\n{table()}\n{END}{tail}"
