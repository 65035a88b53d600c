"""docs/validate.md: what it lists as not judged is not judged, and its numbers are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dra_driver.cli.validate import EXIT_NOT_READ
from dra_driver.cli.validation.rules import cel
from dra_driver.cli.validation.rules.cel import NotJudgedError
from dra_driver.cli.validation.rules.selectors import NOT_INSTALLED, compiled

PAGE = (Path(__file__).parents[3] / "docs/validate.md").read_text()
SECTION = PAGE.partition("## What is not judged")[2]
ROWS = dict(re.findall(r"^\| `(.+?)`.* \| (.+) \|$", SECTION, re.MULTILINE))
LONG = {"((((…true…))))": "(" * 500 + "true" + ")" * 500}


def test_cases_listed_in_the_manual_are_not_judged() -> None:
    assert ROWS.pop('device.driver == "x"') == NOT_INSTALLED
    assert len(ROWS) == 2
    for expression, said in ROWS.items():
        with pytest.raises(NotJudgedError) as caught:
            compiled(LONG.get(expression, expression))
        assert str(caught.value) == said


def test_the_manual_has_all_functions_that_are_not_judged() -> None:
    names = re.findall(r"`(\w+)`", SECTION.partition("Only the API server knows ")[2].partition(".")[0])
    assert names == sorted(cel._ONLY_KUBERNETES)


def test_numbers_of_the_manual_are_those_of_the_code() -> None:
    assert f"| {EXIT_NOT_READ} | no fault is known, but with `--server` the cluster could not be read" in PAGE
