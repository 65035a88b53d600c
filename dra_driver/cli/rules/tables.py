"""Tables as kubectl prints them: aligned, a line a row, nothing folded, nothing read as markup."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from dra_driver.model.ids import printable

_GAP = "   "
_CUT = ".."
_NOTHING = ("-", "")
_LEAST_TEXT = 24
_DEEPER = 4


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. Where there is too little room, what may be `cut` to so many characters is shortened, the
    last column first. If that is not enough, the columns with the highest `drop` go first, and 0 stays. What still does
    not fit runs over the edge. An `optional` column is there only if a row has something in it."""

    title: str
    drop: int = 0
    cut: int = 0
    optional: bool = False


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None) -> str:
    """Titles and rows as text. `width` is how many columns a terminal has, None for all there is."""
    return "".join(
        _GAP.join(text for _, text in line).rstrip() + "\n" for line in fitted(columns, rows, width, _GAP)
    )


def fitted(
    columns: Sequence[Column], rows: Sequence[Sequence[str]], width: int | None, gap: str
) -> list[list[tuple[int, str]]]:
    """The titles and the rows: of each cell that has room, the index of its column and its padded text."""
    chosen = [
        index
        for index, column in enumerate(columns)
        if not column.optional or any(row[index] not in _NOTHING for row in rows)
    ]
    cells = [[printable(cell) for cell in row] for row in ([column.title for column in columns], *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]

    least = [min(size, column.cut or size) for column, size in zip(columns, widths, strict=True)]

    def excess(sizes: Sequence[int]) -> int:
        needed = sum(sizes[index] for index in chosen) + len(gap) * (len(chosen) - 1)
        return 0 if width is None else max(0, needed - width)

    for index in sorted(chosen, key=lambda index: -columns[index].drop):
        if columns[index].drop and excess(least):
            chosen.remove(index)
    for index in reversed(chosen):
        widths[index] = max(least[index], widths[index] - excess(widths))
    return [
        [(index, f"{_shortened(row[index], widths[index]):<{widths[index]}}") for index in chosen]
        for row in cells
    ]


def ascii_only(text: str) -> str:
    """As `printable`, for a drawing whose columns must be as wide as they have signs."""
    return "".join(sign if " " <= sign <= "~" else "?" for sign in text)


def folded(text: str, indent: str, width: int) -> list[str]:
    """The text in ASCII as lines of at most that width; all but the first are indented further."""
    return textwrap.wrap(
        ascii_only(text),
        width,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_on_hyphens=False,
    )


def hanging(prefix: str, text: str, width: int | None) -> str:
    """The text after its prefix, and what is too long for `width` below the text's beginning; None is one line.

    Where the prefix leaves too little room, the text begins on a line of its own. Words stay whole: a path, a name or a
    command can be copied.
    """
    prefix, words = printable(prefix), [printable(word) for word in text.split()]
    line = (prefix + " ".join(words)).rstrip()
    if width is None or len(line) <= width:
        return line
    first, indent = prefix, " " * len(prefix)
    if width - len(prefix) < max(_LEAST_TEXT, *map(len, words)):
        first = indent = " " * (len(prefix) - len(prefix.lstrip()) + _DEEPER)
    folded = textwrap.fill(
        " ".join(words),
        width,
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return folded if first == prefix else f"{prefix.rstrip()}\n{folded}"


def _shortened(cell: str, width: int) -> str:
    return cell if len(cell) <= width else cell[: width - len(_CUT)] + _CUT
