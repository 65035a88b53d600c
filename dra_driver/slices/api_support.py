"""What this cluster's API server can take of the slices, and what is published where it cannot.

Partitions: a MIG device that is made on demand is only safe to offer with counters. A server that drops them would let
the scheduler give the same part of a GPU out many times. So the server is asked before the first such device is
published.

Taints without an effect: Kubernetes takes them from 1.35 on; older servers refuse the whole slice.
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


def partitions_problem(api: ResourceApi, owner: Owner) -> str | None:
    """Why the API server cannot count partitions, as one sentence with the remedy; None if it can.

    It is asked to create the two slices of a partitioned pool, counter sets and devices apart, as a dry run: nothing is
    written. Until Kubernetes 1.34 both had to be in one slice, so the server refuses this. Where the feature gate is
    off, it takes the slices and drops the fields.
    Raises: ApiUnavailableError; ApiRejectedError if it refuses to be asked (permissions, admission).
    """
    contents = (SliceContent(shared_counters=(_SET,)), SliceContent(devices=(_DEVICE,)))
    trial = slice_changes(Pool(owner.node_name, contents), (), owner)
    for sent in trial.creates:
        try:
            stored = api.call(
                "POST",
                "resourceslices",
                query={"dryRun": "All"},
                body=sent,
                action="ask the API server for partitionable devices",
            )
        except ApiRejectedError as error:
            if error.status != _INVALID:
                raise
            return f"the API server refuses counters in a slice of their own ({error}); {_REMEDY}"
        lost = [path for path, _ in dropped_fields(sent, stored)]
        if lost:
            why = f"the API server drops {', '.join(lost)} of a slice: its feature gate {PARTITIONS_GATE} is off"
            return f"{why}; {_REMEDY}"
    return None


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


def takes_effect_none(client: ApiClient) -> bool:
    """Whether the server takes taints without an effect. One that does not tell its release is taken for a new one.

    Raises: ApiUnavailableError if it does not answer.
    """
    try:
        return kubernetes_releases.takes_effect_none(server_version(client))
    except ApiRejectedError:
        return True


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


class InformationalTaints:
    """Remembers whether the server takes taints without an effect.

    `ask` is called once, and again while the server does not answer and after it refused a slice as invalid: it may
    have been downgraded, or one of several servers may be older. For the publisher's thread.
    """

    def __init__(self, ask: Callable[[], bool]) -> None:
        self._ask = ask
        self._supported: bool | None = None

    def supported(self) -> bool:
        """Whether such taints may be sent. Raises: ApiUnavailableError."""
        if self._supported is None:
            self._supported = self._ask()
        return self._supported

    def publish_failed(self, error: Exception) -> None:
        """Slices could not be written."""
        if isinstance(error, ApiRejectedError) and error.status == _INVALID:
            self._supported = None
