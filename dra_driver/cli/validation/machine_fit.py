"""Decides, as the scheduler would, whether a claim fits on a machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from dra_driver.claims.rules.plan import Identity, our_part, plan_claim
from dra_driver.cli.validation.rules.allocator import (
    AllocationError,
    NoChoiceError,
    Wanted,
    all_wanted,
    allocate,
    devices_of,
    less,
)
from dra_driver.cli.validation.rules.explain import (
    Funnel,
    funnel,
    largest_group,
    meant_attribute,
    near_misses,
)
from dra_driver.cli.validation.rules.layout_trial import MigGpu
from dra_driver.errors import DraDriverError, RetryableError
from dra_driver.kube.claims import parse_allocated_claim
from dra_driver.model.claim import ClaimRef
from dra_driver.model.dataclass import dataclass
from dra_driver.model.host import NO_EXTRA_DEVICES, ExtraDevices
from dra_driver.model.inventory import Inventory
from dra_driver.model.schema import JsonObject
from dra_driver.model.sharing import NO_SHARING, SharingPolicy
from dra_driver.model.units import counted
from dra_driver.power.rules.limits import NO_POWER_POLICY, PowerPolicy

_CLAIM: Final = ClaimRef("default", "claim", "00000000-0000-0000-0000-000000000000")
_PLAIN_STEPS = 2
"""Without selectors: all devices, and the devices of the class."""


@dataclass(frozen=True, slots=True)
class Fit:
    """`devices` are (request, device) of one possible allocation; if there is none, `problem` says why. `refusal` is
    why Prepare would refuse the claim with these devices, and `delay` why Prepare would fail until the machine
    changes. `near` are hints about devices that a selector barely excludes.
    """

    funnels: tuple[Funnel, ...]
    devices: tuple[tuple[str, str], ...] = ()
    problem: str | None = None
    refusal: str | None = None
    delay: str | None = None
    allocation: JsonObject | None = None
    near: tuple[str, ...] = ()


@dataclass(eq=False)
class MachineFit:
    """An empty machine, and the settings of its plugin. MIG layouts are tried on `gpus`."""

    name: str
    driver: str
    slices: Sequence[JsonObject]
    inventory: Inventory
    sharing: SharingPolicy = NO_SHARING
    extra_devices: ExtraDevices = NO_EXTRA_DEVICES
    power: PowerPolicy = NO_POWER_POLICY
    gpus: Sequence[MigGpu] = ()

    def __post_init__(self) -> None:
        self._node = str(self.slices[0]["spec"]["nodeName"]) if self.slices else self.name
        self._empty = devices_of(entry["spec"] for entry in self.slices)
        self.devices = self._empty.candidates

    def claim(self, spec: JsonObject, classes: Mapping[str, JsonObject]) -> Fit:
        """Try a v1 claim spec.

        Raises: AllocationError for a missing class; InvalidConfigError and NotJudgedError for a selector.
        """
        devices = spec.get("devices") or {}
        wanted = all_wanted(devices, classes)
        funnels = tuple(funnel(entry, self.devices) for group in wanted for entry in group)
        try:
            [allocation] = self._allocate([spec], classes)
        except AllocationError as error:
            problem = _first_short(wanted, funnels)
            if problem is None and isinstance(error, NoChoiceError):
                problem = self._no_choice(wanted, funnels, devices)
            return Fit(funnels, problem=problem or str(error))
        results = tuple((entry["request"], entry["device"]) for entry in allocation["devices"]["results"])
        near = tuple(text for group in wanted for entry in group for text in near_misses(entry, self.devices))
        return Fit(funnels, results, None, *self._planned(allocation), allocation, near)

    def together(self, specs: Sequence[JsonObject], classes: Mapping[str, JsonObject]) -> str | None:
        """Return why claims with these v1 specs do not fit together; None if they do."""
        held: list[JsonObject] = []
        for number, spec in enumerate(specs, 1):
            try:
                held = self._allocate(specs[:number], classes)
            except AllocationError:
                alone = self.claim(spec, classes)
                if alone.problem is not None:
                    return alone.problem
                others = [{"status": {"allocation": allocation}} for allocation in held]
                text, free, matching = self.taken_away(alone, others)
                return f"{text} (matching: {matching}, free: {free})"
        return None

    def _allocate(self, specs: Sequence[JsonObject], classes: Mapping[str, JsonObject]) -> list[JsonObject]:
        claims = [{"metadata": {"name": "claim"}, "spec": spec} for spec in specs]
        return allocate(self._empty, claims, classes, self._node)

    def taken_away(self, alone: Fit, others: Sequence[JsonObject]) -> tuple[str, int, int]:
        """Return why a claim that fits alone does not fit with others, and for the request that lacks the most
        devices how many are free, and how many match.
        """
        left = less(self._empty, others)
        free = {
            one.name
            for one in left.candidates
            if one.id not in left.taken
            and one.id not in left.shares
            and all(left.counters[key] >= least for key, least in one.counters.items())
        }
        wanted = Counter(request for request, _ in alone.devices)
        matching = {found.request: found.matching for found in alone.funnels if found.request in wanted}
        unused = {request: len(free.intersection(names)) for request, names in matching.items()}
        request = min(matching, key=lambda name: unused[name] - wanted[name])
        text = (
            f"request {request} asks for {counted(wanted[request], 'device')}, but other claims use too many"
        )
        return text, unused[request], len(matching[request])

    def _no_choice(
        self, wanted: list[list[Wanted]], funnels: tuple[Funnel, ...], devices: JsonObject
    ) -> str | None:
        """Return why no choice serves the claim although each request could be served."""
        by_name = {found.request: found.matching for found in funnels}
        entries = [entry for group in wanted for entry in group]
        constraints = devices.get("constraints") or ()
        matches = [one for one in constraints if one.get("matchAttribute")]
        for constraint in matches if len(entries) == len(wanted) else ():  # requests without alternatives
            attribute, names = constraint["matchAttribute"], constraint.get("requests") or by_name
            chosen = [entry for entry in entries if entry.name in names]
            count = sum(entry.count or len(by_name[entry.name]) for entry in chosen)
            matching = {name for entry in chosen for name in by_name[entry.name]}
            number, value = largest_group(attribute, self.devices, matching)
            if number < count:
                largest = (
                    f"but the largest group has {number} ({value})"
                    if number
                    else f"but no matching device has this attribute{meant_attribute(attribute, self.devices)}"
                )
                asks = f"the claim needs {counted(count, 'device')} with the same value"
                return f"constraint matchAttribute {attribute}: {asks}, {largest}"
        for constraint in constraints:
            attribute = constraint.get("distinctAttribute")
            if attribute and not largest_group(attribute, self.devices, set().union(*by_name.values()))[0]:
                meant = meant_attribute(attribute, self.devices)
                return (
                    f"constraint distinctAttribute {attribute}: no matching device has this attribute{meant}"
                )
        if len(entries) == 1 and entries[0].count == 1:
            return None
        text = "enough devices match, but no combination of them serves all requests"
        kinds = ("matchAttribute", "distinctAttribute")
        attributes = ", ".join(
            f"{kind} {one[kind]}" for one in constraints for kind in kinds if one.get(kind)
        )
        return f"{text} and satisfies {attributes}" if attributes else text

    def _planned(self, allocation: JsonObject) -> tuple[str | None, str | None]:
        """Return why Prepare refuses the claim, and why it fails until the machine changes."""
        body = {"metadata": {"uid": _CLAIM.uid}, "status": {"allocation": allocation}}
        before = f"if the claim is allocated on {self.name}, Prepare"
        try:
            claim = our_part(parse_allocated_claim(body, _CLAIM), self.driver)
            identity = Identity(self.driver, self._node, self.sharing, (), self.extra_devices, self.power)
            plan_claim(claim, self.inventory, identity, ())
        except RetryableError as error:
            return None, f"{before} fails for now: {error}"
        except DraDriverError as error:
            return f"{before} refuses it: {error}", None
        return None, None


def _first_short(wanted: list[list[Wanted]], funnels: tuple[Funnel, ...]) -> str | None:
    by_name = {found.request: found for found in funnels}
    for group in wanted:
        shorts = [_short_of(entry, by_name[entry.name]) for entry in group]
        # An error in a selector ends the scheduler's search, even if another alternative would fit.
        broken = [short for entry, short in zip(group, shorts, strict=True) if by_name[entry.name].error]
        if broken or all(shorts):
            return "; ".join(short for short in broken or shorts if short)
    return None


def _short_of(wanted: Wanted, found: Funnel) -> str | None:
    who = f"request {wanted.name}"
    if found.error is not None:
        return f"{who}: selector {found.error}"
    if not found.matching:
        return f"{who}: {found.sentence()}"
    if wanted.count is not None and wanted.count > len(found.matching):
        if wanted.capacity:
            return None
        asks = f"{who} asks for {counted(wanted.count, 'device')} of class {wanted.class_name}"
        why = "" if len(found.steps) == _PLAIN_STEPS else f": {found.sentence()}"
        return f"{asks}, but only {len(found.matching)} can serve it{why}"
    return None
