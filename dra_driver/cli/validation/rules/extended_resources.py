"""Devices that pods ask for by an extended resource, as `nvidia.com/gpu: 2`: the claim that the scheduler makes of it.

Source: createRequestsAndMappings of kube-scheduler 1.37. A DeviceClass serves the resource that its
`extendedResourceName` says, and always `deviceclass.resource.kubernetes.io/<name of the class>`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dra_driver.model.schema import JsonObject

IMPLICIT = "deviceclass.resource.kubernetes.io/"


def served_resources(classes: Iterable[JsonObject]) -> Mapping[str, str]:
    """Resource name to class; of two classes for one resource the newer serves it."""
    ordered = sorted(classes, key=lambda entry: str(entry["metadata"].get("creationTimestamp") or ""))
    explicit = {
        entry["spec"]["extendedResourceName"]: entry["metadata"]["name"]
        for entry in ordered
        if (entry.get("spec") or {}).get("extendedResourceName")
    }
    return {IMPLICIT + entry["metadata"]["name"]: entry["metadata"]["name"] for entry in ordered} | explicit


def extended_requests(spec: JsonObject, served: Mapping[str, str]) -> list[JsonObject]:
    """The requests of the claim that the scheduler makes for a pod; none if it asks for no such resource.

    Init containers that end use what containers after them have anyway, so only the most that one of them wants beyond
    that counts.
    """
    initial = [one for one in spec.get("initContainers") or () if isinstance(one, dict)]
    containers = [*initial, *(one for one in spec.get("containers") or () if isinstance(one, dict))]
    short = {index for index, one in enumerate(initial) if one.get("restartPolicy") != "Always"}
    found: list[JsonObject] = []
    for resource in sorted({name for one in containers for name in asked_resources(one) if name in served}):
        amounts = [asked_resources(one).get(resource, 0) for one in containers]
        kept = [0 if index in short else amount for index, amount in enumerate(amounts)]
        more = {index: amounts[index] - sum(kept[index:]) for index in sorted(short)}
        most = max(more, key=lambda index: more[index], default=None)
        if most is not None and more[most] > 0:
            kept[most] = more[most]
        for index, amount in enumerate(kept):
            if amount > 0:
                number = sorted(_resources(containers[index])).index(resource)
                exactly = {
                    "deviceClassName": served[resource], "allocationMode": "ExactCount", "count": amount
                }  # fmt: skip
                found.append({"name": f"container-{index}-request-{number}", "exactly": exactly})
    return sorted(found, key=lambda request: str(request["name"]))


def asked_resources(container: JsonObject) -> dict[str, int]:
    """How many of each resource a container wants, as far as that is a whole number."""
    return {
        str(name): int(str(amount))
        for name, amount in _resources(container).items()
        if str(amount).isascii() and str(amount).isdecimal()
    }


def _resources(container: JsonObject) -> JsonObject:
    resources = container.get("resources")
    resources = resources if isinstance(resources, dict) else {}
    parts = [part for part in (resources.get("requests"), resources.get("limits")) if isinstance(part, dict)]
    return {str(name): amount for part in parts for name, amount in part.items()}
