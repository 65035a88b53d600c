"""Regular expressions of CEL, which Kubernetes runs in time proportional to the text and Python does not.

What could take Python for ever is an error instead: a repetition of something that repeats or has alternatives, and
many repetitions over a long text.
"""

from __future__ import annotations

import re

from dra_driver.validation.rules.cel.values import CelError

_MOST_WORK = 10**8
_REPEATS = re.compile(r"[*+]|\{\d*,\d*\}|\{\d+\}|\?")
_BOUNDED = "?"


def search(pattern: str, text: str) -> re.Match[str] | None:
    """The first match of a pattern. Raises: CelError for one that is not tried, re.error for one that is none."""
    compiled = re.compile(pattern)
    if (len(text) + 1) ** _repetitions(pattern) > _MOST_WORK:
        raise CelError(f"the pattern {pattern!r} is too expensive to be tried here")
    return compiled.search(text)


def _repetitions(pattern: str) -> int:
    """How many there are side by side. Raises: CelError for one within another."""
    found, place = 0, 0
    varies = [False]  # for each open group, whether it can match texts of its own choice
    closed = False  # whether the last element is a group that can
    while place < len(pattern):
        sign = pattern[place]
        repeats = _REPEATS.match(pattern, place)
        if repeats is not None:
            if repeats[0] != _BOUNDED:
                if closed:
                    raise CelError(f"the pattern {pattern!r} repeats a repetition, which is not tried here")
                found += 1
            varies[-1] = True
            place = repeats.end()
            closed = False
            continue
        closed = False
        if sign == "\\":
            place += 1
        elif sign == "[":
            place = _end_of_class(pattern, place)
        elif sign == "(":
            varies.append(False)
            place += pattern.startswith("(?", place)
        elif sign == ")" and len(varies) > 1:
            closed = varies.pop()
            varies[-1] |= closed
        elif sign == "|":
            varies[-1] = True
        place += 1
    return found


def _end_of_class(pattern: str, place: int) -> int:
    """Where the `]` of `[…]` stands; one that comes first is a member."""
    place += 1 + pattern.startswith("^", place + 1)
    place += pattern.startswith("]", place)
    while place < len(pattern) and pattern[place] != "]":
        place += 2 if pattern[place] == "\\" else 1
    return place
