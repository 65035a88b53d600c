"""Test data in YAML files next to the test file that uses them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
import yaml

Test = TypeVar("Test", bound=Callable[..., None])
IsGolden = Callable[[Path, str], None]
IsGenerated = Callable[[Path, str, str], None]


def tabled(*names: str, more: Iterable[Any] = ()) -> Callable[[Test], Test]:
    """Run a test with each row of its table, and with `more` that cannot be written down there.

    The table has the name of the test, its file that of the test's file.
    """

    def decorate(test: Test) -> Test:
        rows = data_of(test.__globals__["__file__"])[test.__name__]  # type: ignore[attr-defined]
        return pytest.mark.parametrize(names if len(names) > 1 else names[0], [*rows, *more])(test)

    return decorate


@cache
def data_of(test_file: str) -> dict[str, Any]:
    """What the YAML file with the name of a test file has."""
    data: dict[str, Any] = read_yaml(Path(test_file).with_suffix(".yaml"))
    return data


def read_yaml(path: Path) -> Any:
    """Return the content of a YAML file. libyaml reads it in a tenth of the time that PyYAML takes, and each worker
    reads all tables."""
    return yaml.load(path.read_text(), Loader=yaml.CSafeLoader)


def generated(page: Path, name: str) -> tuple[str, str, str]:
    """A page before, within and after the marks `<!-- name -->` and `<!-- end of name -->`."""
    before, begin, rest = page.read_text().partition(f"<!-- {name} -->\n")
    within, end, after = rest.partition(f"<!-- end of {name} -->\n")
    assert end, f"{page.name} lacks the marks of {name}"
    return before + begin, within, end + after
