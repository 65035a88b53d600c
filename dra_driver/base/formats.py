"""The format number of a file. A file of ours has the number of its kind; any other number is refused, and a higher one
is that of a newer release, whose file is left alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

from dra_driver.errors import StateError
from dra_driver.model.json_object import JsonObject

T = TypeVar("T")


class NewerFormatError(StateError):
    """The file has the format number of a newer release."""


def parse(
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


def encode(fields: JsonObject, number: int) -> bytes:
    """A file with this format number in `version`, which `parse` reads; equal fields give equal bytes."""
    return json.dumps({"version": number, **fields}, separators=(",", ":"), sort_keys=True).encode()
