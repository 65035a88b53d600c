"""Dataclasses as JSON objects in files, by the types of their attributes, and the format number of a file.

A file of ours has the number of its kind. Any other number is refused; a higher number is that of a newer release,
whose file is left alone. What is wrong with a file is a sentence in the error.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import UnionType
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from dra_driver.errors import StateError
from dra_driver.model.schema import JsonObject

T = TypeVar("T")

_NEEDED = object()
_SPELLED = {"uuid": "UUID", "id": "ID", "mib": "MiB"}


@dataclass(frozen=True, slots=True)
class Kind:
    """What a field holds. `read` gets the field's name and what JSON has, and raises StateError, ValueError, TypeError,
    KeyError or AttributeError; `write` makes what JSON has."""

    read: Callable[[str, Any], Any]
    write: Callable[[Any], Any] = lambda value: value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise StateError(f"field {name!r} is {value!r}, which is not text")
    return value


def _number(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise StateError(f"field {name!r} is {value!r}, which is not a whole number")
    return value


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise StateError(f"field {name!r} is {value!r}, which is not a list of texts")
    return tuple(value)


TEXT = Kind(_text)
NUMBER = Kind(_number)
FLAG = Kind(lambda _name, value: bool(value))
TEXTS = Kind(_texts, list)
JSON = Kind(lambda _name, value: value)
_KINDS: Mapping[Any, Kind] = {
    str: TEXT,
    int: NUMBER,
    bool: FLAG,
    float: Kind(lambda _name, value: float(value)),
    Any: JSON,
}


def one_of(what: str, *values: str) -> Kind:
    """One of these texts; `what` names it where it is another."""

    def read(_name: str, value: Any) -> Any:
        if value not in values:
            raise StateError(f"{what} {value!r} is unknown")
        return value

    return Kind(read)


def or_null(kind: Kind) -> Kind:
    """The same, or None."""
    return Kind(
        lambda name, value: None if value is None else kind.read(name, value),
        lambda value: None if value is None else kind.write(value),
    )


def list_of(kind: Kind) -> Kind:
    """A tuple of values of one kind."""
    return Kind(
        lambda name, value: tuple(kind.read(name, item) for item in value),
        lambda value: [kind.write(item) for item in value],
    )


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a dataclass. Where its `name` in JSON is None, it is made of the attribute's. A field that is missing
    or null is the `default`, if it has one; `is_left_out` says that the default is not written."""

    kind: Kind
    name: str | None
    default: Any = _NEEDED
    is_left_out: bool = False


def needed(kind: Kind, name: str | None = None) -> Field:
    """A field that is always there."""
    return Field(kind, name)


def nullable(kind: Kind) -> Field:
    """A field that is null where the attribute is None."""
    return Field(kind, None, None)


def left_out(kind: Kind, default: Any = None, name: str | None = None) -> Field:
    """A field that is not there where the attribute is the default."""
    return Field(kind, name, default, is_left_out=True)


class Codec(Generic[T]):
    """How values of `of`, a dataclass or named tuple, stand in JSON: each attribute by its type, and left out where it
    is its default. `given` are the fields for which that is not enough, by attribute; None for one that the caller
    stores elsewhere."""

    def __init__(self, of: type[T], **given: Field | None) -> None:
        self.of = of
        self._fields = [
            (attribute, field.name or _in_json(attribute), field)
            for attribute, field in _fields_of(of, given).items()
            if field is not None
        ]
        self.kind = Kind(lambda _name, value: self.decode(value), self.encode)

    def encode(self, value: T) -> JsonObject:
        """The JSON object of a value."""
        entry: JsonObject = {}
        for attribute, name, field in self._fields:
            content = getattr(value, attribute)
            if not field.is_left_out or content != field.default:
                entry[name] = or_null(field.kind).write(content)
        return entry

    def decode(self, entry: JsonObject, **others: Any) -> T:
        """The value in a JSON object; `others` are attributes that stand elsewhere. Raises: as `Kind.read`."""
        for attribute, name, field in self._fields:
            content = entry[name] if field.default is _NEEDED else entry.get(name)
            is_default = content is None and field.default is not _NEEDED
            others[attribute] = field.default if is_default else field.kind.read(name, content)
        return self.of(**others)


