"""Validates slices, claims and events as far as a driver needs it, with the limits of Kubernetes 1.34 to 1.37.

The rules are a part of the API server's validation. `make e2e` checks everything that the driver publishes against a
real API server.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any

from dra_driver.errors import InvalidConfigError
from dra_driver.model import units
from dra_driver.model.ids import is_dns_label
from dra_driver.model.schema import (
    Choice,
    FieldFault,
    ListField,
    MapField,
    Object,
    Scalar,
    Shape,
    Words,
    faults,
)
from playground.apiserver.failure import Cause, bad_request
from playground.apiserver.store import at, copy_json

Json = dict[str, Any]

_PART = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"{_PART}(?:\.{_PART})*"
_WORD = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_RANDOM = "bcdfghjklmnpqrstvwxz2456789"  # without vowels, so that no words appear by accident
_PREFIX_MAX = 58

_GATED: Mapping[str, tuple[str, ...]] = {
    "DRADeviceTaints": ("spec.devices.taints",),
    "DRAPartitionableDevices": ("spec.sharedCounters", "spec.devices.consumesCounters"),
    "DRAConsumableCapacity": (
        "spec.devices.allowMultipleAllocations",
        "spec.devices.capacity.*.requestPolicy",
        "spec.devices.requests.exactly.capacity",
        "spec.devices.requests.firstAvailable.capacity",
        "status.allocation.devices.results.shareID",
        "status.allocation.devices.results.consumedCapacity",
    ),
    "DRAResourceClaimDeviceStatus": ("status.devices",),
    "DRADeviceCompatibilityGroups": ("spec.devices.consumesCounters.compatibilityGroups",),
}
"""The fields of slices and claims that belong to each feature gate. A path continues in every item of a list."""


_MANY_TAINTS = 35
"""The first minor version with 16 taints per device and the effect None; older versions allow 4 taints."""
_MAX_RICH_DEVICES = 64
"""The maximum number of devices in a slice if any of them has taints or counters."""
_MAX_NAMES = 32
"""The maximum number of attributes and capacities of a device, and of counters in a set."""
_NODE_CHOICES = ("nodeName", "nodeSelector", "allNodes", "perDeviceNodeSelection")
_NUMBER = r"(?:0|[1-9]\d*)"
_PRE = rf"(?:{_NUMBER}|\d*[A-Za-z-][0-9A-Za-z-]*)"
_SEMVER = re.compile(
    rf"{_NUMBER}\.{_NUMBER}\.{_NUMBER}(?:-{_PRE}(?:\.{_PRE})*)?(?:\+[0-9A-Za-z-]+(?:\.[0-9A-Za-z-]+)*)?"
)
_CONDITION_REASON = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")
_WORDS = Words(names_found=False)
_NOT_DECODED = ("must be an object", "must be a list")
"""Errors that the API server reports before it checks values."""

_KINDS = {"items; at most": "Too many", "may not be more than": "Too long", "is required": "Required value"}
"""The beginning of the API server's message, by a part of the fault's text."""


def generated_name(prefix: str) -> str:
    """Return a name for `generateName`: the first 58 characters of the prefix, and five random characters."""
    return prefix[:_PREFIX_MAX] + "".join(secrets.choice(_RANDOM) for _ in range(5))


def _is(pattern: str, text: object, most: int = 253) -> bool:
    return isinstance(text, str) and len(text) <= most and re.fullmatch(pattern, text) is not None


def is_subdomain(text: object, most: int = 253) -> bool:
    """Whether this is a DNS subdomain of at most `most` characters."""
    return _is(_SUBDOMAIN, text, most)


def is_attribute_name(text: object) -> bool:
    """Whether this is `[domain/]id`, with a C identifier of at most 32 characters and a domain of at most 63."""
    return _is(rf"(?:(?=[^/]{{1,63}}/){_SUBDOMAIN}/)?[A-Za-z_][A-Za-z0-9_]{{0,31}}", text)


def is_label_key(text: object) -> bool:
    """Whether this is `[prefix/]name`, as in labels and taints, with a name of at most 63 characters."""
    return _is(rf"(?:(?=[^/]{{1,253}}/){_SUBDOMAIN}/)?{_WORD}", text, 253 + 1 + 63)


def is_label_value(text: object) -> bool:
    """Whether this is a label's value: at most 63 characters, possibly empty."""
    return _is(rf"(?:{_WORD})?", text)


