"""Explains why devices serve a request or not: each selector in turn, with the number of remaining devices."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from fractions import Fraction

from dra_driver.cli.validation.rules.allocator import Candidate, Wanted, amount_of, consumption
from dra_driver.cli.validation.rules.cel import SelectorError, Version, reading
from dra_driver.cli.validation.rules.selectors import DRIVER_SELECTOR, Selector, compiled
from dra_driver.errors import InvalidConfigError
from dra_driver.model.dataclass import dataclass
from dra_driver.model.units import named

_LONGEST_SHOWN = 100
_NONE = "no device of the class"
_MAX_VALUES, _MAX_NAMES = 8, 24
_ALIKE = 0.8
_NEARLY = Fraction(9, 10)
_AT_LEAST = re.compile(
    r"""device\.capacity\[["'](?P<domain>[^"'\\]+)["']\]\.(?P<name>\w+)\."""
    r"""(?:compareTo|isGreaterThan)\(\s*quantity\(\s*["'](?P<amount>[0-9.]+[A-Za-z]*)["']\s*\)\s*\)(?!\s*(?:<|==|!=))"""
)
"""A capacity that must be at least, or greater than, an amount."""
_NO_NVLINK = "no NVLink between these GPUs is up (`nvidia-smi nvlink -s` shows the links)"
_NO_FABRIC = "these GPUs are in no NVLink fabric"
_NO_RACK = "these GPUs are in no rack whose chassis NVML knows"
_NO_MIG = "only MIG devices have it"
_WHY_ABSENT: Mapping[str, str] = {
    "nvlinkDomain": _NO_NVLINK, "fabricClusterUUID": _NO_FABRIC, "fabricCliqueID": _NO_FABRIC,
    "imexChannels": f"{_NO_FABRIC}, or imex.channel is off", "profile": _NO_MIG, "parentUUID": _NO_MIG,
    "parentIndex": _NO_MIG, "parentMinor": _NO_MIG, "iommuGroup": "only GPUs for virtual machines have it",
    "shareable": "no device is shared (the section `sharing` of the configuration)",
    "chassisSerialNumber": _NO_RACK, "slotNumber": _NO_RACK, "trayIndex": _NO_RACK,
    "numaNode": "the machine has no NUMA nodes", "pcieRoot": "the machine does not show the PCIe root of these GPUs",
}  # fmt: skip
_NAMED = re.compile(r"""device\.(attributes|capacity)\[\??["']([^"'\\]+)["']\]\.\??(\w+)""")


@dataclass(frozen=True, slots=True)
class FunnelStep:
    text: str
    left: int


@dataclass(frozen=True, slots=True)
class Funnel:
    """`error` is a failing selector, which ends the whole allocation."""

    request: str
    steps: tuple[FunnelStep, ...]
    matching: tuple[str, ...] = ()
    error: str | None = None

    def sentence(self) -> str:
        """Return a sentence such as `8 devices of class gpu.nvidia.com, 0 match selector 1: …`."""
        shown = [f"{step.left} {step.text}" for step in self.steps]
        if len(shown) > 1 and self.steps[0].left == self.steps[1].left:
            shown[:2] = [f"{shown[0]} {self.steps[1].text}"]
        return ", ".join(shown)


def funnel(wanted: Wanted, machine: Sequence[Candidate]) -> Funnel:
    """Filter the devices by each condition of a request in turn."""
    left = list(machine)
    steps = [FunnelStep("device" if len(left) == 1 else "devices", len(left))]
    groups = [(f"of class {wanted.class_name}", wanted.class_selectors)]
    groups += [
        (f"match selector {number}: {_cut(selector.text)}", (selector,))
        for number, selector in enumerate(wanted.selectors, 1)
    ]
    for text, selectors in groups:
        for selector in selectors:
            try:
                kept = [device for device in left if _matches(selector, device, left)]
            except SelectorError as failure:
                return Funnel(wanted.name, tuple(steps), error=f"{_cut(selector.text)}: {failure}")
            if left and not kept:
                values = "; ".join(_values(selector, left)) if selector in wanted.selectors else ""
                return Funnel(wanted.name, (*steps, FunnelStep(f"{text} ({values})" if values else text, 0)))
            left = kept
        steps.append(FunnelStep(text, len(left)))
    return _with_the_rest(wanted, left, steps)


def _with_the_rest(wanted: Wanted, left: list[Candidate], steps: list[FunnelStep]) -> Funnel:
    if wanted.capacity:
        asked = ", ".join(f"{name} {amount}" for name, amount in wanted.capacity.items())
        able = [one for one in left if consumption(wanted.capacity, one.device) is not None]
        there = {name for one in left for name in one.device.get("capacity") or {}}
        unknown = [
            f"{name} is not a capacity{_meant(name, there)}" for name in wanted.capacity if name not in there
        ]
        steps.append(FunnelStep(f"have {asked}{f' ({unknown[0]})' if unknown else ''}", len(able)))
        left = able
    taints = [taint for device in left if (taint := wanted.untolerated(device)) is not None]
    if taints:
        left = [device for device in left if wanted.untolerated(device) is None]
        first = f"{taints[0].get('key')}={taints[0].get('value', '')}:{taints[0].get('effect')}"
        steps.append(FunnelStep(f"without untolerated taints, such as {first}", len(left)))
    return Funnel(wanted.name, tuple(steps), tuple(device.name for device in left))


def largest_group(attribute: str, machine: Sequence[Candidate], names: Collection[str]) -> tuple[int, str]:
    """Return how many of the named devices share one value of an attribute, and the value."""
    domain, _, key = attribute.rpartition("/")
    values = Counter(
        str(device.view.attributes[domain][key])
        for device in machine
        if device.name in names and key in device.view.attributes.get(domain, {})
    )
    return next(((number, value) for value, number in values.most_common(1)), (0, ""))


def _matches(selector: Selector, device: Candidate, others: Sequence[Candidate]) -> bool:
    """Whether the selector matches. Raises: SelectorError with an explanation."""
    try:
        return device.matches(selector)
    except SelectorError as error:
        text = str(error)
        key = text.removeprefix("no such key: ")
        if key == text:
            text = "compares values of different types" if "overload" in text.lower() else text
            raise SelectorError(
                "; ".join([f"fails on device {device.name}: {text}", *_values(selector, others)])
            ) from error
        unknown = [found for found in _values(selector, others) if found.startswith(_NONE)]
        if not _NAMED.search(selector.text):
            unknown = [f"no such key: {key}; write {reading(selector.text)}"]
        if unknown:
            raise SelectorError("; ".join(unknown)) from error
        remedy = f'test `"{key}" in device.attributes[…]` first, because only some devices have {key}'
        raise SelectorError(f"fails on device {device.name}, which has no {key}; {remedy}") from error


def _values(selector: Selector, devices: Sequence[Candidate]) -> list[str]:
    """Return the values of what a selector names, or suggestions."""
    found = []
    drivers = {one.view.driver for one in devices}
    if any(asked not in drivers for asked in DRIVER_SELECTOR.findall(selector.text)):
        found.append(f"device.driver is {named(sorted(drivers), _MAX_VALUES)}")
    for kind, domain, name in dict.fromkeys(_NAMED.findall(selector.text)):
        views = [getattr(one.view, kind) for one in devices]
        held = [of.get(domain, {}) for of in views]
        sort = "attributes" if kind == "capacity" else "capacity"
        written = str if kind == "capacity" else _written
        values = sorted({written(of[name]) for of in held if name in of})
        if values:
            found.append(f"{name} is {named(values, _MAX_VALUES)}")
        elif not any(held):
            found.append(
                f"{_NONE} has {kind} of {domain}{_meant(domain, {key for of in views for key in of})}"
            )
        elif any(name in getattr(one.view, sort).get(domain, {}) for one in devices):
            found.append(f'{_NONE} has {name} in {kind}; write device.{sort}["{domain}"].{name}')
        elif other := next((key for of in views for key, names in of.items() if name in names), None):
            found.append(f'{_NONE} has {name} in {domain}; write device.{kind}["{other}"].{name}')
        else:
            here = {key: key for of in held for key in of}
            elsewhere = {
                key: f'device.{kind}["{other}"].{key}'
                for of in views
                for other, names in of.items()
                for key in names
            }
            found.append(f"{_NONE} has {name}{_meant_name(name, here, elsewhere)}")
    return found


def near_misses(wanted: Wanted, machine: Sequence[Candidate]) -> Iterator[str]:
    """Yield hints for amounts that exclude devices with a little less, such as 10Gi and MIG devices with 9984Mi. The
    devices pass every other condition.
    """
    for selector in wanted.selectors:
        others = [one for one in (*wanted.class_selectors, *wanted.selectors) if one is not selector]
        for found in _AT_LEAST.finditer(selector.text):
            # The amount may be invalid in a part that no device evaluates, and the changed selector too long.
            with suppress(InvalidConfigError):
                excluded = _barely_excluded(selector, found, others, machine)
                yield from (
                    f"request {wanted.name}: {label} has {found['name']} {value}, a little less than "
                    f"{found['amount']}, so selector {_cut(selector.text)} excludes it; write {value} if it should "
                    "match"
                    for value, label in excluded.items()
                )


def _barely_excluded(
    selector: Selector, found: re.Match[str], others: Sequence[Selector], machine: Sequence[Candidate]
) -> Mapping[str, str]:
    """Return amounts that only the found amount excludes, each with a device's name."""
    least = amount_of(found["amount"])
    begin, end = found.span("amount")
    excluded: dict[str, str] = {}
    for device in machine:
        value = device.view.capacity.get(found["domain"], {}).get(found["name"])
        if value is None or not _NEARLY * least <= amount_of(value) < least or _passes(device, [selector]):
            continue
        lower = compiled(selector.text[:begin] + value + selector.text[end:])
        if _passes(device, [lower, *others]):
            own = device.view.attributes.get(device.view.driver, {})
            excluded.setdefault(value, str(own.get("profile") or own.get("productName") or device.name))
    return excluded


def _passes(device: Candidate, selectors: Sequence[Selector]) -> bool:
    try:
        return all(selector.matches(device.view) for selector in selectors)
    except SelectorError:
        return False


def _written(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) and not isinstance(value, Version) else str(value)


def _meant_name(name: str, here: Mapping[str, str], elsewhere: Mapping[str, str]) -> str:
    """Return why no device has a known attribute, or a suggestion. The values are what to write instead."""
    if name in _WHY_ABSENT:
        return f": {_WHY_ABSENT[name]}"
    near = get_close_matches(name, here, 1)
    others = get_close_matches(name, elsewhere, 1, _ALIKE)
    if near or others:
        return f"; did you mean {here[near[0]] if near else elsewhere[others[0]]}?"
    return _meant(name, here.values())


def _meant(name: str, known: Collection[str]) -> str:
    near = get_close_matches(name, known, 1)
    return f"; did you mean {near[0]}?" if near else f"; known names: {named(sorted(known), _MAX_NAMES)}"


def meant_attribute(attribute: str, machine: Sequence[Candidate]) -> str:
    known = {
        key: f"{domain}/{key}"
        for one in machine
        for domain, names in one.view.attributes.items()
        for key in names
    }
    return _meant_name(attribute.rpartition("/")[2], known, {})


def _cut(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _LONGEST_SHOWN else f"{flat[: _LONGEST_SHOWN - 1]}…"
