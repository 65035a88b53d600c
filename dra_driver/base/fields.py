"""Encodes dataclasses as JSON objects, by the types of their attributes, and adds a format number to files.

A higher number than a release reads, an unknown kind of value, or an unknown word where only certain words are allowed
means that a newer release wrote the file. No one renames or overwrites such a file, unless it only reports something or
its time is over. Unknown fields are ignored, and lost when the file is written. So a release that changes a file adds a
field that older releases may lose, or adds a kind or a word, or raises the format number.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import UnionType
from typing import Any, Generic, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from dra_driver import __version__
from dra_driver.errors import StateError
from dra_driver.model.dataclass import MISSING, dataclass, fields, is_dataclass
from dra_driver.model.schema import JsonObject

T = TypeVar("T")


class NewerFormatError(StateError):
    """A newer release wrote the file. `document` is its content, as far as it is known."""

    def __init__(self, message: str, document: JsonObject | None = None) -> None:
        super().__init__(message)
        self.document: JsonObject = {} if document is None else document


_NEEDED = object()
_SPELLED = {"uuid": "UUID", "id": "ID", "mib": "MiB"}


@dataclass(frozen=True, slots=True)
class Kind:
    """How a field is read and written. `read` gets the field's name and its JSON value.

    `read` raises StateError, ValueError, TypeError, KeyError or AttributeError.
    """

    read: Callable[[str, Any], Any]
    write: Callable[[Any], Any] = lambda value: value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise StateError(f"field {name!r} is {value!r}, which is not a string")
    return value


def _number(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise StateError(f"field {name!r} is {value!r}, which is not a whole number")
    return value


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise StateError(f"field {name!r} is {value!r}, which is not a list of strings")
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
    def read(name: str, value: Any) -> Any:
        if TEXT.read(name, value) not in values:
            raise NewerFormatError(f"{what} {value!r} is unknown")
        return value

    return Kind(read)


def or_null(kind: Kind) -> Kind:
    return Kind(
        lambda name, value: None if value is None else kind.read(name, value),
        lambda value: None if value is None else kind.write(value),
    )


def list_of(kind: Kind) -> Kind:
    return Kind(
        lambda name, value: tuple(kind.read(name, item) for item in value),
        lambda value: [kind.write(item) for item in value],
    )


@dataclass(frozen=True, slots=True)
class Field:
    """A missing or null field has the value `default`, if set."""

    kind: Kind
    name: str | None
    default: Any = _NEEDED
    omits_default: bool = False


def required(kind: Kind, name: str | None = None) -> Field:
    return Field(kind, name)


def omittable(kind: Kind, default: Any = None, name: str | None = None) -> Field:
    return Field(kind, name, default, omits_default=True)


class Codec(Generic[T]):
    """Encodes values of `of`, a dataclass or named tuple, as JSON objects, without attributes that equal their default.

    `given` replaces the field of an attribute; None means that the caller stores the attribute elsewhere.
    """

    def __init__(self, of: type[T], **given: Field | None) -> None:
        self.of = of
        self._fields = [
            (attribute, field.name or _in_json(attribute), field)
            for attribute, field in _fields_of(of, given).items()
            if field is not None
        ]
        self.kind = Kind(lambda _name, value: self.decode(value), self.encode)

    def encode(self, value: T) -> JsonObject:
        entry: JsonObject = {}
        for attribute, name, field in self._fields:
            content = getattr(value, attribute)
            if not field.omits_default or content != field.default:
                entry[name] = or_null(field.kind).write(content)
        return entry

    def decode(self, entry: JsonObject, **others: Any) -> T:
        for attribute, name, field in self._fields:
            content = entry[name] if field.default is _NEEDED else entry.get(name)
            is_default = content is None and field.default is not _NEEDED
            others[attribute] = field.default if is_default else field.kind.read(name, content)
        return self.of(**others)


class Tagged(Generic[T]):
    """Encodes values of several dataclasses, distinguished by the field `kind`."""

    def __init__(self, what: str, **codecs: Codec[Any]) -> None:
        self._what = what
        self._codecs = codecs
        self._tags = {codec.of: tag for tag, codec in codecs.items()}
        self.kind = Kind(lambda _name, value: self.decode(value), self.encode)

    def encode(self, value: T) -> JsonObject:
        tag = self._tags[type(value)]
        return {"kind": tag, **self._codecs[tag].encode(value)}

    def decode(self, entry: JsonObject) -> T:
        tag = TEXT.read("kind", entry["kind"])
        if tag not in self._codecs:
            raise NewerFormatError(f"{self._what} {tag!r} is unknown")
        made: T = self._codecs[tag].decode(entry)
        return made

    def readable(self, newer: NewerFormatError | None, name: str) -> Iterator[T]:
        """Yield the values of a list in a newer release's document that this release understands."""
        entries = newer.document.get(name) if newer is not None else None
        for entry in entries if isinstance(entries, list) else ():
            with suppress(StateError, KeyError, TypeError, ValueError, AttributeError, OverflowError):
                yield self.decode(entry)


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
            found[name] = omittable(kind, defaults[name])
        else:
            found[name] = Field(kind, None, None) if type(None) in get_args(hint) else required(kind)
    return found


def _kind_of(hint: Any, name: str) -> Kind:
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
    raise TypeError(f"{name}: cannot encode {hint}; pass a Field to the codec")


def _in_json(attribute: str) -> str:
    first, *rest = attribute.split("_")
    return first + "".join(_SPELLED.get(word, word.capitalize()) for word in rest)


_RELEASE = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+-]{0,39}", re.ASCII)


@dataclass(frozen=True, slots=True)
class FileFormat(Generic[T]):
    """A kind of JSON file. `what` names a file in errors.

    This release writes the format number `number`, and reads the numbers from `oldest` on. `decode` raises the errors
    of `Kind.read`.
    """

    what: str
    decode: Callable[[JsonObject], T]
    encode: Callable[[T], JsonObject]
    number: int = 1
    oldest: int = 1

    def write(self, value: T) -> bytes:
        """Return the same content for equal values."""
        document = {"version": self.number, "release": __version__, **self.encode(value)}
        return json.dumps(document, separators=(",", ":"), sort_keys=True).encode()

    def read(self, content: bytes) -> T:
        try:
            document = json.loads(content)
            if not isinstance(document, dict):
                raise StateError("not a JSON object")
            try:
                self._check(document.get("version"))
                return self.decode(document)
            except NewerFormatError as error:
                raise NewerFormatError(self._of_newer(document, str(error)), document) from error
        except KeyError as error:
            raise StateError(f"field {error.args[0]!r} is missing") from error
        except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise StateError(f"not a {self.what}: {error}") from error

    def _check(self, number: object) -> None:
        if type(number) is not int or number < self.oldest:
            raise StateError(f"format version {number!r} is unknown")
        if number > self.number:
            numbers = (
                f"{self.oldest} to {self.number}" if self.oldest < self.number else f"only {self.number}"
            )
            raise NewerFormatError(f"its format version is {number}, and this release reads {numbers}")

    def _of_newer(self, document: JsonObject, why: str) -> str:
        release = document.get("release")
        is_known = isinstance(release, str) and _RELEASE.fullmatch(release) and release != __version__
        writer = f"gpu-dra-driver {release}" if is_known else "a newer release of gpu-dra-driver"
        wanted = f"gpu-dra-driver {release} or newer" if is_known else "the newer release again"
        return f"{writer} wrote the {self.what}, which release {__version__} cannot read: {why}; install {wanted}"