def default_gates(minor: int) -> dict[str, bool]:
    """Return the default feature gates of Kubernetes 1.`minor`, from 1.34 on."""
    new = "DRADeviceCompatibilityGroups"
    return {gate: gate != new and (minor > 35 or gate == "DRAResourceClaimDeviceStatus") for gate in _GATED}


def drop_disabled(obj: Json, gates: Mapping[str, bool], before: Json | None) -> None:
    """Remove the fields of disabled gates from an object, in place. Keep compatibilityGroups if `before` has any."""
    for gate, paths in _GATED.items():
        for path in paths:
            steps = path.split(".")
            if not gates[gate] and not (
                steps[-1] == "compatibilityGroups" and _drop(copy_json(before), steps)
            ):
                _drop(obj, steps)


def _drop(value: Any, steps: list[str]) -> bool:
    """Remove a field, and return whether it existed."""
    if isinstance(value, list):
        return any([_drop(item, steps) for item in value])
    if not isinstance(value, dict):
        return False
    if len(steps) == 1:
        return value.pop(steps[0], None) is not None
    inner = list(value.values()) if steps[0] == "*" else [value.get(steps[0])]
    return any([_drop(item, steps[1:]) for item in inner])


def _is_quantity(value: object) -> bool:
    try:
        units.parse_quantity(str(value))
    except InvalidConfigError:
        return False
    return True


def _open(*required: str, **fields: Shape) -> Object:
    return Object(fields, required, open=True)


def _that(is_right: Callable[[Any], object], says: str, kind: type = str) -> Scalar:
    return Scalar(kind, lambda value: None if is_right(value) else f"must be {says}")


