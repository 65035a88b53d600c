"""Pods that have no node yet: what they wait for, and what the scheduler says of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dra_driver.model.schema import JsonObject


@dataclass(frozen=True, slots=True)
class WaitingPod:
    """A pod without a node; `says` is the scheduler's own sentence, None if it has not looked at the pod yet."""

    name: str
    says: str | None


def pods_by_claim(pods: Iterable[JsonObject]) -> dict[tuple[str, str], list[WaitingPod]]:
    """Who waits for each claim, by namespace and name."""
    found: dict[tuple[str, str], list[WaitingPod]] = {}
    for pod in pods:
        made = {
            entry["name"]: entry.get("resourceClaimName")
            for entry in (pod.get("status") or {}).get("resourceClaimStatuses") or ()
        }
        namespace = pod["metadata"].get("namespace", "")
        for entry in (pod.get("spec") or {}).get("resourceClaims") or ():
            name = entry.get("resourceClaimName") or made.get(entry["name"])
            if name:
                found.setdefault((namespace, name), []).append(waiting_pod(pod))
    return found


def waiting_pod(pod: JsonObject) -> WaitingPod:
    """The pod with the message of its condition PodScheduled."""
    conditions = (pod.get("status") or {}).get("conditions") or ()
    says = next((entry.get("message") for entry in conditions if entry.get("type") == "PodScheduled"), None)
    return WaitingPod(pod["metadata"]["name"], says or None)
