"""Allocates devices to claims like kube-scheduler of Kubernetes 1.37 on one node. Objects are in stored form (v1).

Anything unsupported is refused. tests/playground/test_kube_allocator.py compares this with Kubernetes' own allocator.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from dra_driver.cli.validation.rules.cel import DeviceView, SelectorError, view
from dra_driver.cli.validation.rules.manifests import alternatives
from dra_driver.cli.validation.rules.selectors import Selector, compiled
from dra_driver.errors import InvalidConfigError
from dra_driver.model.claim import allocation_results
from dra_driver.model.dataclass import dataclass, field
from dra_driver.model.schema import JsonObject
from dra_driver.model.units import format_bytes, format_decimal, parse_quantity

Amounts = Mapping[str, str]
"""By capacity name, as the device spells it."""


def shareable(device: Mapping[str, Any]) -> bool:
    return bool(device.get("allowMultipleAllocations"))


def consumption(requests: Mapping[str, Any], device: Mapping[str, Any]) -> Amounts | None:
    """Return what an allocation consumes of every capacity; None if even a free device cannot serve it."""
    # kube-scheduler compares names literally, so `gpu.nvidia.com/memory` is not the capacity `memory`.
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
    sums: dict[str, Fraction] = {}
    for share in shares:
        for name, amount in share.items():
            sums[name] = sums.get(name, Fraction(0)) + amount_of(amount)
    capacity = device.get("capacity") or {}
    return all(sums[name] <= amount_of(entry["value"]) for name, entry in capacity.items() if name in sums)


def shares_of(claim: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str, str], Amounts]]:
    for result in allocation_results(claim):
        if result.get("shareID") and not result.get("adminAccess"):
            key = (result["driver"], result["pool"], result["device"])
            yield key, result.get("consumedCapacity") or {}


def amount_of(text: Any) -> Fraction:
    """Return the value of a quantity that the API server has accepted. Raises: InvalidConfigError."""
    return parse_quantity(str(text))


def _amount_of(wanted: str | None, entry: Mapping[str, Any]) -> str | None:
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
    """Round up to the next step above min, in the notation of the step."""
    value, low = amount_of(wanted), amount_of(span["min"])
    text = wanted
    if value < low:
        value, text = low, str(span["min"])
    elif span.get("step") is not None:
        step = amount_of(span["step"])
        value = low + -(-(value - low) // step) * step
        text = format_bytes(value) if str(span["step"]).endswith("i") else format_decimal(value)
    return None if span.get("max") is not None and value > amount_of(span["max"]) else text


DeviceId = tuple[str, str, str]  # driver, pool, device
CounterId = tuple[str, str, str, str]  # driver, pool, counter set, counter

_MAX_RESULTS = 32
_MAX_TRIES = 100_000
"""These take a few seconds; kube-scheduler gives up on a node after ten."""


class AllocationError(Exception):
    """Nothing fits, or a feature is unsupported."""


class NoChoiceError(AllocationError):
    """No choice of devices serves all requests."""


class UndecidedError(AllocationError):
    """The search took too long."""


class _TooManyError(Exception):
    """The claim would exceed its maximum number of devices."""


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """`is_here` is False if the pool assigns the device to another node."""

    id: DeviceId
    device: Mapping[str, Any]
    view: DeviceView
    is_here: bool = True
    counters: Mapping[CounterId, Fraction] = field(default_factory=dict)
    _verdicts: dict[Selector, bool] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        return self.id[2]

    def matches(self, selector: Selector) -> bool:
        """Evaluate a selector once. Raises: SelectorError."""
        if selector not in self._verdicts:
            self._verdicts[selector] = selector.matches(self.view)
        return self._verdicts[selector]


@dataclass(frozen=True, slots=True)
class Wanted:
    name: str
    class_name: str
    class_selectors: tuple[Selector, ...] = ()
    selectors: tuple[Selector, ...] = ()
    count: int | None = 1  # None is allocationMode All
    admin: bool = False
    tolerations: Sequence[Mapping[str, Any]] = ()
    capacity: Mapping[str, Any] = field(default_factory=dict)

    def untolerated(self, candidate: Candidate) -> Mapping[str, Any] | None:
        """Return a taint that keeps this request off the device, even with adminAccess."""
        taints = candidate.device.get("taints") or ()
        return next((taint for taint in taints if not is_tolerated(taint, self.tolerations)), None)

    def selects(self, candidate: Candidate) -> bool:
        """Whether the selectors and capacities fit. Raises: AllocationError."""
        try:
            chosen = all(candidate.matches(one) for one in (*self.class_selectors, *self.selectors))
        except SelectorError as error:
            text = f"request {self.name}, device {'/'.join(candidate.id)}: {error}"
            raise AllocationError(text) from error
        return chosen and candidate.is_here and consumption(self.capacity, candidate.device) is not None


@dataclass(frozen=True, slots=True)
class Pick:
    """`claim` is the number of the claim."""

    claim: int
    wanted: Wanted
    candidate: Candidate

    @property
    def is_share(self) -> bool:
        return shareable(self.candidate.device)

    def consumes(self) -> Amounts:
        return consumption(self.wanted.capacity, self.candidate.device) or {}


@dataclass(slots=True)
class FreeDevices:
    """Candidates are in the scheduler's order.

    `unusable` are pools with a problem: their devices are not candidates, and requests for all devices fail.
    """

    candidates: list[Candidate]
    taken: set[DeviceId]
    shares: dict[DeviceId, list[Amounts]] = field(default_factory=dict)
    counters: dict[CounterId, Fraction] = field(default_factory=dict)
    elsewhere: list[Candidate] = field(default_factory=list)
    unusable: list[str] = field(default_factory=list)


def allocate(
    free: FreeDevices, claims: Sequence[JsonObject], classes: Mapping[str, JsonObject], node: str
) -> list[JsonObject]:
    """Return the `status.allocation` of each claim. The claims get their devices together.

    Raises: AllocationError; InvalidConfigError, NotJudgedError for a selector.
    """
    search = _Search(free, claims, classes)
    picks = search.found()
    if picks is None:
        names = ", ".join(variants[0].name.partition("/")[0] for _, variants in search.requests)
        raise NoChoiceError(f"cannot allocate all claims: no devices on node {node} fit requests {names}")
    return [
        _allocation(claim, [pick for pick in picks if pick.claim == number], classes, node)
        for number, claim in enumerate(claims)
    ]


def devices_of(specs: Iterable[JsonObject]) -> FreeDevices:
    found = FreeDevices([], set())
    for spec in specs:
        pool = spec["driver"], spec["pool"]["name"]
        found.counters |= {
            (*pool, counter_set["name"], counter): amount_of(entry["value"])
            for counter_set in spec.get("sharedCounters") or ()
            for counter, entry in counter_set["counters"].items()
        }
        for device in spec.get("devices") or ():
            taken = {
                (*pool, entry["counterSet"], counter): amount_of(amount["value"])
                for entry in device.get("consumesCounters") or ()
                for counter, amount in entry["counters"].items()
            }
            one = Candidate((*pool, device["name"]), device, view(pool[0], device), counters=taken)
            found.candidates.append(one)
    return found


def less(empty: FreeDevices, claims: Iterable[JsonObject]) -> FreeDevices:
    taken: set[DeviceId] = set()
    shares: dict[DeviceId, list[Amounts]] = {}
    for claim in claims:
        taken.update(_held(claim))
        for device_id, amounts in shares_of(claim):
            shares.setdefault(device_id, []).append(amounts)
    counters = dict(empty.counters)
    for candidate in (*empty.candidates, *empty.elsewhere):
        if candidate.id in taken or candidate.id in shares:
            for key, amount in candidate.counters.items():
                counters[key] -= amount
    return FreeDevices(empty.candidates, taken, shares, counters, empty.elsewhere, empty.unusable)


class _Search:
    """Depth-first search over claims, requests, their variants and devices. The first complete choice is used."""

    def __init__(
        self, free: FreeDevices, claims: Sequence[JsonObject], classes: Mapping[str, JsonObject]
    ) -> None:
        self.requests: list[tuple[int, list[Wanted]]] = []
        self._left = free
        self._constraints: list[list[Mapping[str, Any]]] = []
        self._all: dict[tuple[int, str], list[Candidate]] = {}
        self._selected: dict[tuple[int, str, DeviceId], bool] = {}
        self._tries = 0
        for number, claim in enumerate(claims):
            devices = (claim.get("spec") or {}).get("devices") or {}
            self._constraints.append(list(devices.get("constraints") or ()))
            least = 0
            for variants in all_wanted(devices, classes):
                self.requests.append((number, variants))
                least += min(self._count(number, wanted) for wanted in variants)
            if least > _MAX_RESULTS:
                raise AllocationError(_too_many(least))
            for constraint in self._constraints[-1]:
                if not (constraint.get("matchAttribute") or constraint.get("distinctAttribute")):
                    raise AllocationError(
                        f"a constraint with {', '.join(sorted(constraint))} is not supported; use matchAttribute or "
                        "distinctAttribute"
                    )

    def _count(self, claim: int, wanted: Wanted) -> int:
        """For allocationMode All, this determines the devices."""
        if wanted.count is not None:
            return wanted.count
        if self._left.unusable:
            raise AllocationError(f"request {wanted.name} asks for all devices, but {self._left.unusable[0]}")
        self._all[claim, wanted.name] = [one for one in self._left.candidates if wanted.selects(one)]
        return len(self._all[claim, wanted.name])

    def found(self) -> list[Pick] | None:
        try:
            return self._next(0, [])
        except _TooManyError:
            raise AllocationError(_too_many(_MAX_RESULTS + 1)) from None

    def _next(self, index: int, picks: list[Pick]) -> list[Pick] | None:
        if index == len(self.requests):
            return picks
        claim, variants = self.requests[index]
        too_many = 0
        for wanted in variants:
            try:
                found = self._devices(index, wanted, 0, 0, picks)
            except _TooManyError:
                too_many += 1
                continue
            if found is not None:
                return found
        # Too many devices end the search for this claim, whatever its other requests get. The search
        # continues for earlier claims.
        if too_many == len(variants) and (index == 0 or self.requests[index - 1][0] == claim):
            raise _TooManyError
        return None

    def _devices(
        self, index: int, wanted: Wanted, number: int, start: int, picks: list[Pick]
    ) -> list[Pick] | None:
        """Choose the remaining devices of a request that has `number` devices, from candidate `start` on."""
        claim = self.requests[index][0]
        everything = self._all.get((claim, wanted.name))
        if everything == []:
            return None
        count = (wanted.count or 0) if everything is None else len(everything)
        if number == count:
            return self._next(index + 1, picks)
        if count - number > _MAX_RESULTS - sum(1 for pick in picks if pick.claim == claim):
            raise _TooManyError
        if everything is not None:
            pick = Pick(claim, wanted, everything[number])
            if not self._can_take(picks, pick):
                return None
            return self._devices(index, wanted, number + 1, 0, [*picks, pick])
        for position in range(start, len(self._left.candidates)):
            pick = Pick(claim, wanted, self._left.candidates[position])
            self._tries += 1
            if self._tries > _MAX_TRIES:
                raise UndecidedError(f"no choice of devices was found in {_MAX_TRIES} tries")
            # A selector that fails on a device in use does not end the search.
            if self._is_in_use(picks, pick) or not self._selects(pick):
                continue
            if self._can_take(picks, pick):
                found = self._devices(index, wanted, number + 1, position + 1, [*picks, pick])
                if found is not None:
                    return found
        return None

    def _selects(self, pick: Pick) -> bool:
        key = pick.claim, pick.wanted.name, pick.candidate.id
        if key not in self._selected:
            self._selected[key] = pick.wanted.selects(pick.candidate)
        return self._selected[key]

    def _is_in_use(self, picks: list[Pick], pick: Pick) -> bool:
        own = pick.candidate.id
        if pick.wanted.admin:
            return any(
                other.candidate.id == own and other.claim == pick.claim and not other.is_share
                for other in picks
            )
        return own in self._left.taken or any(
            other.candidate.id == own and not other.is_share for other in picks
        )

    def _can_take(self, picks: list[Pick], pick: Pick) -> bool:
        """Whether a device can be added. Raises: AllocationError if allocationMode All violates a constraint."""
        if self._is_in_use(picks, pick) or not self._counters_suffice(picks, pick):
            return False
        if pick.wanted.untolerated(pick.candidate) is not None:
            return False
        own = [other for other in picks if other.claim == pick.claim]
        for constraint in self._constraints[pick.claim]:
            if not _holds(constraint, [*own, pick]):
                if pick.wanted.count is None:
                    text = f"asks for all devices, but {pick.candidate.name} violates a constraint"
                    raise NoChoiceError(f"request {pick.wanted.name} {text}")
                return False
        if not pick.is_share:
            return True
        device = pick.candidate.id
        chosen = [other.consumes() for other in picks if other.candidate.id == device]
        return fits(pick.candidate.device, [*self._left.shares.get(device, []), *chosen, pick.consumes()])

    def _counters_suffice(self, picks: list[Pick], pick: Pick) -> bool:
        # Counters have no exception for adminAccess: kube-scheduler counts them, kubernetes/kubernetes#140729.
        wanted = dict(pick.candidate.counters)
        if not wanted:
            return True
        held = {}
        for other in picks:
            # The first share of a device consumes its counters, for all shares.
            if not other.is_share or other.candidate.id not in self._left.shares:
                held[other.candidate.id if other.is_share else id(other)] = other.candidate
        own = pick.candidate.id
        if pick.is_share and (own in held or own in self._left.shares):
            return True
        for candidate in held.values():
            for key, amount in candidate.counters.items():
                if key in wanted:
                    wanted[key] += amount
        return all(self._left.counters[key] >= amount for key, amount in wanted.items())


def _held(claim: JsonObject) -> Iterator[DeviceId]:
    for result in allocation_results(claim):
        if not result.get("adminAccess") and not result.get("shareID"):
            yield result["driver"], result["pool"], result["device"]


def all_wanted(devices: JsonObject, classes: Mapping[str, JsonObject]) -> list[list[Wanted]]:
    """Return the alternatives of each request, in order of preference.

    Raises: AllocationError, InvalidConfigError, NotJudgedError.
    """
    return [
        [_wanted(name, body, classes) for name, body in alternatives(request)]
        for request in devices.get("requests") or ()
    ]


def _wanted(name: str, body: JsonObject, classes: Mapping[str, JsonObject]) -> Wanted:
    class_name = body["deviceClassName"]
    if class_name not in classes:
        raise AllocationError(f"request {name}: device class {class_name} does not exist")
    return Wanted(
        name,
        class_name,
        _selectors(classes[class_name].get("spec") or {}),
        _selectors(body),
        None if body.get("allocationMode") == "All" else body.get("count", 1),
        bool(body.get("adminAccess")),
        body.get("tolerations") or (),
        (body.get("capacity") or {}).get("requests") or {},
    )


def _selectors(body: JsonObject) -> tuple[Selector, ...]:
    return tuple(compiled(entry["cel"]["expression"]) for entry in body.get("selectors") or ())


def is_tolerated(taint: Mapping[str, Any], tolerations: Sequence[Mapping[str, Any]]) -> bool:
    if taint.get("effect") == "None":
        return True
    return any(
        toleration.get("effect") in (None, "", taint.get("effect"))
        and toleration.get("key") in (None, "", taint.get("key"))
        and (
            toleration.get("operator") == "Exists"
            or (toleration.get("value") or "") == (taint.get("value") or "")
        )
        for toleration in tolerations
    )


def _holds(constraint: Mapping[str, Any], picks: list[Pick]) -> bool:
    names = constraint.get("requests") or ()
    name = constraint.get("matchAttribute") or constraint["distinctAttribute"]
    domain, _, identifier = name.rpartition("/")
    values = []
    for pick in picks:
        if names and not {pick.wanted.name, pick.wanted.name.partition("/")[0]} & set(names):
            continue
        value = pick.candidate.view.attributes.get(domain, {}).get(identifier)
        if value is None:
            return False
        if isinstance(value, (list, dict)):
            raise AllocationError(
                f"attribute {name} of device {pick.candidate.id[2]} has a type that cannot be compared"
            )
        values.append((type(value), value))
    return len(set(values)) <= 1 if constraint.get("matchAttribute") else len(set(values)) == len(values)


def _allocation(
    claim: JsonObject, picks: list[Pick], classes: Mapping[str, JsonObject], node: str
) -> JsonObject:
    devices: JsonObject = {"results": [_result(pick) for pick in picks]}
    config = [*_class_config(picks, classes)]
    for entry in claim["spec"]["devices"].get("config") or ():
        config.append({"source": "FromClaim", **entry})
    if config:
        devices["config"] = config
    fields = [{"key": "metadata.name", "operator": "In", "values": [node]}]
    return {"devices": devices, "nodeSelector": {"nodeSelectorTerms": [{"matchFields": fields}]}}


def _result(pick: Pick) -> JsonObject:
    driver, pool, device = pick.candidate.id
    result: JsonObject = {"request": pick.wanted.name, "driver": driver, "pool": pool, "device": device}
    if pick.wanted.admin:
        result["adminAccess"] = True
    if pick.is_share:
        result["shareID"] = str(uuid.uuid4())
        result["consumedCapacity"] = dict(pick.consumes())
    if pick.wanted.tolerations:
        result["tolerations"] = [dict(toleration) for toleration in pick.wanted.tolerations]
    return result


def _class_config(picks: list[Pick], classes: Mapping[str, JsonObject]) -> Iterator[JsonObject]:
    for wanted in {pick.wanted.name: pick.wanted for pick in picks}.values():
        for entry in classes[wanted.class_name]["spec"].get("config") or ():
            yield {"source": "FromClass", "requests": [wanted.name], **entry}


def _too_many(count: int) -> str:
    return f"the claim would get {count} devices, but at most {_MAX_RESULTS} are allowed"
