"""What an API server silently left out of a slice because a feature gate is off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from dra_driver.model.units import same_quantity

UNKNOWN_GATE: Final = "unknown"
PARTITIONS_GATE: Final = "DRAPartitionableDevices"
TAINTS_GATE: Final = "DRADeviceTaints"

_COMPARED = (
    "devices",
    "sharedCounters",
    "perDeviceNodeSelection",
    "partitionTypeAttribute",
    "skipNodeOperations",
)
_GATES: Final[Mapping[str, str]] = {
    "taints": TAINTS_GATE,
    "perDeviceNodeSelection": PARTITIONS_GATE,
    "sharedCounters": PARTITIONS_GATE,
    "consumesCounters": PARTITIONS_GATE,
    "nodeName": PARTITIONS_GATE,
    "nodeSelector": PARTITIONS_GATE,
    "allNodes": PARTITIONS_GATE,
    "bindsToNode": "DRADeviceBindingConditions",
    "bindingConditions": "DRADeviceBindingConditions",
    "bindingFailureConditions": "DRADeviceBindingConditions",
    "allowMultipleAllocations": "DRAConsumableCapacity",
    "requestPolicy": "DRAConsumableCapacity",
    "ints": "DRAListTypeAttributes",
    "bools": "DRAListTypeAttributes",
    "strings": "DRAListTypeAttributes",
    "versions": "DRAListTypeAttributes",
    "nodeAllocatableResources": "DRANodeAllocatableResources",
    "compatibilityGroups": "DRADeviceCompatibilityGroups",
    "partitionTypeAttribute": "DRAPartitionableDevicesType",
    "skipNodeOperations": "DRAOptionalNodeOperations",
}
_QUANTITY_PARENTS = frozenset({"capacity", "counters"})


class _Loss(NamedTuple):
    path: str
    gate: str
    missing: bool  # not stored at all, as opposed to stored with another value


def dropped_fields(sent: dict[str, Any], returned: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """(path, feature gate or "unknown") of everything in `sent` that `returned` lacks or has changed.

    Both are v1 ResourceSlices. Ignored: fields that only the server sets, so a taint's `timeAdded`, unless
    both sides name different seconds; and how a quantity is written. Empty means all was stored.
    """
    return tuple((loss.path, loss.gate) for loss in _losses(sent, returned))


def could_be_dropped(wanted: dict[str, Any], stored: dict[str, Any]) -> bool:
    """Whether the two differ, and only in that `stored` lacks something: a server that drops fields explains
    that, and so does one that has never been sent them."""
    losses = _losses(wanted, stored)
    return bool(losses) and all(loss.missing for loss in losses)


def _losses(sent: dict[str, Any], returned: dict[str, Any]) -> list[_Loss]:
    found: list[_Loss] = []
    sent_spec, returned_spec = sent.get("spec") or {}, returned.get("spec") or {}
    for key in _COMPARED:
        _compare(sent_spec.get(key), returned_spec.get(key), f"spec.{key}", (key,), found)
    return found


def _compare(sent: Any, got: Any, path: str, names: tuple[str, ...], found: list[_Loss]) -> None:
    """Walk what was sent; `names` are the field names on the way, without list indices."""
    if _empty(sent) and _empty(got):
        return
    if isinstance(sent, dict) and isinstance(got, dict):
        for key in sorted(sent.keys() | got.keys()):
            if not (key == "timeAdded" and _same_second(sent.get(key), got.get(key))):
                _compare(sent.get(key), got.get(key), _child(path, key), (*names, key), found)
    elif isinstance(sent, list) and isinstance(got, list) and len(sent) == len(got):
        for index, (left, right) in enumerate(zip(sent, got, strict=True)):
            _compare(left, right, f"{path}[{index}]", names, found)
    elif not (sent == got or (_is_quantity(names) and same_quantity(sent, got))):
        found.append(_Loss(path, _gate(names), _empty(got)))


def _child(path: str, key: str) -> str:
    """Names with dots or slashes are quoted, as the API does in its own field paths."""
    return f"{path}.{key}" if key.replace("_", "").isalnum() else f"{path}[{key}]"


def _empty(value: Any) -> bool:
    return value is None or value is False or value in ([], {})


def _same_second(sent: Any, got: Any) -> bool:
    return sent is None or (isinstance(got, str) and str(sent)[:19] == got[:19])


def _is_quantity(names: tuple[str, ...]) -> bool:
    """`capacity.<name>.value`, `counters.<name>.value` and everything inside a requestPolicy."""
    return "requestPolicy" in names or (names[-1] == "value" and bool(_QUANTITY_PARENTS & set(names[-3:])))


def _gate(names: tuple[str, ...]) -> str:
    """The gate of the innermost field that one guards."""
    return next((_GATES[name] for name in reversed(names) if name in _GATES), UNKNOWN_GATE)
