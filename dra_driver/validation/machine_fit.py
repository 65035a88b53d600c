"""Would a claim fit on a machine? Decided as the scheduler does it, explained by `rules.explain`."""

from __future__ import annotations

import copy
import queue
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice, product
from typing import Any, TypeVar

from dra_driver.api.resolve import config_for_result
from dra_driver.claims.rules.companions import asked_host_devices
from dra_driver.errors import DraDriverError
from dra_driver.kube.claims import parse_allocated_claim
from dra_driver.model.claim import ClaimRef
from dra_driver.model.companions import NO_COMPANIONS, Companions
from dra_driver.validation.rules.allocator import (
    AllocationError,
    Inventory,
    allocate_from,
    counters_of,
    less,
    take_inventory,
)
from dra_driver.validation.rules.cel.values import Semver
from dra_driver.validation.rules.explain import (
    DeviceRequest,
    Funnel,
    MachineDevice,
    funnel,
    largest_group,
    machine_devices,
)
from dra_driver.validation.rules.manifests import alternatives, default_claim_spec
from dra_driver.validation.rules.selection import DeviceView, selects
from dra_driver.validation.rules.selectors import Selector, compiled

JsonObject = dict[str, Any]
_T = TypeVar("_T")

_BOUND_S = 5.0
_MOST_CHOICES = 64
"""Of alternatives, where several requests have some."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The outcome for one claim.

    `devices` are (request, device) of one way to serve it, empty if there is none; then `problem` says why.
    `refusal` is what Prepare would say to the parameters for these devices. `allocation` is the claim's status.
    """

    funnels: tuple[Funnel, ...]
    devices: tuple[tuple[str, str], ...] = ()
    problem: str | None = None
    refusal: str | None = None
    allocation: JsonObject | None = None


@dataclass(frozen=True, slots=True)
class Nodes:
    """So many nodes that are machines of one sort."""

    machine: MachineFit
    count: int = 1


