"""What an API server silently left out of a slice because a feature gate is off."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Final

UNKNOWN_GATE: Final = "unknown"

_COMPARED = (
    "devices",
    "sharedCounters",
    "perDeviceNodeSelection",
    "partitionTypeAttribute",
    "skipNodeOperations",
)
_GATES: Final[Mapping[str, str]] = {
    "taints": "DRADeviceTaints",
    "perDeviceNodeSelection": "DRAPartitionableDevices",
    "sharedCounters": "DRAPartitionableDevices",
    "consumesCounters": "DRAPartitionableDevices",
    "nodeName": "DRAPartitionableDevices",
    "nodeSelector": "DRAPartitionableDevices",
    "allNodes": "DRAPartitionableDevices",
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
_SUFFIXES: Final[Mapping[str, Fraction]] = {
    **{unit: Fraction(1024) ** (i + 1) for i, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi", "Ei"))},
    **{unit: Fraction(1000) ** (i + 1) for i, unit in enumerate(("k", "M", "G", "T", "P", "E"))},
    **{unit: Fraction(1, 1000 ** (i + 1)) for i, unit in enumerate(("m", "u", "n"))},
}


def dropped_fields(sent: dict[str, Any], returned: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """(path, feature gate or "unknown") of everything in `sent` that `returned` lacks or has changed.

    Both are v1 ResourceSlices. Ignored: fields that only the server sets, so a taint's `timeAdded`, unless
    both sides name different seconds; and how a quantity is written. Empty means all was stored.
    """
    found: list[tuple[str, str]] = []
    sent_spec, returned_spec = sent.get("spec") or {}, returned.get("spec") or {}
    for key in _COMPARED:
        _compare(sent_spec.get(key), returned_spec.get(key), f"spec.{key}", (key,), found)
    return tuple(found)


def same_quantity(left: Any, right: Any) -> bool:
    """Whether two Kubernetes quantities have the same value, "1Gi" and "1024Mi" for example."""
    if left == right:
        return True
    try:
        return _quantity(left) == _quantity(right)
    except ValueError:
        return False


def _compare(sent: Any, got: Any, path: str, names: tuple[str, ...], found: list[tuple[str, str]]) -> None:
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
        found.append((path, _gate(names)))


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


def _quantity(value: Any) -> Fraction:
    text = str(value)
    for suffix, factor in _SUFFIXES.items():
        if text.endswith(suffix):
            return Fraction(text.removesuffix(suffix)) * factor
    return Fraction(text)
