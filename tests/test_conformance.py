"""docs/conformance.md lists for each expectation of Kubernetes the tests that show it."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import yaml

from tests.fakes.tables import IsGenerated

ROOT = Path(__file__).parents[1]
ROWS: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("conformance.yaml").read_text())
_ON_CLUSTER = re.compile(r"^pytestmark = \[?pytest\.mark\.cluster", re.MULTILINE)


def test_every_number_has_a_test_and_the_document_lists_it(is_generated: IsGenerated) -> None:
    assert {row["number"] for row in ROWS} == set(range(1, 26))
    cells: dict[tuple[int, bool], list[str]] = {}
    for row in ROWS:
        cells.setdefault((row["number"], is_on_cluster(row["test"])), []).append(row["shows"])
    made = "\n".join(
        ["| No. | Simulated | Real cluster |", "|---|---|---|"]
        + [
            f"| {number} | {' '.join(cells.get((number, False), []))} | {' '.join(cells.get((number, True), []))} |"
            for number in range(1, 26)
        ]
    )
    is_generated(ROOT / "docs/conformance.md", "conformance", made + "\n")


def is_on_cluster(test: str) -> bool:
    """Whether the test, for example `tests/e2e/test_pods.py::test_x`, needs a real cluster."""
    file, name = test.split("::")
    text = (ROOT / file).read_text()
    assert name in {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}, test
    return _ON_CLUSTER.search(text) is not None
