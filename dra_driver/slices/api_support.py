"""Finds out which slice fields the API server accepts and stores, and what can be published without the others.

Servers silently drop fields whose feature gate is off, and older servers reject newer fields. So the plugin tests the
server with dry runs: at the start, after a rejected slice, and hourly while a feature is missing. It also compares the
responses to writes, because several servers may differ.

Compatibility groups are published only while an hourly test shows that the server keeps them in a new slice: if the
gate was switched off, the server keeps groups in existing slices, and the scheduler skips every device that has them.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable

import structlog

from dra_driver.errors import ApiRejectedError, ApiUnavailableError
from dra_driver.kube.client import ApiClient
from dra_driver.kube.cluster import server_version
from dra_driver.mig.rules.counters import is_counted
from dra_driver.model.dataclass import dataclass, replace
from dra_driver.model.inventory import Inventory
from dra_driver.model.schema import JsonObject
from dra_driver.model.sharing import SharingPolicy
from dra_driver.slices.rules.build import NEWEST_TAINTS, OLDEST_TAINTS, Pool, SliceContent, TaintLimits
from dra_driver.slices.rules.diff import (
    GROUPS_GATE,
    PARTITIONS_GATE,
    SHARES_GATE,
    TAINTS_GATE,
    Drop,
    Owner,
    dropped_fields,
    slice_changes,
)

_log = structlog.get_logger(__name__)


_RECHECK_AFTER_S = 3600.0
_UNKNOWN_AGAIN_S = 60.0
_INVALID = 422
_COUNTS_SHARES = (1, 36, 2)
"""The first Kubernetes release whose scheduler counts the counters that shares consume; no 1.35 release does."""
_NUMBERS = re.compile(r"v?(\d+)\.(\d+)\.(\d+)")
_DISPENSABLE = frozenset({TAINTS_GATE, SHARES_GATE})
_REMEDY = (
    f"use Kubernetes 1.36 or newer, where the feature gate {PARTITIONS_GATE} is on by default, or 1.35 with the gate"
    " switched on in the API server and the scheduler"
)
_COUNTERS: JsonObject = {"memory": {"value": "1Gi"}}
_SET: JsonObject = {"name": "probe", "counters": _COUNTERS}
_COUNTED: JsonObject = {
    "name": "probe",
    "consumesCounters": [{"counterSet": "probe", "counters": _COUNTERS}],
}
_GROUPED: JsonObject = {
    "name": "probe",
    "consumesCounters": [{**_COUNTED["consumesCounters"][0], "compatibilityGroups": ["probe"]}],
}
_SHARED: JsonObject = {
    "name": "probe",
    "allowMultipleAllocations": True,
    "capacity": {"memory": {"value": "1Gi", "requestPolicy": {"default": "1Gi", "validValues": ["1Gi"]}}},
}


@dataclass(frozen=True, slots=True)
class Support:
    """What an API server accepts and stores. It drops the fields of the feature gates in `missing`.

    `no_partitions` is a sentence with the remedy.
    """

    missing: frozenset[str] = frozenset()
    taints: TaintLimits = NEWEST_TAINTS
    no_partitions: str | None = None
    keeps_groups: bool = False


def ask_support(api: ApiClient, owner: Owner, known: Support, *, partitions: bool) -> Support:
    """Test the API server with dry runs. If it rejects the test of taints and shares, `known` stays for these.

    Raises: ApiUnavailableError; with `partitions`, ApiRejectedError (permissions, admission).
    """
    missing, limits = _device_fields(api, owner) or (known.missing, known.taints)
    problem = partitions_problem(api, owner) if partitions else None
    keeps_groups = partitions and problem is None and _keeps_groups(api, owner)
    return Support(missing, limits, problem, keeps_groups)


def _device_fields(api: ApiClient, owner: Owner) -> tuple[frozenset[str], TaintLimits] | None:
    for limits in (NEWEST_TAINTS, OLDEST_TAINTS):
        effects = ["NoSchedule"] * limits.most + ["None"] * limits.informational
        taints = [{"key": f"probe-{i}", "effect": effect} for i, effect in enumerate(effects[-limits.most :])]
        content = SliceContent(devices=(_SHARED | {"taints": taints},))
        try:
            lost = _lost_in_trial(
                api, owner, "check whether the API server supports taints and shares of devices", content
            )
        except ApiRejectedError as error:
            _log.debug("dry_run_refused", reason=str(error))
            return None
        if not isinstance(lost, ApiRejectedError):
            return _DISPENSABLE & {gate for _, gate in lost}, limits
    return None


def partitions_problem(api: ApiClient, owner: Owner) -> str | None:
    """Return why the API server does not support partitionable devices, as a sentence with the remedy.

    Up to Kubernetes 1.34 the server rejects counter sets and devices in separate slices. Raises: ApiUnavailableError;
    ApiRejectedError (permissions, admission).
    """
    contents = (SliceContent(shared_counters=(_SET,)), SliceContent(devices=(_COUNTED,)))
    lost = _lost_in_trial(
        api, owner, "check whether the API server supports partitionable devices", *contents
    )
    if isinstance(lost, ApiRejectedError):
        return f"the API server refuses counters in a separate slice ({lost}); {_REMEDY}"
    return _drops_counters(lost) if lost else None


def _keeps_groups(api: ApiClient, owner: Owner) -> bool:
    content = SliceContent(devices=(_GROUPED,))
    return not _lost_in_trial(
        api, owner, "check whether the API server supports compatibility groups of devices", content
    )


def _drops_counters(lost: Iterable[Drop]) -> str:
    paths = ", ".join(path for path, _ in lost)
    return f"the API server drops {paths} of a slice: its feature gate {PARTITIONS_GATE} is off; {_REMEDY}"


def _lost_in_trial(
    api: ApiClient, owner: Owner, action: str, *contents: SliceContent
) -> tuple[Drop, ...] | ApiRejectedError:
    """Return the fields that the API server drops, or the error for an invalid slice."""
    try:
        for sent in slice_changes(Pool(owner.node_name, contents), (), owner).creates:
            stored = api.call("POST", "resourceslices", query={"dryRun": "All"}, body=sent, action=action)
            lost = dropped_fields(sent, stored)
            if lost:
                return lost
    except ApiRejectedError as error:
        if error.status != _INVALID:
            raise
        return error
    return ()


def sharing_caution(client: ApiClient) -> str | None:
    """Return why this cluster allocates shares of devices with counters wrongly, as a sentence with the remedy.

    Raises: ApiUnavailableError.
    """
    try:
        release = server_version(client)
    except ApiRejectedError:
        return None
    found = _NUMBERS.match(release)
    if found is None or tuple(map(int, found.groups())) >= _COUNTS_SHARES:
        return None
    return (
        f"the scheduler of Kubernetes {release} ignores the counters that shared devices use and may allocate the same "
        "part of a GPU twice, so that pods cannot start; upgrade to 1.36.2 or newer, or exclude GPUs with "
        "MIG devices on demand from the sharing rules"
    )


def shares_counters(inventory: Inventory, sharing: SharingPolicy) -> bool:
    return any(
        sharing.rule_for(device) for device in inventory.devices() if is_counted(device.gpu, inventory)
    )


@dataclass(eq=False)
class ApiSupport:
    """Remembers what the server accepts and stores, from dry runs and from its responses to writes.

    Only the publisher's thread uses it, but any thread may read its properties and `caution` (`sharing_caution`).
    """

    api: ApiClient
    sharing: SharingPolicy
    has_budget: bool = False
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._known = Support()
        self._asked_at = -math.inf
        self._is_asked = False
        self._knows_counting = False  # whether partitions were tested
        self._caution: str | None = None
        self._is_release_unknown = False
        self.caution: str | None = None
        self._matters = False  # whether any devices need counters
        self._stored_otherwise: dict[
            str, tuple[JsonObject, JsonObject]
        ] = {}  # specs sent and stored, by name

    @property
    def problem(self) -> str | None:
        return self._known.no_partitions if self._matters else None

    @property
    def drops_taints(self) -> bool:
        return TAINTS_GATE in self._known.missing

    @property
    def ask_at(self) -> float:
        known = self._known
        if self._is_release_unknown:
            return self._asked_at + _UNKNOWN_AGAIN_S
        may_change = known.missing or self.problem or self._caution or known.keeps_groups
        return self._asked_at + _RECHECK_AFTER_S if may_change else math.inf

    def of(self, inventory: Inventory, owner: Owner) -> Support:
        """Return what the server accepts and stores. Raises as `ask_support`; nothing must be published then."""
        self._matters = (
            self.has_budget
            or bool(inventory.cards_by_gpu)
            or any(gpu.partitioning is not None and gpu.partitioning.possible for gpu in inventory.gpus)
        )
        is_new = self._matters and not self._knows_counting
        if is_new or not self._is_asked or self.clock() >= self.ask_at:
            before = self._known
            known = self._ask(before, owner)
            counts = self._matters and known.no_partitions is None
            self._learn_caution(counts and bool(self.sharing.entries))
            self._known, self._knows_counting = known, self._matters
            self._asked_at, self._is_asked = self.clock(), True
            if before.missing - self._known.missing:
                _log.info("slice_fields_accepted", gates=sorted(before.missing - self._known.missing))
        shares = self._caution is not None and shares_counters(inventory, self.sharing)
        self.caution = self._caution if shares else None
        return self._known

    def refused(self, error: Exception) -> None:
        """After an invalid slice, test again before the next write, with only taints that every server accepts.

        The server may have been downgraded, or one of several servers may be older.
        """
        if isinstance(error, ApiRejectedError) and error.status == _INVALID:
            self._is_asked, self._known = False, replace(self._known, taints=OLDEST_TAINTS)

    def stored(self, sent: JsonObject, stored: JsonObject) -> tuple[Drop, ...]:
        """Return the fields that the server dropped or changed in its response to a write.

        Fields whose gate is off are not sent until a test shows that the server stores them; other changed fields only
        if the slice no longer matches the response.
        """
        name = stored["metadata"]["name"]
        dropped = dropped_fields(sent, stored)
        gates = {gate for _, gate in dropped}
        otherwise = {other: specs for other, specs in self._stored_otherwise.items() if other != name}
        if gates - _DISPENSABLE - {PARTITIONS_GATE, GROUPS_GATE}:
            otherwise[name] = (sent["spec"], stored["spec"])
        self._stored_otherwise = otherwise
        if gates & (_DISPENSABLE | {PARTITIONS_GATE}):
            self._asked_at = self.clock()
            self._known = replace(self._known, missing=self._known.missing | (gates & _DISPENSABLE))
        if GROUPS_GATE in gates:
            self._known = replace(self._known, keeps_groups=False)
        if PARTITIONS_GATE in gates:
            self._known = replace(self._known, no_partitions=_drops_counters(dropped))
        return dropped

    @property
    def altered(self) -> tuple[str, ...]:
        """Names of the slices that the server stores differently for an unknown reason."""
        return tuple(self._stored_otherwise)

    def as_sent(self, existing: Iterable[JsonObject]) -> list[JsonObject]:
        """Return all slices; those that the server stored differently, and that are unchanged since, as they were
        sent.
        """
        present = {entry["metadata"]["name"]: entry for entry in existing}
        self._stored_otherwise = {
            name: (sent, stored)
            for name, (sent, stored) in self._stored_otherwise.items()
            if name in present and present[name]["spec"] == stored
        }
        return [
            {**entry, "spec": self._stored_otherwise[name][0]} if name in self._stored_otherwise else entry
            for name, entry in present.items()
        ]

    def _learn_caution(self, matters: bool) -> None:
        """Keep the last answer if there is none: a missing warning must not prevent publishing."""
        was_unknown, self._is_release_unknown = self._is_release_unknown, False
        try:
            self._caution = self._ask_caution() if matters else None
        except ApiUnavailableError as error:
            self._is_release_unknown = True
            if not was_unknown:
                _log.warning("scheduler_release_unknown", reason=str(error))

    def _ask(self, known: Support, owner: Owner) -> Support:
        return ask_support(self.api, owner, known, partitions=self._matters)

    def _ask_caution(self) -> str | None:
        return sharing_caution(self.api)
