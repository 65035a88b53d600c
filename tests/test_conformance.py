"""conformance.yaml lists for each expectation of Kubernetes the tests that show it."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from tests.fakes.tables import read_yaml

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs/conformance.md"
ROWS: list[dict[str, Any]] = read_yaml(Path(__file__).with_name("conformance.yaml"))
_ON_CLUSTER = re.compile(r"^pytestmark = \[?pytest\.mark\.cluster", re.MULTILINE)


def test_every_number_has_a_test_that_exists() -> None:
    assert {row["number"] for row in ROWS} == set(range(1, 26))
    assert all(row["shows"].endswith(".") for row in ROWS)
    on_cluster = {row["number"] for row in ROWS if is_on_cluster(row["test"])}
    assert f"`make e2e` runs {len(on_cluster)} of the\nnumbers" in DOCUMENT.read_text()


def is_on_cluster(test: str) -> bool:
    """Whether the test, for example `tests/e2e/test_pods.py::test_x`, needs a real cluster."""
    file, name = test.split("::")
    text = (ROOT / file).read_text()
    assert name in {node.name for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}, test
    return _ON_CLUSTER.search(text) is not None
