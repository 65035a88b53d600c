"""Consumable capacity: what a request takes of a device, rounded by the device's policies. Stored (v1) form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

from dra_driver.errors import InvalidConfigError
from dra_driver.model.claim import allocation_results
from dra_driver.model.units import format_bytes, format_decimal, parse_quantity

Amounts = Mapping[str, str]
"""Quantities by capacity name, as the device spells it."""


def shareable(device: Mapping[str, Any]) -> bool:
    """Whether the device can be allocated several times."""
    return bool(device.get("allowMultipleAllocations"))


def consumption(requests: Mapping[str, Any], device: Mapping[str, Any]) -> Amounts | None:
    """What an allocation takes of every capacity, zeros too; None if the device cannot give it even when free."""
    # kube-scheduler compares names as they are written, so `gpu.nvidia.com/memory` is no capacity called `memory`.
    if not requests.keys() <= (device.get("capacity") or {}).keys():
        return None
    wanted = {name: str(amount) for name, amount in requests.items()}
    taken = {}
    for name, entry in (device.get("capacity") or {}).items():
        amount = _amount_of(wanted.get(name), entry)
        if amount is None or amount_of(amount) > amount_of(entry["value"]):
            return None
        taken[name] = amount
    return taken


def fits(device: Mapping[str, Any], shares: Iterable[Amounts]) -> bool:
    """Whether the device has enough of everything for all of these at a time."""
    sums: dict[str, Fraction] = {}
    for share in shares:
        for name, amount in share.items():
            sums[name] = sums.get(name, Fraction(0)) + amount_of(amount)
    capacity = device.get("capacity") or {}
    return all(sums[name] <= amount_of(entry["value"]) for name, entry in capacity.items() if name in sums)


def shares_of(claim: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str, str], Amounts]]:
    """(driver, pool, device) and consumption of every share that a claim holds."""
    for result in allocation_results(claim):
        if result.get("shareID") and not result.get("adminAccess"):
            key = (result["driver"], result["pool"], result["device"])
            yield key, result.get("consumedCapacity") or {}


def amount_of(text: Any) -> Fraction:
    """The value of a quantity that the API server has let through. Raises: InvalidConfigError."""
    return _parsed(str(text))


_parsed = lru_cache(maxsize=4096)(parse_quantity)


def _amount_of(wanted: str | None, entry: Mapping[str, Any]) -> str | None:
    """The amount taken of one capacity; None if the policy does not allow it."""
    policy = entry.get("requestPolicy") or {}
    if wanted is None:
        return str(policy.get("default", entry["value"]))
    try:
        value = parse_quantity(str(wanted))
    except InvalidConfigError:
        return None
    if value < 0:
        return None
    if policy.get("validRange"):
        return _in_range(wanted, policy["validRange"])
    if policy.get("validValues"):
        return next((str(text) for text in policy["validValues"] if value <= amount_of(text)), None)
    return wanted


def _in_range(wanted: str, span: Mapping[str, Any]) -> str | None:
    """Up to the next step above min; written like the step."""
    value, low = amount_of(wanted), amount_of(span["min"])
    text = wanted
    if value < low:
        value, text = low, str(span["min"])
    elif span.get("step") is not None:
        step = amount_of(span["step"])
        value = low + -(-(value - low) // step) * step
        text = format_bytes(value) if str(span["step"]).endswith("i") else format_decimal(value)
    return None if span.get("max") is not None and value > amount_of(span["max"]) else text
