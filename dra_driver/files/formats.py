"""The version of a file's format, and what becomes of a file that only a newer release can read.

The number grows only when an older release could no longer read the file. A new field needs no new number: releases
that do not know it keep it. So a file of a higher number is read if possible. If not, it stays in its place for the
release that wrote it, and what it describes is refused until that release is back.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from dra_driver.errors import StateError

T = TypeVar("T")
JsonObject = dict[str, Any]


class NewerFormatError(StateError):
    """A file that only a newer release can read."""


def parse(
    content: bytes,
    what: str,
    decode: Callable[[JsonObject], T],
    *,
    known: int | None,
    field: str = "version",
) -> T:
    """What `decode` makes of the JSON object in a file, which has its format version in `field`.

    `known` is the version that this release writes; None where a file of a newer one is as any that cannot be read.
    `decode` may raise what looking into a document raises. Raises: NewerFormatError, and StateError that says what is
    wrong with `what`.
    """
    version: object = None
    cause: Exception
    try:
        document = json.loads(content)
        if not isinstance(document, dict):
            raise StateError("not a JSON object")
        version = document.get(field)
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise StateError(f"format version {version!r} is unknown")
        return decode(document)
    except KeyError as error:
        reason, cause = f"field {error.args[0]!r} is missing", error
    except StateError as error:
        reason, cause = str(error), error
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        reason, cause = f"not a {what}: {error}", error
    if known is not None and isinstance(version, int) and version > known:
        raise NewerFormatError(
            f"the {what} has format version {version} of a newer release of the driver, which this one cannot read "
            f"({reason}); install that release again"
        ) from cause
    raise StateError(reason) from cause
