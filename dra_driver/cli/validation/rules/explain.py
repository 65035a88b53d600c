"""Why devices do or do not serve a request: the selectors one after the other, with what is left after each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dra_driver.cli.validation.rules.allocator import Candidate, Wanted
from dra_driver.cli.validation.rules.consumable import consumption
from dra_driver.cli.validation.rules.selection import SelectorError
from dra_driver.cli.validation.rules.selectors import Selector

_LONGEST_SHOWN = 100


@dataclass(frozen=True, slots=True)
class FunnelStep:
    """One condition and how many devices are left with it."""

    text: str
    left: int


@dataclass(frozen=True, slots=True)
class Funnel:
    """How a request's devices become fewer.

    `error` is a selector that fails, which ends the whole allocation.
    """

    request: str
    steps: tuple[FunnelStep, ...]
    matching: tuple[str, ...] = ()
    error: str | None = None

    def sentence(self) -> str:
        """`8 devices of class gpu.nvidia.com, 0 match selector 1: …`, or `8 devices, 2 of class mig.nvidia.com`."""
        shown = [f"{step.left} {step.text}" for step in self.steps]
        if len(shown) > 1 and self.steps[0].left == self.steps[1].left:
            shown[:2] = [f"{shown[0]} {self.steps[1].text}"]
        return ", ".join(shown)


def funnel(wanted: Wanted, machine: Sequence[Candidate]) -> Funnel:
    """What each condition of a request leaves of the machine's devices, as long as any are left."""
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
                kept = [device for device in left if _matches(selector, device)]
            except SelectorError as failure:
                return Funnel(wanted.name, tuple(steps), error=f"{_cut(selector.text)}: {failure}")
            if left and not kept:
                return Funnel(wanted.name, (*steps, FunnelStep(text, 0)))
            left = kept
        steps.append(FunnelStep(text, len(left)))
    return _with_the_rest(wanted, left, steps)


def _with_the_rest(wanted: Wanted, left: list[Candidate], steps: list[FunnelStep]) -> Funnel:
    """Capacity and taints, which are looked at after the selectors."""
    if wanted.capacity:
        asked = ", ".join(f"{name} {amount}" for name, amount in wanted.capacity.items())
        left = [one for one in left if consumption(wanted.capacity, one.device, one.view.driver) is not None]
        steps.append(FunnelStep(f"have {asked}", len(left)))
    taints = [taint for device in left if (taint := wanted.untolerated(device)) is not None]
    if taints:
        left = [device for device in left if wanted.untolerated(device) is None]
        first = f"{taints[0].get('key')}={taints[0].get('value', '')}:{taints[0].get('effect')}"
        steps.append(FunnelStep(f"without a taint that is not tolerated, such as {first}", len(left)))
    return Funnel(wanted.name, tuple(steps), tuple(device.name for device in left))


def largest_group(attribute: str, machine: Sequence[Candidate], names: Collection[str]) -> tuple[int, str]:
    """How many of the named devices have the same value of a qualified attribute, and which; (0, "") if none has it."""
    domain, _, key = attribute.rpartition("/")
    values = Counter(
        str(device.view.attributes[domain][key])
        for device in machine
        if device.name in names and key in device.view.attributes.get(domain, {})
    )
    return next(((number, value) for value, number in values.most_common(1)), (0, ""))


def _matches(selector: Selector, device: Candidate) -> bool:
    """Raises: SelectorError, which makes kube-scheduler give up the whole claim."""
    try:
        return device.matches(selector)
    except SelectorError as error:
        text = str(error)
        key = text.removeprefix("no such key: ")
        remedy = f'; test `"{key}" in device.attributes[…]` before it' if key != text else ""
        raise SelectorError(f"fails on device {device.name}: {text}{remedy}") from error


def _cut(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _LONGEST_SHOWN else f"{flat[: _LONGEST_SHOWN - 1]}…"
