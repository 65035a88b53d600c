"""A description of objects as data, and the faults of an object against it, each with the path of its field."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Test = Callable[[Any], str | None]
"""What is wrong with a value, as the end of a sentence; None if nothing."""


@dataclass(frozen=True, slots=True)
class FieldFault:
    """What is wrong, and at which path: `spec.devices.requests[0].name`."""

    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}" if self.path else self.text


@dataclass(frozen=True, slots=True)
class Scalar:
    """A value of one type; `test` looks at what it says."""

    type: type
    test: Test | None = None


@dataclass(frozen=True, slots=True)
class ListField:
    """A list of at most `most` items, None for any number."""

    items: Shape
    most: int | None = 32


@dataclass(frozen=True, slots=True)
class MapField:
    """Any keys, and values of one shape."""

    values: Shape


@dataclass(frozen=True, slots=True)
class Anything:
    """Not looked at."""


@dataclass(frozen=True, slots=True)
class Object:
    """Fields by name. `mistakes` are fields that people write here, with what they should write. Of an object that is
    `open` other fields are not looked at."""

    fields: Mapping[str, Shape]
    required: tuple[str, ...] = ()
    mistakes: Mapping[str, str] = field(default_factory=dict)
    open: bool = False


Shape = Scalar | ListField | MapField | Anything | Object

_TYPE_NAMES = {str: "a string", int: "a number", bool: "true or false", dict: "an object"}


def fitting(shape: Shape) -> Callable[[Any], bool]:
    """Whether a value has no faults; many times as fast as to look for them."""
    match shape:
        case Scalar(kind, test):
            return lambda value: type(value) is kind and (test is None or test(value) is None)
        case ListField(items, most):
            each = fitting(items)
            return lambda value: (
                type(value) is list and (most is None or len(value) <= most) and all(map(each, value))
            )
        case MapField(values):
            one = fitting(values)
            return lambda value: type(value) is dict and all(map(one, value.values()))
        case Object():
            return _fitting_object(shape)
        case _:
            return lambda _: True


def _fitting_object(shape: Object) -> Callable[[Any], bool]:
    fields = [(name, fitting(one), name in shape.required) for name, one in shape.fields.items()]

    def fits(value: Any) -> bool:
        if type(value) is not dict:
            return False
        for name, fits_field, required in fields:
            item = value.get(name)
            if required if item is None else not fits_field(item):
                return False
        return shape.open or value.keys() <= shape.fields.keys()

    return fits


def faults(value: Any, shape: Shape, path: str) -> list[FieldFault]:
    """Everything in which a value differs from its description. `null` counts as not given."""
    match shape:
        case Scalar():
            return _scalar_faults(value, shape, path)
        case ListField(items, most):
            if not isinstance(value, list):
                return [FieldFault(path, f"must be a list, not {_kind(value)}")]
            found = (
                []
                if most is None or len(value) <= most
                else [FieldFault(path, f"has {len(value)} items, at most {most} are allowed")]
            )
            return found + [
                fault
                for number, item in enumerate(value)
                for fault in faults(item, items, f"{path}[{number}]")
            ]
        case MapField(values):
            if not isinstance(value, dict):
                return [FieldFault(path, f"must be an object, not {_kind(value)}")]
            return [fault for key, item in value.items() for fault in faults(item, values, f"{path}.{key}")]
        case Object():
            return _object_faults(value, shape, path)
        case _:
            return []


def _scalar_faults(value: Any, shape: Scalar, path: str) -> list[FieldFault]:
    if not isinstance(value, shape.type) or (isinstance(value, bool) and shape.type is not bool):
        quote = "; quote it" if shape.type is str and isinstance(value, (int, float)) else ""
        return [FieldFault(path, f"must be {_TYPE_NAMES[shape.type]}, not {_kind(value)}{quote}")]
    wrong = shape.test(value) if shape.test is not None else None
    return [] if wrong is None else [FieldFault(path, wrong)]


def _object_faults(value: Any, shape: Object, path: str) -> list[FieldFault]:
    if not isinstance(value, dict):
        return [FieldFault(path, f"must be an object, not {_kind(value)}")]
    found: list[FieldFault] = []
    meanings: list[str] = []
    for name, item in value.items():
        if shape.open and name not in shape.fields:
            continue
        here = f"{path}.{name}" if path else str(name)
        known = shape.fields.get(name)
        if known is not None:
            found += [] if item is None else faults(item, known, here)
        elif name in shape.mistakes:
            found.append(FieldFault(here, shape.mistakes[name]))
        else:
            meant = _meant(str(name), shape)
            meanings += [] if meant is None else [meant]
            known_fields = ", ".join(sorted(shape.fields))
            remedy = f"did you mean {meant}?" if meant is not None else f"there are {known_fields}"
            found.append(FieldFault(here, f"unknown field; {remedy}"))
    named = {fault.path for fault in found} | {f"{path}.{meant}" if path else meant for meant in meanings}
    for name in shape.required:
        here = f"{path}.{name}" if path else name
        if value.get(name) is None and here not in named:
            found.append(FieldFault(here, "is required"))
    return found


def _meant(name: str, shape: Object) -> str | None:
    """The field that a misspelt one is most like."""
    by_lower = {known.lower(): known for known in shape.fields}
    near = difflib.get_close_matches(name.lower(), by_lower, 1)
    return by_lower[near[0]] if near else None


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case dict():
            return "an object"
        case list():
            return "a list"
        case str():
            return f"the string {value[:40]!r}"
        case _:
            return f"the number {value}"
