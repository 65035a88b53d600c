"""DeviceTaintRules, and claims that do not tolerate taints as intended."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from dra_driver.cli.validation.rules.manifests import alternatives, metadata_faults, requests_of
from dra_driver.cli.validation.rules.schema import IN_REQUEST, faults, object_shape
from dra_driver.health.rules.taints import PREFIX
from dra_driver.model.ids import names_gpus_by
from dra_driver.model.schema import JsonObject
from dra_driver.model.units import named

_EVICTS = "NoExecute"
_OUTCOMES: Mapping[str, str] = {
    "NoSchedule": "; new pods do not get them, unless their claims tolerate the taint",
    _EVICTS: "; Kubernetes deletes their pods, unless their claims tolerate the taint",
}


def taint_rule_faults(document: JsonObject) -> list[str]:
    version = str(document.get("apiVersion")).partition("/")[2]
    if version not in ("v1", "v1beta2", "v1alpha3"):
        return [f"apiVersion: {document.get('apiVersion')!r} has no DeviceTaintRule"]
    shape = object_shape("DeviceTaintRule", version)
    return faults(document, shape, "") + metadata_faults(document.get("metadata"))


def evicting_rule(document: JsonObject, driver: str) -> str | None:
    """Return the key of the NoExecute taint that a rule sets on devices of this driver."""
    if document.get("kind") != "DeviceTaintRule" or taint_rule_faults(document):
        return None
    taint, selector = document["spec"]["taint"], document["spec"].get("deviceSelector") or {}
    evicts = taint["effect"] == _EVICTS and selector.get("driver") in (None, driver)
    return str(taint["key"]) if evicts else None


def selection_hints(rule: JsonObject, machines: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield hints about a valid rule that selects nothing, or more than the devices of one node."""
    selector = rule["spec"].get("deviceSelector")
    if selector is None:
        yield (
            "without deviceSelector the rule selects no device; before Kubernetes 1.37.1 it selects every device; "
            "name a driver, pool and device"
        )
        return
    driver, pool, device = (selector.get(key) for key in ("driver", "pool", "device"))
    by_number = device is not None and names_gpus_by(device) == "minor"
    for machine, names in machines.items():
        if device is not None and device not in names:
            also = "; with deviceNames: minor, GPUs are called gpu-0, gpu-1" if by_number else ""
            yield f"no device of {machine} is called {device}; its devices are {named(names)}{also}"
    if pool is not None or (device is not None and not by_number):
        return
    what = (
        f"every device of {driver or 'every driver'} in the cluster"
        if device is None
        else f"{device} of every node"
    )
    outcome = _OUTCOMES.get(rule["spec"]["taint"]["effect"], "")
    yield f"deviceSelector selects {what}{outcome}; to select one device, name its pool and device"


def selected(rule: JsonObject, machines: Mapping[str, Sequence[str]]) -> Iterator[str]:
    selector = rule["spec"].get("deviceSelector")
    device = (selector or {}).get("device")
    for machine, names in machines.items():
        chosen = [] if selector is None else [name for name in names if device in (None, name)]
        yield f"the rule selects {len(chosen)} of {len(names)} devices of {machine}"


def toleration_hints(devices: JsonObject, evicting: Collection[str]) -> Iterator[str]:
    """Yield hints about tolerations in a valid v1 claim that do not prevent eviction.

    The scheduler accepts any toleration of a taint, but Kubernetes' eviction only one with `effect: NoExecute`.
    """
    for request in requests_of({"devices": devices}):
        for name, body in alternatives(request):
            tolerations = body.get("tolerations") or ()
            if any(
                one.get("tolerationSeconds") is not None and one.get("effect") != _EVICTS
                for one in tolerations
            ):
                yield f"request {name}: Kubernetes ignores tolerationSeconds without effect: NoExecute"
            if keys := [key for key in sorted(evicting) if only_for_the_scheduler(tolerations, key)]:
                yield (
                    f"request {name}: if a device gets the taint {' or '.join(keys)}, Kubernetes evicts its pods, "
                    "because eviction counts only tolerations with effect: NoExecute; add a second toleration with "
                    "this effect"
                )


def only_for_the_scheduler(tolerations: Sequence[Mapping[str, Any]], key: str) -> bool:
    """Whether the tolerations cover a NoExecute taint with this key for the scheduler, but not for eviction.

    >>> only_for_the_scheduler([{"operator": "Exists"}], "gpu.nvidia.com/xid")
    True
    >>> only_for_the_scheduler([{"operator": "Exists"}, {"operator": "Exists", "effect": "NoExecute"}], "x")
    False
    """
    covering = [one.get("effect") or None for one in tolerations if (one.get("key") or key) == key]
    return None in covering and _EVICTS not in covering


def pod_toleration_hints(spec: JsonObject) -> Iterator[str]:
    """Yield a pod's tolerations of our devices' taints; a pod tolerates only taints of nodes."""
    tolerations = spec.get("tolerations")
    for number, one in enumerate(tolerations if isinstance(tolerations, list) else ()):
        key = str(one.get("key")) if isinstance(one, dict) else ""
        if key.startswith(PREFIX):
            yield (
                f"tolerations[{number}]: {key} is a taint of devices, which only a claim can tolerate: "
                f"{IN_REQUEST}tolerations"
            )
