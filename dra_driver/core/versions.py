"""Version strings as the API server takes them."""

from __future__ import annotations

import re

_LEADING_NUMBERS = re.compile(r"^v?(\d+(?:\.\d+)*)")


def semver(text: str | None) -> str | None:
    """SemVer 2.0.0 of a driver version: `570.124.06` becomes `570.124.6`; None if there is no number.

    A fourth component becomes build metadata, which does not take part in comparisons:
    `6.19.14.31400000` becomes `6.19.14+31400000`. Missing components are zero.
    """
    match = _LEADING_NUMBERS.match((text or "").strip())
    if match is None:
        return None
    numbers = [str(int(part)) for part in match[1].split(".")]
    version = ".".join([*numbers, "0", "0"][:3])
    return version if len(numbers) <= 3 else f"{version}+{'.'.join(numbers[3:])}"
