"""Where a name in a cell of a table may be broken: after these characters, and nowhere else."""

from __future__ import annotations

import re

LONGEST = 45
"""Characters of a piece, as the names of NVML have; wider tables scroll."""
_CELL = re.compile(r"<td\b.*?</td>", re.DOTALL)
_CODE = re.compile(r"(?<=<code>)[^<]*(?=</code>)")
_AFTER = re.compile(r"(?<=[_./,=@|])(?=[\w$<{\[(&-])")


def with_places_to_break(html: str) -> str:
    """A page whose names in tables have a `<wbr>` wherever they may be broken, which nobody sees or copies."""
    return _CELL.sub(lambda cell: _CODE.sub(lambda code: _AFTER.sub("<wbr>", code[0]), cell[0]), html)


def pieces(code: str) -> list[str]:
    """The parts of a name that stay whole in a cell. A browser breaks after a hyphen by itself."""
    return [
        piece for word in code.split() for part in _AFTER.split(word) for piece in re.split(r"(?<=\w-)", part)
    ]