class MachineFit:
    """One empty machine: nothing of it is allocated yet."""

    def __init__(
        self, name: str, driver: str, slices: Sequence[JsonObject], companions: Companions = NO_COMPANIONS
    ) -> None:
        """`companions` are what the driver's configuration there gives to claims beside their GPUs."""
        self.name = name
        self._companions = companions
        self._driver = driver
        self._slices = [_stored(entry, number) for number, entry in enumerate(slices)]
        self._node = str(slices[0]["spec"]["nodeName"]) if slices else name
        devices = [device for entry in slices for device in entry["spec"].get("devices") or ()]
        self.devices: list[MachineDevice] = machine_devices(driver, devices)
        self._matches: dict[tuple[str, int], bool] = {}

    def claim(
        self, spec: JsonObject, classes: Mapping[str, JsonObject], others: Sequence[JsonObject] = ()
    ) -> Fit:
        """Whether a v1 claim spec fits beside the claims `others`, which hold devices already."""
        spec = copy.deepcopy(spec)
        default_claim_spec(spec)
        devices = spec.get("devices") or {}
        wanted = [
            [_wanted(n, body, classes) for n, body in alternatives(r)] for r in devices.get("requests") or ()
        ]
        funnels = tuple(funnel(entry, self.devices) for group in wanted for entry in group)
        short = _first_short(wanted, funnels)
        if short is not None:
            return Fit(funnels, problem=short)
        try:
            allocation = bounded_search(lambda: self._allocate(spec, classes, others))
        except AllocationError as error:
            return Fit(funnels, problem=self._why_not(wanted, funnels, devices, bool(others)) or str(error))
        results = tuple((entry["request"], entry["device"]) for entry in allocation["devices"]["results"])
        return Fit(funnels, results, None, self._refusal(allocation), allocation)

    def free(self, others: Sequence[JsonObject], names: Collection[str]) -> set[str]:
        """Those of the named devices of which the claims `others` have nothing: neither all, nor a share, nor a part of
        the GPU."""
        inventory = self._left(others)
        return {
            candidate.id[2]
            for candidate in inventory.candidates
            if candidate.id[2] in names
            and candidate.id not in inventory.taken
            and candidate.id not in inventory.shares
            and all(inventory.counters.get(key, 0) >= least for key, least in counters_of(candidate).items())
        }

    def allocated(
        self, spec: JsonObject, classes: Mapping[str, JsonObject], others: Sequence[JsonObject]
    ) -> JsonObject | None:
        """What a claim with this v1 spec gets beside the claims `others`, as a claim; None if there is not enough left.
        The time that this takes is not limited. Raises: NotJudgedError."""
        spec = copy.deepcopy(spec)
        default_claim_spec(spec)
        try:
            return {"status": {"allocation": self._allocate(spec, classes, others)}}
        except AllocationError:
            return None

    def with_room(
        self, body: JsonObject, classes: Mapping[str, JsonObject], others: Sequence[JsonObject]
    ) -> tuple[int, int]:
        """Of a request, or one alternative of it: how many devices have room for it beside the claims `others`, and how
        many match. Raises: NotJudgedError."""
        matching = set(funnel(_wanted("one", body, classes), self.devices).matching)
        one = {**body, "allocationMode": "ExactCount", "count": 1}
        claim = {"spec": {"devices": {"requests": [{"name": "one", "exactly": one}]}}}
        left, found = self._left(others), 0
        for candidate in left.candidates:
            if candidate.id[2] in matching:
                alone = Inventory([candidate], left.taken, left.shares, left.counters)
                with suppress(AllocationError):
                    allocate_from(alone, claim, classes, node=self._node, selects=self._selects)
                    found += 1
        return found, len(matching)

    def _allocate(
        self, spec: JsonObject, classes: Mapping[str, JsonObject], others: Sequence[JsonObject]
    ) -> JsonObject:
        claim = {"metadata": {"name": "claim"}, "spec": spec}
        return allocate_from(self._left(others), claim, classes, node=self._node, selects=self._selects)

    def _left(self, others: Sequence[JsonObject]) -> Inventory:
        return less(self._empty, others)

    @cached_property
    def _empty(self) -> Inventory:
        return take_inventory(self._slices, (), self._node)

    def _selects(self, expression: str, device: DeviceView) -> bool:
        """As `selects`; the devices of this machine are looked at once."""
        key = (expression, id(device))
        if key not in self._matches:
            self._matches[key] = selects(expression, device)
        return self._matches[key]

    def _why_not(
        self,
        wanted: list[list[DeviceRequest]],
        funnels: tuple[Funnel, ...],
        devices: JsonObject,
        beside: bool,
    ) -> str | None:
        """The first reason that is known where each request could be served by itself; None if none is."""
        by_name = {found.request: found for found in funnels}
        for constraint in devices.get("constraints") or ():
            short = self._constraint_short(constraint, wanted, by_name)
            if short is not None:
                return short
        if beside:
            return "the pod's claims do not fit at one time: each does alone"
        if sum(len(group) for group in wanted) > 1 or any(
            entry.count != 1 for group in wanted for entry in group
        ):
            return "enough devices match, but no choice of them serves all requests at one time"
        return None

    def _constraint_short(
        self, constraint: JsonObject, wanted: list[list[DeviceRequest]], by_name: Mapping[str, Funnel]
    ) -> str | None:
        """Why a constraint cannot hold, whichever alternatives are taken; None if it can."""
        attribute = constraint.get("matchAttribute")
        if attribute is None:
            return None
        names = set(constraint.get("requests") or ())
        texts: dict[str, None] = {}
        for chosen in islice(product(*wanted), _MOST_CHOICES):
            concerned = [one for one in chosen if not names or {one.name, one.name.partition("/")[0]} & names]
            short = self._group_short(attribute, concerned, by_name)
            if short is None:
                return None
            which = ", ".join(one.name for one in concerned if "/" in one.name)
            texts[f"{short}{f' (by {which})' if which else ''}"] = None
        return f"constraint matchAttribute {attribute}: {'; '.join(texts)}"

    def _group_short(
        self, attribute: str, chosen: list[DeviceRequest], by_name: Mapping[str, Funnel]
    ) -> str | None:
        matching = [name for entry in chosen for name in by_name[entry.name].matching]
        count = sum(entry.count or len(by_name[entry.name].matching) for entry in chosen)
        number, value = largest_group(attribute, self.devices, list(dict.fromkeys(matching)))
        if number >= count:
            return None
        if not number:
            return "no matching device has this attribute"
        return f"{count} devices are wanted with one value, the largest group has {number} ({value})"

    def _refusal(self, allocation: JsonObject) -> str | None:
        """What Prepare would say to the parameters that the claim and its classes carry."""
        kinds = {c.name: c.variable["attributes"][self._driver].get("type") for c in self.devices}
        body = {"metadata": {"uid": "0"}, "status": {"allocation": allocation}}
        try:
            claim = parse_allocated_claim(body, ClaimRef("", "claim", "0"))
            for result in claim.results:
                kind = kinds.get(result.device)
                if result.driver == self._driver and kind in ("gpu", "mig"):
                    config_for_result(result, claim.configs, self._driver, kind)
                    asked_host_devices(claim, result, kind, self._driver, self._companions.askable)
        except DraDriverError as error:
            return f"allocated on {self.name}, Prepare would refuse it: {error}"
        return None


