"""Schemas as data, and validation that reports every difference."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from dra_driver.model.dataclass import dataclass, field
from dra_driver.model.ids import quoted

JsonObject = dict[str, Any]
YAML_ERRORS: Final = (ValueError, LookupError, AttributeError, RecursionError)
"""Besides its YAMLError, PyYAML raises these for impossible dates, values such as `!!bool x`, and deep
nesting.
"""


Test = Callable[[Any], str | None]
"""Returns what is wrong, as the end of a sentence."""


@dataclass(frozen=True, slots=True)
class FieldFault:
    """`path` is such as `spec.devices.requests[0].name`."""

    path: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}: {self.text}" if self.path else self.text


@dataclass(frozen=True, slots=True)
class Words:
    """The wording of faults for one kind of document.

    Without `unknown`, a fault about an unknown field suggests a similar field (if `meant`) or lists the known
    ones. `null_is_absent`: an unknown field that is null is allowed. `names_found`: include the value that
    was found.
    """

    must: str = "must be"
    text: str = "a string"
    whole: str = "a number"
    object: str = "an object"
    word: str = "{}"
    index: str = "[{}]"
    unknown: str | None = None
    meant: bool = True
    null_is_absent: bool = False
    names_found: bool = True


MANIFEST: Final = Words()


@dataclass(frozen=True, slots=True)
class Scalar:
    """`object` allows any type; `least` and `most` limit a number or a string's length; `says` is the text of
    the requirement.
    """

    type: type
    test: Test | None = None
    least: float | None = None
    most: float | None = None
    says: str | None = None


@dataclass(frozen=True, slots=True)
class Choice:
    """YAML reads a bare `off` as false, so false is accepted for `off`."""

    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ListField:
    """`most` None means no limit. `test` applies if all items are valid."""

    items: Shape
    most: int | None = 32
    least: int = 0
    test: Test | None = None


@dataclass(frozen=True, slots=True)
class MapField:
    """`says` is for keys that `is_key` rejects, inserted at `{}`."""

    values: Shape
    is_key: Callable[[Any], bool] | None = None
    says: str = ""


@dataclass(frozen=True, slots=True)
class Anything:
    """Any value, not checked."""


@dataclass(frozen=True, slots=True)
class Object:
    """`mistakes` maps common wrong field names to advice. If `open`, unknown fields are not checked. `also`
    checks all valid fields together, and returns the field's name and the text of each fault.
    """

    fields: Mapping[str, Shape]
    required: tuple[str, ...] = ()
    mistakes: Mapping[str, str] = field(default_factory=dict)
    open: bool = False
    also: Callable[[Mapping[str, Any]], Iterable[tuple[str, str]]] | None = None


Shape = Scalar | Choice | ListField | MapField | Anything | Object


def faults(value: Any, shape: Shape, path: str, words: Words = MANIFEST) -> list[FieldFault]:
    """Return every difference. A `null` field counts as absent."""
    match shape:
        case Scalar():
            is_plain = shape.test is None and shape.least is None and shape.most is None
            return [] if is_plain and type(value) is shape.type else _scalar_faults(value, shape, path, words)
        case Choice():
            return _choice_faults(value, shape, path, words)
        case ListField():
            return _list_faults(value, shape, path, words)
        case MapField():
            return _map_faults(value, shape, path, words)
        case Object():
            return _object_faults(value, shape, path, words)
        case _:
            return []


def _wrong(value: Any, expected: str, path: str, words: Words) -> FieldFault:
    return FieldFault(path, f"{words.must} {expected}{f', not {_kind(value)}' if words.names_found else ''}")


def _scalar_faults(value: Any, shape: Scalar, path: str, words: Words) -> list[FieldFault]:
    if not _has_type(value, shape.type):
        names = {
            str: words.text,
            int: words.whole,
            float: "a number",
            bool: "true or false",
            dict: words.object,
        }
        fault = _wrong(value, shape.says or names[shape.type], path, words)
        is_bare = words.names_found and shape.type is str and isinstance(value, (int, float))
        return [FieldFault(path, f"{fault.text}; quote it") if is_bare else fault]
    size, what = (len(value), "a length of ") if shape.type is str else (value, "")
    limit = None
    if shape.least is not None and size < shape.least:
        limit = f"{what}{shape.least} or more"
    elif shape.most is not None and size > shape.most:
        limit = f"{what}{shape.most} or less"
    if limit is not None:
        return [FieldFault(path, f"{words.must} {shape.says or limit}")]
    text = shape.test(value) if shape.test is not None else None
    return [] if text is None else [FieldFault(path, text)]


def _has_type(value: Any, kind: type) -> bool:
    if kind is not float:
        return isinstance(value, kind) and (kind in (bool, object) or not isinstance(value, bool))
    try:
        return _has_type(value, int) or (isinstance(value, float) and math.isfinite(value))
    except OverflowError:
        return False


def _choice_faults(value: Any, shape: Choice, path: str, words: Words) -> list[FieldFault]:
    if (isinstance(value, str) and value in shape.words) or (value is False and "off" in shape.words):
        return []
    return [FieldFault(path, f"{words.must} {either([words.word.format(word) for word in shape.words])}")]


def either(words: Iterable[str]) -> str:
    """Return `a, b or c`."""
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def _list_faults(value: Any, shape: ListField, path: str, words: Words) -> list[FieldFault]:
    if not isinstance(value, list):
        return [_wrong(value, "a list", path, words)]
    found = []
    if shape.most is not None and len(value) > shape.most:
        found.append(FieldFault(path, f"has {len(value)} items; at most {shape.most} are allowed"))
    if len(value) < shape.least:
        found.append(FieldFault(path, f"has {len(value)} items; at least {shape.least} is required"))
    for number, item in enumerate(value):
        found += faults(item, shape.items, path + words.index.format(number), words)
    text = shape.test(value) if shape.test is not None and not found else None
    return found if text is None else [FieldFault(path, text)]


def _map_faults(value: Any, shape: MapField, path: str, words: Words) -> list[FieldFault]:
    if not isinstance(value, dict):
        return [_wrong(value, words.object, path, words)]
    wrong = [key for key in value if shape.is_key is not None and not shape.is_key(key)]
    found = [FieldFault(path, shape.says.format(", ".join(map(repr, wrong))))] if wrong else []
    for key, item in value.items():
        found += [] if key in wrong else faults(item, shape.values, _below(path, key), words)
    return found


def _object_faults(value: Any, shape: Object, path: str, words: Words) -> list[FieldFault]:
    if not isinstance(value, dict):
        return [_wrong(value, words.object, path, words)]
    found: list[FieldFault] = []
    unknown: list[FieldFault] = []
    meanings: list[str] = []
    right: dict[str, Any] = {}
    for name, item in value.items():
        if name in shape.fields:
            wrong = [] if item is None else faults(item, shape.fields[name], _below(path, name), words)
            if wrong:
                found += wrong
            else:
                right[name] = item
        elif name in shape.mistakes:
            found.append(FieldFault(_below(path, name), shape.mistakes[name]))
        elif not shape.open and not (words.null_is_absent and item is None):
            meant = _meant(str(name), shape) if words.meant else None
            meanings += [] if meant is None else [meant]
            text = words.unknown or "unknown field"
            if meant is not None:
                text += f"; did you mean {meant}?"
            elif words.unknown is None:
                text += f"; available: {', '.join(sorted(shape.fields))}"
            unknown.append(FieldFault(_below(path, name), text))
    found += unknown
    named = {fault.path for fault in found} | {_below(path, meant) for meant in meanings}
    for name in shape.required:
        if value.get(name) is None and _below(path, name) not in named:
            found.append(FieldFault(_below(path, name), "is required"))
    if shape.also is not None:
        found_paths = {fault.path for fault in found}
        faults_together = ((_below(path, name), text) for name, text in shape.also(right))
        found += [FieldFault(below, text) for below, text in faults_together if below not in found_paths]
    return found


def _below(path: str, name: object) -> str:
    return f"{path}.{quoted(name)}" if path else quoted(name)


def _meant(name: str, shape: Object) -> str | None:
    import difflib

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
