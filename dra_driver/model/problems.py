"""Problems of this node, and the reasons of events.

Each part of the plugin returns its current problems when called, so a problem ends when its part no longer
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
"""Users alert on these values of a metric's label, so they never change."""
FOUND_BY_TOP: Final = frozenset({"nvml-unavailable", "plugin-not-running"})
"""The plugin never returns these."""
FOUND_WITH_POOL: Final[frozenset[ProblemCode]] = frozenset({
    "device-not-published", "partitions-not-supported", "scheduler-outdated", "slice-fields-dropped",
})  # fmt: skip
"""The publisher finds these when it writes the pool. After a restart, those of the previous process remain
until then.
"""


@dataclass(frozen=True, slots=True)
class NodeProblem:
    """`subject` names the device, claim or path, and is empty for the node. Problems with the same code and
    subject are the same, whatever the text. The start is also reported on `claims`.

    `text` says what is wrong, with which object, and what to do now. `since` is in seconds since 1970; 0 if
    unknown.

    >>> NodeProblem("gpu-unresponsive", "GPU gpu-0 has not answered NVML for 40 s; drain and reboot the node", "gpu-0")
    """

    code: ProblemCode
    text: str
    subject: str = ""
    claims: tuple[ClaimRef, ...] = field(default=(), compare=False)
    since: int = 0


@dataclass(frozen=True, slots=True)
class FailingClaim:
    """The operation failed `count` times in a row, from `since` to `last_at` (seconds since 1970)."""

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
"""Users filter by these, so they never change. `Prepared` is only for the condition Ready."""

EventObjectKind = Literal["ResourceClaim", "ResourceSlice", "Pod", "Node"]


@dataclass(frozen=True, slots=True)
class EventObject:
    """`namespace` is empty if the object is cluster-scoped."""

    kind: EventObjectKind
    name: str
    uid: str
    namespace: str = ""


def claim_object(ref: ClaimRef) -> EventObject:
    return EventObject("ResourceClaim", ref.name, ref.uid, ref.namespace)


def node_object(name: str) -> EventObject:
    """Use the name as the UID, as the kubelet does: `kubectl describe node` searches for both, and the UID of
    the Node object does not identify the machine.
    """
    return EventObject("Node", name, name)
