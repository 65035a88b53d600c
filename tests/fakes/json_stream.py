"""Concatenated JSON documents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


def json_documents(text: str) -> Iterator[Any]:
    """Raise JSONDecodeError at one that is not whole."""
    decoder, rest = json.JSONDecoder(), text.lstrip()
    while rest:
        value, end = decoder.raw_decode(rest)
        yield value
        rest = rest[end:].lstrip()
