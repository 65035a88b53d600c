"""Where a name in a cell of a table may be broken: after these characters, and nowhere else."""

from __future__ import annotations

import re

LONGEST = 45
"""Characters of a piece, as the names of NVML have; wider tables scroll."""
_CELL = re.compile(r"<td\b.*?</td>", re.DOTALL)
_CODE = re.compile(r"(?<=<code>)[^<]*(?=</code>)")
_AFTER = re.compile(r"(?<=[\w>)}\]][_./,=@|])(?=[\w$<{\[(&-])")


def with_places_to_break(html: str) -> str:
    """Returns a page whose names in tables have an invisible `<wbr>` where they may be broken, which is not
    copied.
    """
    return _CELL.sub(lambda cell: _CODE.sub(lambda code: _AFTER.sub("<wbr>", code[0]), cell[0]), html)


def pieces(code: str) -> list[str]:
    """Returns the parts of a name that stay together in a cell. A browser breaks after a hyphen anyway."""
    return [
        piece for word in code.split() for part in _AFTER.split(word) for piece in re.split(r"(?<=\w-)", part)
    ]
