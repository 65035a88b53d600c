"""Pods that have no node yet: what they wait for, and what the scheduler says of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

JsonObject = dict[str, Any]

_IMPLICIT = "deviceclass.resource.kubernetes.io/"


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


def extended_claims(pods: Iterable[JsonObject], classes: Sequence[JsonObject]) -> Iterator[JsonObject]:
    """The claims that the scheduler would make for pods that ask for devices by an extended resource, as
    `nvidia.com/gpu: 2`. It makes them only once it has found a node, so they are not in the cluster yet."""
    served = _served(classes)
    for pod in pods:
        requests = list(_requests(pod, served))
        if requests and not (pod.get("status") or {}).get("extendedResourceClaimStatus"):
            yield {
                "kind": "Pod",
                "metadata": pod["metadata"],
                "spec": {"devices": {"requests": requests}},
            }


def _served(classes: Sequence[JsonObject]) -> Mapping[str, str]:
    """Resource name to class; of two classes for one resource the newer serves it."""
    ordered = sorted(classes, key=lambda entry: str(entry["metadata"].get("creationTimestamp") or ""))
    explicit = {
        entry["spec"]["extendedResourceName"]: entry["metadata"]["name"]
        for entry in ordered
        if (entry.get("spec") or {}).get("extendedResourceName")
    }
    return {_IMPLICIT + entry["metadata"]["name"]: entry["metadata"]["name"] for entry in classes} | explicit


def _requests(pod: JsonObject, served: Mapping[str, str]) -> Iterator[JsonObject]:
    for number, container in enumerate((pod.get("spec") or {}).get("containers") or ()):
        limits = (container.get("resources") or {}).get("limits") or {}
        for index, (resource, amount) in enumerate(sorted(limits.items())):
            if resource in served and str(amount).isdecimal() and int(amount) > 0:
                exactly = {
                    "deviceClassName": served[resource],
                    "allocationMode": "ExactCount",
                    "count": int(amount),
                }
                yield {"name": f"container-{number}-request-{index}", "exactly": exactly}
