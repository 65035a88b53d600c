"""Line breaks in the names in table cells: only after certain characters."""

from __future__ import annotations

import re

LONGEST = 45
"""The maximum number of characters without a break, as in NVML's names. Wider tables scroll."""
_CELL = re.compile(r"<td\b.*?</td>", re.DOTALL)
_CODE = re.compile(r"(?<=<code>)[^<]*(?=</code>)")
_AFTER = re.compile(r"(?<=[\w>)}\]][_./,=@|])(?=[\w$<{\[(&-])")


def with_places_to_break(html: str) -> str:
    """Return the page with a `<wbr>` wherever a name in a table may break. Browsers neither show nor copy it."""
    return _CELL.sub(lambda cell: _CODE.sub(lambda code: _AFTER.sub("<wbr>", code[0]), cell[0]), html)


def pieces(code: str) -> list[str]:
    """Return the parts of a name that stay together in a cell. Browsers also break after a hyphen."""
    return [
        piece for word in code.split() for part in _AFTER.split(word) for piece in re.split(r"(?<=\w-)", part)
    ]
