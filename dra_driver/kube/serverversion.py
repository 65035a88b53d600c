"""What follows from the server's release: no field tells it, so its version has to."""

from __future__ import annotations

import re

from dra_driver.errors import ApiRejectedError, DraDriverError
from dra_driver.kube.client import ApiClient

Version = tuple[int, int, int]

# Kubernetes 1.36.2 is the first release that counts them; no release of 1.35 does.
_FIRST_RIGHT: Version = (1, 36, 2)
_EFFECT_NONE: Version = (1, 35, 0)
_NUMBERS = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")


def parse_version(text: str) -> Version | None:
    """`v1.36.0-gke.1` as (1, 36, 0); None for what is no version."""
    found = _NUMBERS.match(text)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def takes_effect_none(client: ApiClient) -> bool:
    """Whether the server takes taints that only inform; older ones refuse the whole slice for one.

    Raises: ApiUnavailableError if it does not answer. One that does not tell its version is taken for a new one.
    """
    try:
        answer = client.request("GET", "/version", action="ask for the API server's version")
    except ApiRejectedError:
        return True
    version = parse_version(str(answer.get("gitVersion") or ""))
    return version is None or version >= _EFFECT_NONE


def sharing_caution(client: ApiClient) -> str | None:
    """Why shares of devices with counters are given out wrongly in this cluster, as one sentence with the remedy.

    None where the release is new enough or cannot be told: a missing warning must not keep slices from being
    published.
    """
    try:
        answer = client.request("GET", "/version", action="ask for the API server's version")
    except DraDriverError:
        return None
    shown = str(answer.get("gitVersion") or "")
    version = parse_version(shown)
    if version is None or version >= _FIRST_RIGHT:
        return None
    return (
        f"the scheduler of Kubernetes {shown} forgets what shared devices take of a GPU's counters and may give one "
        "place on a GPU out twice, so that pods cannot start; upgrade to 1.36.2 or newer, or leave GPUs with MIG "
        "devices on demand out of the sharing rules"
    )