class Tagged(Generic[T]):
    """Values of several dataclasses, told apart by the field `kind`; `what` names one in errors."""

    def __init__(self, what: str, **codecs: Codec[Any]) -> None:
        self._what = what
        self._codecs = codecs
        self._tags = {codec.of: tag for tag, codec in codecs.items()}
        self.kind = Kind(lambda _name, value: self.decode(value), self.encode)

    def encode(self, value: T) -> JsonObject:
        """The JSON object of a value, with its kind."""
        tag = self._tags[type(value)]
        return {"kind": tag, **self._codecs[tag].encode(value)}

    def decode(self, entry: JsonObject) -> T:
        """The value in a JSON object. Raises: as `Kind.read`."""
        tag = TEXT.read("kind", entry["kind"])
        if tag not in self._codecs:
            raise StateError(f"{self._what} {tag!r} is unknown")
        made: T = self._codecs[tag].decode(entry)
        return made


def _fields_of(of: type[Any], given: Mapping[str, Field | None]) -> dict[str, Field | None]:
    defaults: Mapping[str, Any] = getattr(of, "_field_defaults", None) or {}
    if is_dataclass(of):
        defaults = {one.name: one.default for one in fields(of) if one.default is not MISSING} | {
            one.name: one.default_factory() for one in fields(of) if one.default_factory is not MISSING
        }
    found: dict[str, Field | None] = {}
    for name, hint in get_type_hints(of).items():
        if name in given:
            found[name] = given[name]
            continue
        kind = _kind_of(hint, name)
        if name in defaults:
            found[name] = left_out(kind, defaults[name])
        else:
            found[name] = nullable(kind) if type(None) in get_args(hint) else needed(kind)
    return found


def _kind_of(hint: Any, name: str) -> Kind:
    """The kind of an attribute's type. A type without one has to be given to its codec."""
    origin, arguments = get_origin(hint), [one for one in get_args(hint) if one is not type(None)]
    if hint in _KINDS:
        return _KINDS[hint]
    if origin is Literal:
        return one_of(name.replace("_", " "), *arguments)
    if origin is tuple and arguments[1:] == [...]:
        return TEXTS if arguments[0] is str else list_of(_kind_of(arguments[0], name))
    if origin in (Union, UnionType) and len(arguments) == 1:
        return or_null(_kind_of(arguments[0], name))
    if origin is Mapping:
        kind = _kind_of(arguments[1], name)
        return Kind(lambda _name, value: {key: kind.read(key, one) for key, one in value.items()}, dict)
    if is_dataclass(hint) or hasattr(hint, "_fields"):
        return Codec(hint).kind
    raise TypeError(f"{name}: {hint} needs a field of its own")


def _in_json(attribute: str) -> str:
    first, *rest = attribute.split("_")
    return first + "".join(_SPELLED.get(word, word.capitalize()) for word in rest)


class NewerFormatError(StateError):
    """The file has the format number of a newer release."""


def parse_file(
    content: bytes, what: str, decode: Callable[[JsonObject], T], *, known: int, field: str = "version"
) -> T:
    """What `decode` makes of the JSON object in a file, whose format number in `field` has to be `known`.

    `decode` may raise what looking into a document raises. Raises: NewerFormatError; StateError that says what is wrong
    with `what`.
    """
    try:
        document = json.loads(content)
        if not isinstance(document, dict):
            raise StateError("not a JSON object")
        number = document.get(field)
        if type(number) is int and number > known:
            raise NewerFormatError(
                f"the {what} has format version {number} of a newer release of gpu-dra-driver, and this one reads only "
                f"version {known}; install that release again"
            )
        if type(number) is not int or number != known:
            raise StateError(f"format version {number!r} is unknown")
        return decode(document)
    except KeyError as error:
        raise StateError(f"field {error.args[0]!r} is missing") from error
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise StateError(f"not a {what}: {error}") from error


def encode_file(document: JsonObject, number: int) -> bytes:
    """A file with this format number in `version`, which `parse_file` reads; equal fields give equal bytes."""
    return json.dumps({"version": number, **document}, separators=(",", ":"), sort_keys=True).encode()
