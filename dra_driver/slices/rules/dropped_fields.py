"""What an API server silently left out of a slice because a feature gate is off."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any, Final

from dra_driver.model.units import same_quantity
from dra_driver.slices.rules.build import Pool

UNKNOWN_GATE: Final = "unknown"
PARTITIONS_GATE: Final = "DRAPartitionableDevices"
TAINTS_GATE: Final = "DRADeviceTaints"
SHARES_GATE: Final = "DRAConsumableCapacity"

Drop = tuple[str, str]
"""The path of a field that the server lacks or has changed, and the feature gate or "unknown"."""

_COMPARED = ("devices", "sharedCounters")
_GATES: Final[Mapping[str, str]] = {
    "taints": TAINTS_GATE,
    "sharedCounters": PARTITIONS_GATE,
    "consumesCounters": PARTITIONS_GATE,
    "allowMultipleAllocations": SHARES_GATE,
    "requestPolicy": SHARES_GATE,
}
"""Of the fields that this driver writes."""
_QUANTITY_PARENTS = frozenset({"capacity", "counters"})


def dropped_fields(sent: dict[str, Any], returned: dict[str, Any]) -> tuple[Drop, ...]:
    """Everything in `sent` that `returned` lacks or has changed.

    Both are v1 ResourceSlices. Ignored: fields that only the server sets, so a taint's `timeAdded`, unless
    both sides name different seconds; and how a quantity is written. Empty means all was stored.
    """
    found: list[Drop] = []
    sent_spec, returned_spec = sent.get("spec") or {}, returned.get("spec") or {}
    for key in _COMPARED:
        _compare(sent_spec.get(key), returned_spec.get(key), f"spec.{key}", (key,), found)
    return tuple(found)


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


def _compare(sent: Any, got: Any, path: str, names: tuple[str, ...], found: list[Drop]) -> None:
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
