"""docs/validate.md: the list of what is not judged is whole, and true."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from dra_driver.cli.validate import EXIT_NOT_ASKED
from dra_driver.validation.rules.cel import refusals
from dra_driver.validation.rules.cel.libraries import MARK
from dra_driver.validation.rules.cel.values import NotJudgedError
from dra_driver.validation.rules.counting import MOST_PODS_OF_A_CLAIM
from dra_driver.validation.rules.selectors import compiled
from tests.validation.test_cel import DEVICE

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/validate.md").read_text()
SECTION = PAGE.partition("## What is not judged")[2]
ROWS = re.findall(r"^\| (`+)(.+?)\1 \| (.+) \|$", SECTION, re.MULTILINE)
UNINSTALLED = re.findall(r"^\| any, without the package \| (.+) \|$", SECTION, re.MULTILINE)
LONG = {"((((…true…))))": "(" * 500 + "true" + ")" * 500}


def reasons() -> list[str]:
    """Every reason in the code, as a pattern."""
    found = []
    for path in (ROOT / "dra_driver/validation").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
                text = _pattern(node.args[0])
                is_reason = node.func.id == "NotJudgedError" and text != ".+"
                if is_reason or (node.func.id == "ValueError" and text.startswith(".+it ")):
                    found.append(text)
    return found


def _pattern(node: ast.expr) -> str:
    match node:
        case ast.Constant(value=str(text)):
            return re.escape(text)
        case ast.JoinedStr(values=parts):
            return "".join(_pattern(part) for part in parts)
    return ".+"


@pytest.mark.parametrize(("expression", "said"), [(row[1], row[2]) for row in ROWS])
def test_what_the_manual_lists_is_not_judged(expression: str, said: str) -> None:
    with pytest.raises(NotJudgedError) as caught:
        compiled(LONG.get(expression, expression)).matches(DEVICE)
    assert str(caught.value) == said


def test_no_reason_is_missing_in_the_manual() -> None:
    told = [*UNINSTALLED, *(row[2] for row in ROWS)]
    known = reasons()
    assert len(known) > 20
    missing = [
        reason
        for reason in known
        if not any(re.fullmatch(reason, text) or re.fullmatch(reason, MARK + text) for text in told)
    ]
    assert missing == []


def test_names_that_are_not_known_here_are_all_listed() -> None:
    names = re.findall(r"`(\w+)`", SECTION.rpartition("nobody says whose fault that is:")[2])
    assert sorted(set(names)) == sorted(refusals._NOT_HERE)


def test_numbers_of_the_manual_are_those_of_the_code() -> None:
    assert f"| {EXIT_NOT_ASKED} | no fault is known, but the API server could not be asked" in PAGE
    assert f"at most {MOST_PODS_OF_A_CLAIM}." in PAGE
