"""Problems of this node as sentences for operators, and the reasons of events.

Each part of the plugin returns its current problems when called. `reporting/node_problems.py` collects them
for events, readiness notes, a metric and the file that `top` reads. So a problem ends when its part no longer
returns it.
"""

from __future__ import annotations

from typing import Final, Literal

from dra_driver.model.claim import ClaimRef
from dra_driver.model.dataclass import dataclass, field

ProblemCode = Literal[
    "check-failed",
    "claim-in-use",
    "claims-failing",
    "cleanup-pending",
    "device-not-published",
    "disk-not-writable",
    "driver-files-missing",
    "foreign-driver",
    "gpu-unresponsive",
    "gpus-unavailable",
    "health-unknown",
    "maintenance-overdue",
    "memory-unclaimed",
    "mps-daemon-failed",
    "mps-host-missing",
    "mps-not-exclusive",
    "mps-users-wait",
    "newer-files",
    "not-registered",
    "nvml-unavailable",
    "partitions-not-supported",
    "passthrough-unavailable",
    "plugin-not-running",
    "scheduler-outdated",
    "setting-changed",
    "setting-lost",
    "slice-fields-dropped",
    "slices-contested",
    "slices-not-published",
    "waiting-for-driver",
]
"""Values of the label `problem` of the metric `nvidia_dra_problems`. They never change, because users alert on them."""
FOUND_BY_TOP: Final = frozenset({"nvml-unavailable", "plugin-not-running"})
"""Problems that only commands such as `top` find; the plugin never returns them."""
FOUND_WITH_POOL: Final[frozenset[ProblemCode]] = frozenset({
    "device-not-published", "partitions-not-supported", "scheduler-outdated", "slice-fields-dropped",
})  # fmt: skip
"""Problems that the publisher finds when it builds and writes the pool. After a restart, those of the previous process
remain until then."""


@dataclass(frozen=True, slots=True)
class NodeProblem:
    """One problem. `subject` names the affected device, claim or path, and is empty for the node as a whole. The
    event that reports the start of the problem is also sent for `claims`.

    `text` is one sentence: what is wrong, with which object, and what to do now. Problems with the same code
    and subject are the same problem, even if the text changes. `since` is the start, in seconds since 1970; 0 if the
    source does not know it.

    >>> NodeProblem("gpu-unresponsive", "GPU gpu-0 has not answered NVML for 40 s; drain and reboot the node", "gpu-0")
    """

    code: ProblemCode
    text: str
    subject: str = ""
    claims: tuple[ClaimRef, ...] = field(default=(), compare=False)
    since: int = 0


@dataclass(frozen=True, slots=True)
class FailingClaim:
    """A claim whose last Prepare or Unprepare failed, `count` times in a row.

    `since` is the first and `last_at` the last failure, in seconds since 1970. `error` is the last error, in
    one line.
    """

    ref: ClaimRef
    operation: Literal["prepare", "unprepare"]
    since: int
    last_at: int
    count: int
    error: str


EventReason = Literal[
    "Prepared", "PrepareFailed", "PrepareSlow", "UnprepareFailed", "ClaimRecovered", "ClaimStillInUse",
    "MpsNeedsRequestNames", "MpsNotExclusive", "MpsUsersWait", "MigDeviceCreated", "MigDeviceDestroyed",
    "MigDestroyDelayed", "MigModeChanged", "MigModeFailed", "CleanupPending", "CleanupDone", "GPUUnhealthy",
    "GPURecovered", "GPUGone", "GPULost", "DriverUnavailable", "DriverAvailable", "SlicesNotPublished",
    "SlicesPublished", "ForeignDriver", "ForeignDriverGone", "DiskNotWritable", "DiskWritable",
    "DriverFilesMissing", "DriverFilesFound", "GPUHealthUnknown", "GPUHealthKnown", "MpsDaemonFailed",
    "MpsDaemonsWork", "MpsHostMissing", "MpsHostRuns", "PassthroughUnavailable", "PassthroughAvailable",
    "SettingChanged", "SettingRight", "SettingLost", "SettingRestored",
    "PluginNotRegistered", "PluginRegistered", "MaintenanceStarted", "MaintenanceOverdue", "MaintenanceEnded",
    "SlicesContested", "SlicesUncontested", "SliceFieldsDropped", "SliceFieldsKept", "DeviceNotPublished",
    "DevicesPublished", "FilesOfNewerRelease", "FilesReadable",
    "MigLayoutApplied", "MigLayoutWaits", "MigLayoutRefused", "MemoryUnclaimed", "MemoryReleased",
    "PartitionsNotSupported", "PartitionsSupported", "SchedulerOutdated", "SchedulerFits",
]  # fmt: skip
"""Users filter events by these reasons, so they never change. `Prepared` is used only for the condition Ready."""

EventObjectKind = Literal["ResourceClaim", "ResourceSlice", "Pod", "Node"]


@dataclass(frozen=True, slots=True)
class EventObject:
    """The object of an event; `namespace` is empty if it is cluster-scoped."""

    kind: EventObjectKind
    name: str
    uid: str
    namespace: str = ""


def claim_object(ref: ClaimRef) -> EventObject:
    """Return a claim as the object of an event."""
    return EventObject("ResourceClaim", ref.name, ref.uid, ref.namespace)


def node_object(name: str) -> EventObject:
    """Return a node as the object of an event.

    The name is also used as the UID, as in the kubelet's own events: `kubectl describe node` searches for
    both, and the UID of the Node object does not identify the machine.
    """
    return EventObject("Node", name, name)
