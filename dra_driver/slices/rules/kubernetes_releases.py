"""What follows from the release of Kubernetes where no field of its API tells it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from dra_driver.slices.rules.api_limits import MAX_TAINTS

Version = tuple[int, int, int]

# Kubernetes 1.36.2 is the first release that counts them; no release of 1.35 does.
_COUNTS_SHARES: Version = (1, 36, 2)
_MAX_TAINTS_BEFORE = 4
_NUMBERS = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")


def parse_version(text: str) -> Version | None:
    """`v1.36.0-gke.1` as (1, 36, 0); None for what is not a version."""
    found = _NUMBERS.match(text)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


@dataclass(frozen=True, slots=True)
class TaintLimits:
    """What an API server takes of a device's taints; it refuses the whole slice for more. `informational`: also taints
    without an effect. `most`: how many."""

    informational: bool = True
    most: int = MAX_TAINTS


NEWEST_TAINTS = TaintLimits()
"""Of Kubernetes 1.35 and newer. All other limits of a slice are those of the tightest release."""
OLDEST_TAINTS = TaintLimits(informational=False, most=_MAX_TAINTS_BEFORE)


def sharing_caution(release: str) -> str | None:
    """Why the scheduler gives shares of devices with counters out wrongly, as one sentence with the remedy.

    None where the release is new enough or cannot be read.
    """
    version = parse_version(release)
    if version is None or version >= _COUNTS_SHARES:
        return None
    return (
        f"the scheduler of Kubernetes {release} forgets what shared devices take of a GPU's counters and may give one "
        "place on a GPU out twice, so that pods cannot start; upgrade to 1.36.2 or newer, or leave GPUs with MIG "
        "devices on demand out of the sharing rules"
    )
