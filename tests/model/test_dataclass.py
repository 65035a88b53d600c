"""Dataclasses of the project: the methods that are shared instead of compiled do what the standard ones do."""

import dataclasses
from typing import Any

import pytest

from dra_driver.model import dataclass as ours


def made(decorator: Any, **given: Any) -> Any:
    """Return a class with a field that is neither compared nor shown."""

    class Point:
        x: int
        y: int = 0
        note: str = dataclasses.field(default="", compare=False, repr=False)

    return decorator(Point, **given)


@pytest.mark.parametrize(
    "given", [{}, {"eq": False}, {"frozen": True}, {"frozen": True, "slots": True, "order": True}]
)
def test_dataclass_compares_hashes_and_shows_as_the_standard_one(given):
    own, standard = (made(one, **given) for one in (ours.dataclass, dataclasses.dataclass))
    points = [(1, 2), (1, 2, "note"), (1,), (2, 1)]
    for values in points:
        assert repr(own(*values)) == repr(standard(*values))
        for others in points:
            assert (own(*values) == own(*others)) == (standard(*values) == standard(*others))
            if "order" in given:
                assert (own(*values) < own(*others)) == (standard(*values) < standard(*others))
        if "frozen" in given:
            assert hash(own(*values)) == hash(standard(*values))
    assert (own.__hash__ is None) == (standard.__hash__ is None)


def test_dataclass_of_another_class_with_equal_values_is_not_equal():
    assert made(ours.dataclass)(1, 2) != made(ours.dataclass)(1, 2)


def test_dataclass_without_fields_equals_another_instance():
    empty = ours.dataclass(type("Empty", (), {}), frozen=True)
    assert {empty()} == {empty()}
