"""Decodes JSON within a limit of memory: 3 bytes such as `{},` can become an object of 72."""

from __future__ import annotations

import json
import re
from typing import Any

from urllib3.exceptions import HTTPError

MAX_MEMORY = 64 << 20
"""For one response; the daemon's container has 256 MiB."""
MAX_BYTES = 12 << 20
"""The largest response or event. As text it takes up to four times as much in addition."""

_PAIR_OR_HALF = re.compile(
    rb"\\\\|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)
_QUESTION_MARK = rb"\u003f"  # as long as half a pair
_OVERHEAD = 64 << 10
# Signs beyond U+FFFF and U+00FF, as bytes and escaped. A text with one of them takes four or two bytes for each sign.
_BEYOND_FFFF = (re.compile(rb"[\xf0-\xff]"), re.compile(rb"\\u[dD]"))
_BEYOND_FF = (re.compile(rb"[\xc4-\xef]"), re.compile(rb"\\u(?!00)"))


class TooLargeError(HTTPError):
    """A response or event that would take too much memory."""


def decode(data: bytes | bytearray) -> Any:
    """Return the value of a JSON document. Half of a pair of surrogates, which cannot be sent, becomes a question mark.

    Raises: ValueError, RecursionError, TooLargeError.
    """
    needed = memory_of(data)
    if needed > MAX_MEMORY:
        raise TooLargeError(
            f"the response has {len(data) / (1 << 20):.1f} MiB and would take {needed >> 20} MiB of memory; the limit "
            f"is {MAX_MEMORY >> 20} MiB"
        )
    if b"\\ud" in data or b"\\uD" in data:
        data = bytearray(data) if isinstance(data, bytes) else data
        for found in _PAIR_OR_HALF.finditer(data):
            if found["half"]:
                data[found.start() : found.end()] = _QUESTION_MARK
    return json.loads(data)


def memory_of(data: bytes | bytearray) -> int:
    """Return how many bytes the document, its text and its objects take at most.

    Counts signs, even inside strings: each `:` as a key with a string in a dict that has just grown, each `,` as a
    number in a list that has just grown.
    """
    width = 1
    if b"\\u" in data or not data.isascii():
        width = 4 if _has(_BEYOND_FFFF, data) else 2 if _has(_BEYOND_FF, data) else 1
    objects = (
        64 * data.count(b"{")
        + 72 * data.count(b"[")
        + 32 * data.count(b'"')
        + 130 * data.count(b":")
        + 48 * data.count(b",")
    )
    return int(len(data) * (1.25 + 2.25 * width)) + objects + _OVERHEAD


def _has(patterns: tuple[re.Pattern[bytes], ...], data: bytes | bytearray) -> bool:
    return any(pattern.search(data) for pattern in patterns)
