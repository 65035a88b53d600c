"""Validation of ResourceClaims and their templates, as far as a driver meets them."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

from playground.apiserver.devicerules import check_names
from playground.apiserver.failure import Cause
from playground.apiserver.faultlist import FaultList
from playground.apiserver.names import is_attribute_name
from playground.apiserver.quantity import parse_quantity

_MOST_REQUESTS = 32
_MOST_RESULTS = 32
_MOST_RESERVED = 256
_MOST_CONDITIONS = 8
_MOST_DATA_BYTES = 10 * 1024
_CONDITION_REASON = re.compile(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?")
_SHARE_ID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def drop_deallocated(obj: dict[str, Any], before: dict[str, Any] | None) -> None:
    """Forget, in place, what the status says of devices that this write takes out of the allocation."""
    gone = _allocated((before or {}).get("status")) - _allocated(obj.get("status"))
    status = obj.get("status") or {}
    if gone and status.get("devices"):
        left = [entry for entry in status["devices"] if _device_key(entry) not in gone]
        obj["status"] = {key: value for key, value in status.items() if key != "devices"}
        if left:
            obj["status"]["devices"] = left


def claim_faults(obj: dict[str, Any], before: dict[str, Any] | None) -> list[Cause]:
    """Every fault of a stored-form claim."""
    faults = FaultList()
    _check_spec((obj.get("spec") or {}).get("devices") or {}, "spec.devices", faults)
    if before is not None and obj.get("spec") != before.get("spec"):
        faults.invalid("spec", "(changed)", "field is immutable")
    _check_status(obj.get("status") or {}, faults)
    if before is not None:
        _check_allocation_kept(obj.get("status") or {}, before.get("status") or {}, faults)
    return faults.causes


def template_faults(obj: dict[str, Any], before: dict[str, Any] | None) -> list[Cause]:
    """Every fault of a stored-form claim template."""
    faults = FaultList()
    inner = (obj.get("spec") or {}).get("spec") or {}
    _check_spec(inner.get("devices") or {}, "spec.spec.devices", faults)
    if before is not None and obj.get("spec") != before.get("spec"):
        faults.invalid("spec", "(changed)", "field is immutable")
    return faults.causes


def _check_spec(devices: dict[str, Any], path: str, faults: FaultList) -> None:
    requests = devices.get("requests") or []
    faults.too_many(f"{path}.requests", len(requests), _MOST_REQUESTS)
    check_names([request.get("name") for request in requests], f"{path}.requests", "name", faults)
    for index, request in enumerate(requests):
        here = f"{path}.requests[{index}]"
        exact, first = request.get("exactly"), request.get("firstAvailable") or []
        if (exact is not None) == bool(first):
            faults.required(here, "exactly one of `exactly` or `firstAvailable` is required")
        for wanted in first if exact is None else [exact]:
            _check_request(wanted, f"{here}.{'firstAvailable' if exact is None else 'exactly'}", faults)


def _check_request(wanted: dict[str, Any], path: str, faults: FaultList) -> None:
    if not wanted.get("deviceClassName"):
        faults.required(f"{path}.deviceClassName")
    _check_amounts((wanted.get("capacity") or {}).get("requests") or {}, f"{path}.capacity.requests", faults)
    mode = wanted.get("allocationMode")
    if mode not in ("ExactCount", "All"):
        faults.invalid(f"{path}.allocationMode", mode, "must be ExactCount or All")
    elif mode == "ExactCount" and (wanted.get("count") or 0) < 1:
        faults.invalid(f"{path}.count", wanted.get("count"), "must be greater than zero")


def _check_amounts(amounts: dict[str, Any], path: str, faults: FaultList) -> None:
    for name, amount in amounts.items():
        if not is_attribute_name(name):
            faults.invalid(f"{path}[{name}]", name, "must be [domain/]identifier")
        value = parse_quantity(amount)
        if value is None or value < 0:
            faults.invalid(f"{path}[{name}]", amount, "must be a quantity of zero or more")


def _check_status(status: dict[str, Any], faults: FaultList) -> None:
    allocation, reserved = status.get("allocation"), status.get("reservedFor") or []
    faults.too_many("status.reservedFor", len(reserved), _MOST_RESERVED)
    if reserved and allocation is None:
        faults.invalid("status.reservedFor", "", "may not be specified when `allocated` is not set")
    results = ((allocation or {}).get("devices") or {}).get("results") or []
    faults.too_many("status.allocation.devices.results", len(results), _MOST_RESULTS)
    for index, result in enumerate(results):
        here, share = f"status.allocation.devices.results[{index}]", result.get("shareID")
        if share is not None and not _SHARE_ID.fullmatch(str(share)):
            faults.invalid(f"{here}.shareID", share, "must be a lower-case RFC 4122 UUID")
        _check_amounts(result.get("consumedCapacity") or {}, f"{here}.consumedCapacity", faults)
    allocated = _allocated(status)
    seen: set[Any] = set()
    for index, device in enumerate(status.get("devices") or ()):
        key = _device_key(device)
        if key not in allocated:
            faults.invalid(f"status.devices[{index}]", key, "must be an allocated device in the claim")
        elif key in seen:
            faults.duplicate(f"status.devices[{index}]", key)
        seen.add(key)
        _check_device_status(device, f"status.devices[{index}]", faults)


def _check_device_status(device: dict[str, Any], path: str, faults: FaultList) -> None:
    conditions, data = device.get("conditions") or [], device.get("data")
    faults.too_many(f"{path}.conditions", len(conditions), _MOST_CONDITIONS)
    for index, condition in enumerate(conditions):
        here = f"{path}.conditions[{index}]"
        if condition.get("status") not in ("True", "False", "Unknown"):
            faults.invalid(f"{here}.status", condition.get("status"), "must be True, False or Unknown")
        if not condition.get("reason"):
            faults.required(f"{here}.reason")
        elif not _CONDITION_REASON.fullmatch(str(condition["reason"])):
            faults.invalid(f"{here}.reason", condition["reason"], "must be a CamelCase word")
        if not _is_moment(condition.get("lastTransitionTime")):
            faults.required(f"{here}.lastTransitionTime", "must be set")
    if data is not None and not isinstance(data, dict):
        faults.invalid(f"{path}.data", "<value omitted>", "must be a valid JSON object")
    faults.too_long(f"{path}.data", len(json.dumps(data or {}, separators=(",", ":"))), _MOST_DATA_BYTES)


def _is_moment(text: object) -> bool:
    try:
        datetime.fromisoformat(str(text))
    except ValueError:
        return False
    return True


def _check_allocation_kept(status: dict[str, Any], before: dict[str, Any], faults: FaultList) -> None:
    old, new = before.get("allocation"), status.get("allocation")
    if old is not None and new is not None and old != new:
        faults.invalid("status.allocation", "(changed)", "field is immutable")
    if old is not None and new is None and status.get("reservedFor"):
        faults.invalid("status.allocation", "", "cannot be removed while the claim is reserved")


def _allocated(status: Any) -> set[tuple[Any, ...]]:
    results = (((status or {}).get("allocation") or {}).get("devices") or {}).get("results") or ()
    return {_device_key(result) for result in results}


def _device_key(entry: dict[str, Any]) -> tuple[Any, ...]:
    return entry.get("driver"), entry.get("pool"), entry.get("device"), entry.get("shareID")


def default_claim_spec(spec: dict[str, Any]) -> None:
    """Fill what the API server fills, in place: allocation mode and count of every (sub)request."""
    for request in (spec.get("devices") or {}).get("requests") or ():
        exact = [request["exactly"]] if isinstance(request.get("exactly"), dict) else []
        for wanted in (*exact, *(request.get("firstAvailable") or ())):
            mode = wanted.setdefault("allocationMode", "ExactCount")
            if mode == "ExactCount":
                wanted.setdefault("count", 1)
