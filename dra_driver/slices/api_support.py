"""What this cluster's API server can take of the slices, and what is published where it cannot.

Partitions: a MIG device that is made on demand is only safe to offer with counters. A server that drops them would let
the scheduler give the same part of a GPU out many times. So the server is asked before the first such device is
published.

Taints: older servers take fewer of them, and refuse the whole slice for one without an effect. A server whose feature
gate is off drops all of them, so a device that must not be given out can only be withdrawn there.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any

import structlog

from dra_driver.errors import ApiRejectedError, DraDriverError
from dra_driver.kube.client import ApiClient
from dra_driver.kube.cluster import server_version
from dra_driver.kube.versions import ResourceApi
from dra_driver.mig.rules.counters import has_counters
from dra_driver.model.inventory import Inventory
from dra_driver.model.sharing import SharingPolicy
from dra_driver.slices.rules import kubernetes_releases
from dra_driver.slices.rules.build import Pool, SliceContent
from dra_driver.slices.rules.diff import Owner, slice_changes
from dra_driver.slices.rules.dropped_fields import PARTITIONS_GATE, dropped_fields
from dra_driver.slices.rules.kubernetes_releases import NEWEST_TAINTS, OLDEST_TAINTS, TaintLimits

_log = structlog.get_logger(__name__)

_ASK_AGAIN_S = 3600.0
_INVALID = 422
_REMEDY = (
    f"use Kubernetes 1.36 or newer, where the feature gate {PARTITIONS_GATE} is on unless it is switched off, or 1.35"
    " with it switched on, in API server and scheduler"
)
_COUNTERS: dict[str, Any] = {"memory": {"value": "1Gi"}}
_SET: dict[str, Any] = {"name": "probe", "counters": _COUNTERS}
_DEVICE: dict[str, Any] = {
    "name": "probe",
    "consumesCounters": [{"counterSet": "probe", "counters": _COUNTERS}],
}
_TAINTED: dict[str, Any] = {"name": "probe", "taints": [{"key": "probe", "effect": "NoSchedule"}]}


def partitions_problem(api: ResourceApi, owner: Owner) -> str | None:
    """Why the API server cannot count partitions, as one sentence with the remedy; None if it can.

    It is asked to create the two slices of a partitioned pool, counter sets and devices apart, as a dry run: nothing is
    written. Until Kubernetes 1.34 both had to be in one slice, so the server refuses this. Where the feature gate is
    off, it takes the slices and drops the fields.
    Raises: ApiUnavailableError; ApiRejectedError if it refuses to be asked (permissions, admission).
    """
    contents = (SliceContent(shared_counters=(_SET,)), SliceContent(devices=(_DEVICE,)))
    try:
        lost = _lost_in_trial(api, owner, contents, "ask the API server for partitionable devices")
    except ApiRejectedError as error:
        if error.status != _INVALID:
            raise
        return f"the API server refuses counters in a slice of their own ({error}); {_REMEDY}"
    if lost:
        why = f"the API server drops {', '.join(lost)} of a slice: its feature gate {PARTITIONS_GATE} is off"
        return f"{why}; {_REMEDY}"
    return None


def keeps_taints(api: ResourceApi, owner: Owner) -> bool | None:
    """Whether the API server stores the taints of devices. It is asked to create a slice with one, as a dry run.

    None if it refuses to be asked (permissions, admission).
    Raises: ApiUnavailableError.
    """
    try:
        return not _lost_in_trial(
            api, owner, (SliceContent(devices=(_TAINTED,)),), "ask the API server for taints of devices"
        )
    except ApiRejectedError as error:
        _log.debug("taints_not_asked", reason=str(error))
        return None


def _lost_in_trial(
    api: ResourceApi, owner: Owner, contents: tuple[SliceContent, ...], action: str
) -> list[str]:
    """The fields that the API server would drop of the first such slices, each asked about until one loses some."""
    for sent in slice_changes(Pool(owner.node_name, contents), (), owner).creates:
        stored = api.call("POST", "resourceslices", query={"dryRun": "All"}, body=sent, action=action)
        lost = [path for path, _ in dropped_fields(sent, stored)]
        if lost:
            return lost
    return []


def sharing_caution(client: ApiClient) -> str | None:
    """Why shares of devices with counters are given out wrongly in this cluster, as one sentence with the remedy.

    None also where the release cannot be told: a missing warning must not keep slices from being published.
    """
    try:
        return kubernetes_releases.sharing_caution(server_version(client))
    except DraDriverError:
        return None


def shares_counters(inventory: Inventory, sharing: SharingPolicy) -> bool:
    """Whether a device with counters may be shared by claims."""
    return any(sharing.rule_for(device) for device in inventory.devices() if has_counters(device.gpu))


def taint_limits(client: ApiClient) -> TaintLimits | None:
    """What the server takes of taints, by its release; None if it does not tell that.

    Raises: ApiUnavailableError if it does not answer.
    """
    try:
        return kubernetes_releases.taint_limits(server_version(client))
    except ApiRejectedError:
        return None


class PartitionSupport:
    """Remembers whether the server can count partitions.

    `ask` answers why it cannot, None if it can; `tell` gets that reason each time that support is found missing anew.
    `caution` answers what is wrong with counters for these devices on a server that keeps them, if anything. It is
    asked each time that support is found anew, and `warn` gets what it says.

    For the publisher's thread; any thread may read `problem`.
    """

    def __init__(
        self,
        ask: Callable[[], str | None],
        tell: Callable[[str], None],
        *,
        caution: Callable[[Inventory], str | None],
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask_server = ask
        self._tell = tell
        self._caution = caution
        self._warn = warn
        self._clock = clock
        self._lock = threading.Lock()
        self._is_needed = False
        self._supported: bool | None = None
        self._problem: str | None = None
        self._asked_at = 0.0

    @property
    def problem(self) -> str | None:
        """Why MIG devices on demand are not offered; None where they are, or where none could be."""
        return self._problem if self._is_needed else None

    @property
    def ask_at(self) -> float:
        """When the server should be asked again, as the clock tells it; infinity if there is no need."""
        with self._lock:
            waits = self._is_needed and self._supported is False
            return self._asked_at + _ASK_AGAIN_S if waits else math.inf

    def usable(self, inventory: Inventory) -> Inventory:
        """The inventory as this server can take it.

        Raises: as `ask`, if the server does not answer; nothing must be published then.
        """
        with self._lock:
            self._is_needed = any(
                gpu.partitioning is not None and gpu.partitioning.possible for gpu in inventory.gpus
            )
            if not self._is_needed:
                return inventory
            overdue = not self._supported and self._clock() - self._asked_at >= _ASK_AGAIN_S
            if self._supported is None or overdue:
                self._ask(inventory)
            return inventory if self._supported else inventory.without_partitions()

    def fields_dropped(self) -> None:
        """The server dropped counters from a slice although it promised to keep them: ask it again."""
        with self._lock:
            self._supported = None

    def _ask(self, inventory: Inventory) -> None:
        problem = self._ask_server()
        concern = self._caution(inventory) if problem is None else None
        self._asked_at = self._clock()
        was_missing = self._supported is False
        self._supported, self._problem = problem is None, problem
        if problem is None:
            _log.info("partitions_supported")
            if concern is not None:
                _log.warning("scheduler_outdated", reason=concern)
                self._warn(concern)
        elif not was_missing:
            _log.warning("partitions_not_supported", reason=problem)
            self._tell(problem)


class TaintSupport:
    """Remembers what the server does with taints. For the publisher's thread; any thread may read `dropped`.

    `limits` is called once, and again while the server does not answer and after it refused a slice as invalid: it may
    have been downgraded, or one of several servers may be older. `keeps` is called when it first matters, and each hour
    while the answer was no.
    """

    def __init__(
        self,
        limits: Callable[[], TaintLimits | None],
        keeps: Callable[[], bool | None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask_limits = limits
        self._ask_keeps = keeps
        self._clock = clock
        self._limits: TaintLimits | None = None
        self._was_refused = False
        self._keeps: bool | None = None
        self._asked_at = 0.0
        self._matters = False

    @property
    def dropped(self) -> bool:
        """Whether the server is known to drop taints."""
        return self._keeps is False

    @property
    def ask_at(self) -> float:
        """When the server should be asked again, as the clock tells it; infinity if there is no need."""
        return self._asked_at + _ASK_AGAIN_S if self._matters and self.dropped else math.inf

    def limits(self) -> TaintLimits:
        """What may be sent. A server that does not tell its release is taken for a new one until it refuses a slice.
        Raises: ApiUnavailableError."""
        if self._limits is None:
            unknown = OLDEST_TAINTS if self._was_refused else NEWEST_TAINTS
            self._limits = self._ask_limits() or unknown
        return self._limits

    def drops(self, *, matters: bool) -> bool:
        """Whether devices are not kept from pods by their taints; `matters` says whether there are such taints now.
        Raises: ApiUnavailableError."""
        self._matters = matters
        if not matters:
            return self.dropped
        overdue = not self._keeps and self._clock() - self._asked_at >= _ASK_AGAIN_S
        if self._keeps is None or overdue:
            answer = self._ask_keeps()
            # A server that does not tell is taken for one that keeps them, until it drops some.
            self._keeps = answer if answer is not None else self._keeps is not False
            self._asked_at = self._clock()
        return self.dropped

    def fields_dropped(self) -> None:
        """The server dropped taints of a slice."""
        self._keeps, self._asked_at = False, self._clock()

    def publish_failed(self, error: Exception) -> None:
        """Slices could not be written."""
        if isinstance(error, ApiRejectedError) and error.status == _INVALID:
            self._limits, self._was_refused = None, True