def _first_short(wanted: list[list[DeviceRequest]], funnels: tuple[Funnel, ...]) -> str | None:
    """Why a request cannot be served whatever the others get; None if each can."""
    by_name = {found.request: found for found in funnels}
    for group in wanted:
        shorts = [_short_of(entry, by_name[entry.name]) for entry in group]
        # An error in a selector ends the scheduler's search, also where another alternative would fit.
        broken = [short for entry, short in zip(group, shorts, strict=True) if by_name[entry.name].error]
        if broken or all(shorts):
            return "; ".join(short for short in broken or shorts if short)
    return None


def _short_of(wanted: DeviceRequest, found: Funnel) -> str | None:
    """Why one request cannot be served by itself; None if it can."""
    who = f"request {wanted.name}"
    if found.error is not None:
        return f"{who}: selector {found.error}"
    if not found.matching:
        nearest = f"; nearest: {found.nearest}" if found.nearest else ""
        return f"{who}: {found.sentence()}{nearest}"
    if wanted.count is not None and wanted.count > len(found.matching):
        return None if wanted.capacity else f"{who}: wants {wanted.count}, but of {found.sentence()}"
    return None


def _wanted(name: str, body: JsonObject, classes: Mapping[str, JsonObject]) -> DeviceRequest:
    class_name = body["deviceClassName"]
    requests = (body.get("capacity") or {}).get("requests") or {}
    return DeviceRequest(
        name,
        class_name,
        _compiled((classes.get(class_name) or {}).get("spec") or {}),
        _compiled(body),
        None if body.get("allocationMode") == "All" else body.get("count", 1),
        tuple((key, str(amount)) for key, amount in requests.items()),
        tuple(body.get("tolerations") or ()),
    )


def _compiled(body: JsonObject) -> tuple[Selector, ...]:
    return tuple(compiled(entry["cel"]["expression"]) for entry in body.get("selectors") or ())


def _stored(entry: JsonObject, number: int) -> JsonObject:
    """A slice as the API server would hold it; versions keep their type, which the plain value does not tell. The slice
    itself stays as it is."""
    spec = dict(entry["spec"])
    if spec.get("devices"):
        spec["devices"] = [_stored_device(device) for device in spec["devices"]]
    return {**entry, "metadata": {"name": f"{number:04d}"}, "spec": spec}


def _stored_device(device: JsonObject) -> JsonObject:
    attributes = device.get("attributes") or {}
    versions = {
        name: {**value, "version": Semver(value["version"])}
        for name, value in attributes.items()
        if "version" in value
    }
    return {**device, "attributes": attributes | versions} if versions else device


def bounded_search(call: Callable[[], _T], bound_s: float = _BOUND_S) -> _T:
    """The call's result; the search through partitions of GPUs can take longer than anybody waits.

    Raises: AllocationError, also when the time is up.
    """
    answers: queue.Queue[tuple[list[_T], Exception | None]] = queue.Queue()

    def work() -> None:
        try:
            answers.put(([call()], None))
        except Exception as error:  # noqa: BLE001  raised again in the thread that waits
            answers.put(([], error))

    threading.Thread(target=work, name="allocation", daemon=True).start()
    try:
        result, error = answers.get(timeout=bound_s)
    except queue.Empty:
        raise AllocationError(f"no choice of devices was found within {bound_s:.0f} s") from None
    if error is not None:
        raise error
    return result[0]
