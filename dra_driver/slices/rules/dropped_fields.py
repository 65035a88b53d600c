"""What an API server silently left out of a slice because a feature gate is off."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any, Final

from dra_driver.slices.rules.build import Pool
from dra_driver.slices.rules.comparison import Path, differences

UNKNOWN_GATE: Final = "unknown"
PARTITIONS_GATE: Final = "DRAPartitionableDevices"
TAINTS_GATE: Final = "DRADeviceTaints"
SHARES_GATE: Final = "DRAConsumableCapacity"
GROUPS_GATE: Final = "DRADeviceCompatibilityGroups"

Drop = tuple[str, str]
"""The path of a field that the server lacks or has changed, and the feature gate or "unknown"."""

_COMPARED = ("devices", "sharedCounters")
_GATES: Final[Mapping[str, str]] = {
    "taints": TAINTS_GATE,
    "sharedCounters": PARTITIONS_GATE,
    "consumesCounters": PARTITIONS_GATE,
    "compatibilityGroups": GROUPS_GATE,
    "allowMultipleAllocations": SHARES_GATE,
    "requestPolicy": SHARES_GATE,
}
"""Of the fields that this plugin writes."""


def dropped_fields(sent: dict[str, Any], returned: dict[str, Any]) -> tuple[Drop, ...]:
    """Everything in `sent` that `returned` lacks or has changed, both v1 ResourceSlices. Empty means all was stored."""
    sent_spec, returned_spec = sent.get("spec") or {}, returned.get("spec") or {}
    found = (
        path
        for key in _COMPARED
        for path in differences(returned_spec.get(key), sent_spec.get(key), ("spec", key))
    )
    return tuple((_text(path), _gate(path)) for path in found)


def fields_of(gates: Set[str]) -> list[Drop]:
    """The fields of devices that these gates guard."""
    return [(f"spec.devices[].{name}", gate) for name, gate in _GATES.items() if gate in gates]


def without_fields(pool: Pool, gates: Set[str]) -> Pool:
    """The pool without what these feature gates guard in devices and their capacities."""
    if not gates:
        return pool
    slices = (
        replace(content, devices=tuple(_device_without(device, gates) for device in content.devices))
        for content in pool.slices
    )
    return replace(pool, slices=tuple(slices))


def _device_without(device: dict[str, Any], gates: Set[str]) -> dict[str, Any]:
    kept = _without(device, gates)
    if "capacity" in kept:
        kept["capacity"] = {name: _without(entry, gates) for name, entry in kept["capacity"].items()}
    return kept


def _without(fields: dict[str, Any], gates: Set[str]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if _GATES.get(name) not in gates}


def _text(path: Path) -> str:
    """`spec.devices[0].taints`; names with dots or slashes are quoted, as the API does in its own field paths."""
    parts = (
        f".{part}" if isinstance(part, str) and part.replace("_", "").isalnum() else f"[{part}]"
        for part in path
    )
    return "".join(parts).removeprefix(".")


def _gate(path: Path) -> str:
    """The gate of the innermost field that one guards."""
    return next(
        (_GATES[part] for part in reversed(path) if isinstance(part, str) and part in _GATES), UNKNOWN_GATE
    )