def _is_moment(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True


_LABEL = _that(is_dns_label, "a DNS label of at most 63")
_QUANTITY = _that(_is_quantity, "a quantity", object)
_ATTRIBUTE = Object(
    {
        "int": Scalar(int),
        "bool": Scalar(bool),
        "string": Scalar(
            str, lambda text: "may not be more than 64 bytes" if len(text.encode()) > 64 else None
        ),
        "version": _that(
            lambda text: len(text) <= 64 and _SEMVER.fullmatch(text), "of semver.org spec 2.0.0"
        ),
    },
    open=True,
    also=lambda given: [] if len(given) == 1 else [("value", "exactly one value must be specified")],
)


def _counters(named_by: str) -> Object:
    """Return the shape of a counter set, or of the counters that a device consumes from a set."""
    counter = MapField(_open("value", value=_QUANTITY), is_dns_label, "{} is not a DNS label of at most 63")
    return Object({named_by: _LABEL, "counters": counter}, (named_by, "counters"), open=True)


def _slice(minor: int) -> Object:
    effects = ("NoSchedule", "NoExecute") if minor < _MANY_TAINTS else ("None", "NoSchedule", "NoExecute")
    taint = _open(
        "key",
        "effect",
        key=_that(is_label_key, "a label name"),
        value=_that(is_label_value, "a label value"),
        effect=Choice(effects),
    )
    device = _open(
        "name",
        name=_LABEL,
        attributes=MapField(_ATTRIBUTE, is_attribute_name, "{} is not [domain/]identifier"),
        capacity=MapField(
            _open("value", value=_QUANTITY), is_attribute_name, "{} is not [domain/]identifier"
        ),
        consumesCounters=ListField(_counters("counterSet"), 2),
        taints=ListField(taint, 4 if minor < _MANY_TAINTS else 16),
    )
    return _open(
        "driver",
        "pool",
        driver=_that(lambda name: is_subdomain(name, 63), "a lower-case DNS subdomain of at most 63"),
        pool=_open(
            "name",
            "resourceSliceCount",
            name=_that(
                lambda name: _is(rf"{_SUBDOMAIN}(?:/{_SUBDOMAIN})*", name),
                "DNS subdomains joined by /, at most 253",
            ),
            resourceSliceCount=Scalar(int, least=1),
            generation=Scalar(int, least=0, most=2**63 - 1),
        ),
        devices=ListField(device, 128),
        sharedCounters=ListField(_counters("name"), 8),
    )


_SLICES = {minor: _slice(minor) for minor in range(34, 38)}
_CLAIM_DEVICES = _open(
    requests=ListField(
        _open("name", name=_LABEL, exactly=_open("deviceClassName", count=Scalar(int, least=1)))
    )
)
_CONDITION = _open(
    "status",
    "reason",
    "lastTransitionTime",
    status=Choice(("True", "False", "Unknown")),
    reason=_that(_CONDITION_REASON.fullmatch, "a CamelCase word"),
    lastTransitionTime=_that(_is_moment, "set"),
)
_CLAIM_STATUS = _open(
    reservedFor=ListField(_open(), 256),
    devices=ListField(
        _open(
            conditions=ListField(_CONDITION, 8),
            data=Scalar(
                dict,
                lambda data: (
                    "may not be more than 10240 bytes" if len(json.dumps(data)) > 10 * 1024 else None
                ),
                says="a valid JSON object",
            ),
        )
    ),
)


def _found(value: Json, shape: Shape, path: str) -> list[Cause]:
    """Return the differences between a value and its shape. Raises: ApiFailure 400 if it cannot be decoded."""
    found = faults(value, shape, path, _WORDS)
    if undecoded := [fault for fault in found if fault.text in _NOT_DECODED]:
        raise bad_request(str(undecoded[0]))
    return list(map(_cause, found))


def _cause(fault: FieldFault) -> Cause:
    kind = next((kind for sign, kind in _KINDS.items() if sign in fault.text), "Invalid value")
    return Cause(fault.path, f"{kind}: {fault.text}")


def _unlike_others(entries: Iterable[Json], path: str, named_by: str) -> Iterator[Cause]:
    seen = set()
    for index, entry in enumerate(entries):
        if entry.get(named_by) in seen:
            yield Cause(f"{path}[{index}].{named_by}", f'Duplicate value: "{entry[named_by]}"')
        seen.add(entry.get(named_by))


def _counter_faults(sets: list[Json], path: str, named_by: str) -> Iterator[Cause]:
    yield from _unlike_others(sets, path, named_by)
    for index, entry in enumerate(sets):
        if not 1 <= len(entry.get("counters") or {}) <= _MAX_NAMES:
            yield Cause(f"{path}[{index}].counters", f"must have 1 to {_MAX_NAMES} items")


def slice_faults(obj: Json, before: Json | None, minor: int = 37) -> list[Cause]:
    """Return all faults of a slice in stored form, for Kubernetes 1.`minor`. `before` is the slice that it replaces."""
    spec = obj.get("spec") or {}
    found = _found(spec, _SLICES[minor], "spec")
    devices, counters = spec.get("devices") or [], spec.get("sharedCounters") or []
    if sum(bool(spec.get(field)) for field in _NODE_CHOICES) != 1:
        found.append(Cause("spec", f"Required value: exactly one of {', '.join(_NODE_CHOICES)} is required"))
    if len(devices) > _MAX_RICH_DEVICES and any(
        device.get("taints") or device.get("consumesCounters") for device in devices
    ):
        found.append(Cause("spec.devices", f"Too many: {len(devices)}: with taints or counters at most 64"))
    if counters and devices:
        found.append(Cause("spec", "sharedCounters and devices are mutually exclusive in a slice"))
    found += _unlike_others(devices, "spec.devices", "name")
    found += _counter_faults(counters, "spec.sharedCounters", "name")
    for index, device in enumerate(devices):
        path = f"spec.devices[{index}]"
        consumed = device.get("consumesCounters") or []
        found += _counter_faults(consumed, f"{path}.consumesCounters", "counterSet")
        if len(device.get("attributes") or {}) + len(device.get("capacity") or {}) > _MAX_NAMES:
            found.append(Cause(path, f"Too many: at most {_MAX_NAMES} attributes and capacities"))
    for field in ("driver", "nodeName", "pool.name"):
        if before is not None and at(spec, field) != at(before["spec"], field):
            found.append(Cause(f"spec.{field}", "Invalid value: field is immutable"))
    return found


def claim_faults(obj: Json, before: Json | None) -> list[Cause]:
    """Return all faults of a claim in stored form. `before` is the claim that it replaces."""
    status, old = obj.get("status") or {}, (before or {}).get("status") or {}
    found = _spec_faults(obj, before)
    found += _found((obj.get("spec") or {}).get("devices") or {}, _CLAIM_DEVICES, "spec.devices")
    found += _found(status, _CLAIM_STATUS, "status")
    if status.get("reservedFor") and not status.get("allocation"):
        found.append(Cause("status.reservedFor", "may not be specified when `allocated` is not set"))
    if old.get("allocation") and (status.get("allocation") or old["allocation"]) != old["allocation"]:
        found.append(Cause("status.allocation", "Invalid value: field is immutable"))
    allocated, seen = _allocated(status), set()
    for index, device in enumerate(status.get("devices") or ()):
        key = _device_key(device)
        if key not in allocated or key in seen:
            found.append(
                Cause(f"status.devices[{index}]", f"{key} must be an allocated device, and be there once")
            )
        seen.add(key)
    return found


def _spec_faults(obj: Json, before: Json | None) -> list[Cause]:
    if before is not None and obj.get("spec") != before.get("spec"):
        return [Cause("spec", "Invalid value: field is immutable")]
    return []


def event_faults(obj: Json, _before: Json | None) -> list[Cause]:
    """Return all faults of an event. It must be in the namespace of its object, or in `default` if the object is
    cluster-scoped.
    """
    about = (obj.get("involvedObject") or {}).get("namespace") or ""
    if obj["metadata"].get("namespace") == (about or "default"):
        return []
    return [Cause("involvedObject.namespace", f'Invalid value: "{about}": does not match event.namespace')]


CHECKS: Mapping[str, Callable[[Json, Json | None], list[Cause]]] = {
    "ResourceClaim": claim_faults,
    "ResourceClaimTemplate": _spec_faults,
    "Event": event_faults,
}


def drop_deallocated(obj: Json, before: Json | None) -> None:
    """Remove from the status, in place, the entries of devices that this write removes from the allocation."""
    gone = _allocated((before or {}).get("status")) - _allocated(obj.get("status"))
    status = obj.get("status") or {}
    if gone and status.get("devices"):
        left = [entry for entry in status["devices"] if _device_key(entry) not in gone]
        obj["status"] = {key: value for key, value in status.items() if key != "devices"}
        if left:
            obj["status"]["devices"] = left


def default_claim_spec(spec: Json) -> None:
    """Set the API server's defaults, in place: allocation mode and count of each request and alternative."""
    for request in (spec.get("devices") or {}).get("requests") or ():
        exact = [request["exactly"]] if isinstance(request.get("exactly"), dict) else []
        for wanted in (*exact, *(request.get("firstAvailable") or ())):
            mode = wanted.setdefault("allocationMode", "ExactCount")
            if mode == "ExactCount":
                wanted.setdefault("count", 1)


def _allocated(status: Any) -> set[tuple[Any, ...]]:
    results = (((status or {}).get("allocation") or {}).get("devices") or {}).get("results") or ()
    return {_device_key(result) for result in results}


def _device_key(entry: Json) -> tuple[Any, ...]:
    return entry.get("driver"), entry.get("pool"), entry.get("device"), entry.get("shareID")
