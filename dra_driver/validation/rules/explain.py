"""Why devices do or do not serve a request: the selectors one after the other, with what is left after each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dra_driver.errors import InvalidConfigError
from dra_driver.model.units import parse_quantity
from dra_driver.validation.rules.cel.values import CelError
from dra_driver.validation.rules.selectors import Selector, device_variable

JsonObject = dict[str, Any]

_LONGEST_SHOWN = 100


@dataclass(frozen=True, slots=True)
class MachineDevice:
    """A device of the machine: as it is published, and as the variable `device` of selectors."""

    name: str
    published: JsonObject
    variable: JsonObject


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """One request, or one alternative of it. `count` None is all devices that match."""

    name: str
    class_name: str
    class_selectors: tuple[Selector, ...] = ()
    selectors: tuple[Selector, ...] = ()
    count: int | None = 1
    capacity: tuple[tuple[str, str], ...] = ()
    tolerations: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class FunnelStep:
    """One condition and how many devices are left with it."""

    text: str
    left: int


@dataclass(frozen=True, slots=True)
class Funnel:
    """How a request's devices become fewer.

    `error` is a selector that ends in an error, which ends the whole allocation. `nearest` tells of the device
    that comes nearest where none is left.
    """

    request: str
    steps: tuple[FunnelStep, ...]
    matching: tuple[str, ...] = ()
    error: str | None = None
    nearest: str | None = None

    def sentence(self) -> str:
        """`8 devices, 8 of class gpu.nvidia.com, 0 match selector 1: …`"""
        return ", ".join(f"{step.left} {step.text}" for step in self.steps)


def machine_devices(driver: str, devices: Sequence[JsonObject]) -> list[MachineDevice]:
    """The devices of one driver, in their order."""
    return [MachineDevice(device["name"], device, device_variable(driver, device)) for device in devices]


def funnel(wanted: DeviceRequest, machine: Sequence[MachineDevice]) -> Funnel:
    """What each condition of a request leaves of the machine's devices, as long as any are left."""
    left = list(machine)
    drivers = sorted({device.variable["driver"] for device in machine})
    first = "device" if len(left) == 1 else "devices"
    steps = [FunnelStep(first + (f" of driver {', '.join(drivers)}" if drivers else ""), len(left))]
    groups = [(f"of class {wanted.class_name}", wanted.class_selectors)]
    groups += [
        (f"match selector {number}: {_cut(selector.text)}", (selector,))
        for number, selector in enumerate(wanted.selectors, 1)
    ]
    for text, selectors in groups:
        before = left
        for selector in selectors:
            try:
                kept = [device for device in left if _matches(selector, device)]
            except _SelectorError as failure:
                return Funnel(wanted.name, tuple(steps), error=f"{_cut(selector.text)}: {failure}")
            if left and not kept:
                return Funnel(wanted.name, (*steps, FunnelStep(text, 0)), nearest=_nearest(selector, before))
            left = kept
        steps.append(FunnelStep(text, len(left)))
    return _with_the_rest(wanted, left, steps)


def _with_the_rest(wanted: DeviceRequest, left: list[MachineDevice], steps: list[FunnelStep]) -> Funnel:
    """Capacity and taints, which are looked at after the selectors."""
    if wanted.capacity:
        asked = ", ".join(f"{name} {amount}" for name, amount in wanted.capacity)
        lacking = [_lacks(wanted.capacity, device) for device in left]
        kept = [device for device, lack in zip(left, lacking, strict=True) if lack is None]
        steps.append(FunnelStep(f"have {asked}", len(kept)))
        if left and not kept:
            return Funnel(wanted.name, tuple(steps), nearest=f"{left[0].name}: {lacking[0]}")
        left = kept
    tainted = {device.name: _taint(wanted, device) for device in left}
    if any(tainted.values()):
        name, taint = next((name, taint) for name, taint in tainted.items() if taint)
        left = [device for device in left if not tainted[device.name]]
        steps.append(FunnelStep("without a taint that is not tolerated", len(left)))
        if not left:
            return Funnel(wanted.name, tuple(steps), nearest=f"{name}: has the taint {taint}")
    return Funnel(wanted.name, tuple(steps), tuple(device.name for device in left))


def largest_group(attribute: str, machine: Sequence[MachineDevice], names: Sequence[str]) -> tuple[int, str]:
    """How many of the named devices have the same value of a qualified attribute, and which; ("", 0) if none has it."""
    domain, _, key = attribute.rpartition("/")
    chosen = set(names)
    values = Counter(
        str(device.variable["attributes"][domain][key])
        for device in machine
        if device.name in chosen and key in device.variable["attributes"][domain]
    )
    return next(((number, value) for value, number in values.most_common(1)), (0, ""))


class _SelectorError(Exception):
    """A selector ended in an error on a device; kube-scheduler then gives up the whole claim."""


def _matches(selector: Selector, device: MachineDevice) -> bool:
    try:
        return selector.matches(device.variable)
    except CelError as error:
        text = str(error)
        key = text.removeprefix("no such key: ")
        remedy = f'; test `"{key}" in device.attributes[…]` before it' if key != text else ""
        raise _SelectorError(f"ends in an error on device {device.name}: {text}{remedy}") from error


def _nearest(selector: Selector, devices: Sequence[MachineDevice]) -> str:
    """The first of the devices for which most terms hold, and the term that does not."""
    best = max(devices, key=lambda device: selector.score(device.variable))
    return f"{best.name}: {selector.why_not(best.variable)}"


def _lacks(requests: Sequence[tuple[str, str]], device: MachineDevice) -> str | None:
    """What a device does not have of the amounts that are asked for; None if it has all."""
    driver = device.variable["driver"]
    for name, amount in requests:
        domain, slash, key = name.rpartition("/")
        held = device.variable["capacity"][domain if slash else driver].get(key)
        if held is None:
            return f"has no capacity {name}"
        try:
            wanted = parse_quantity(amount)
        except InvalidConfigError as error:
            return str(error)
        if wanted > held.amount:
            return f"{name} is {held}, wanted {amount}"
    return None


def _taint(wanted: DeviceRequest, device: MachineDevice) -> str | None:
    for taint in device.published.get("taints") or ():
        if taint.get("effect") != "None" and not any(
            _tolerates(entry, taint) for entry in wanted.tolerations
        ):
            return f"{taint.get('key')}={taint.get('value', '')}:{taint.get('effect')}"
    return None


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    same_value = (toleration.get("value") or "") == (taint.get("value") or "")
    return (
        toleration.get("effect") in (None, "", taint.get("effect"))
        and toleration.get("key") in (None, "", taint.get("key"))
        and (toleration.get("operator") == "Exists" or same_value)
    )


def _cut(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _LONGEST_SHOWN else f"{flat[: _LONGEST_SHOWN - 1]}…"
