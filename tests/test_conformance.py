"""docs/conformance.md lists for each expectation of Kubernetes the tests that show it."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs/conformance.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
ROWS: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("conformance.yaml").read_text())
_ON_CLUSTER = re.compile(r"^pytestmark = \[?pytest\.mark\.cluster", re.MULTILINE)


def test_every_number_has_a_test_and_the_document_lists_it(update_golden: bool) -> None:
    assert {row["number"] for row in ROWS} == set(range(1, 26))
    made = "\n".join(
        ["| No. | What | Where | Test |", "|---|---|---|---|"]
        + [f"| {row['number']} | {row['shows']} | {where(row['test'])} | `{row['test']}` |" for row in ROWS]
    )
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    if update_golden:
        DOCUMENT.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}")
    else:
        assert table.strip() == made, "run this test with --update-golden"


def where(test: str) -> str:
    """Where the test runs, as the document explains it."""
    file, name = test.split("::")
    text = (ROOT / file).read_text()
    assert name in {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}, test
    if _ON_CLUSTER.search(text):
        return "real cluster"
    return "socket" if "/integration/" in file else "part"
