"""What users see: problems of this node, in sentences for operators, and the reasons of events.

Each part of the plugin that can be in trouble returns its problems whenever it is called. `reporting/node_problems.py`
calls them all and turns what it gets into events, readiness notes, a metric and the file that `top` reads. So a problem
ends when its part stops returning it, and never because some other thing happened.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from dra_driver.model.claim import ClaimRef

ProblemCode = Literal[
    "check-failed",
    "claims-failing",
    "disk-not-writable",
    "driver-files-missing",
    "foreign-driver",
    "gpu-unresponsive",
    "gpus-unavailable",
    "health-unknown",
    "mps-daemon-failed",
    "mps-host-missing",
    "not-registered",
    "nvml-unavailable",
    "passthrough-unavailable",
    "plugin-not-running",
    "slices-not-published",
    "waiting-for-driver",
]
"""The label `problem` of the metric `nvidia_dra_problems`; users write alerts with it, so it keeps its words."""
FOUND_BY_TOP: Final = frozenset({"nvml-unavailable", "plugin-not-running"})
"""What the plugin cannot report of itself."""


@dataclass(frozen=True, slots=True)
class NodeProblem:
    """One problem. `subject` names the device, claim or path that has it, and is empty for the node as a whole.

    `text` is one sentence: what is wrong, with which object, and what to do now. Two problems with the same code and
    subject are the same problem, even if the text changes.

    >>> NodeProblem("gpu-unresponsive", "GPU gpu-0 has not answered NVML for 40 s; drain and reboot the node", "gpu-0")
    """

    code: ProblemCode
    text: str
    subject: str = ""


@dataclass(frozen=True, slots=True)
class ShownProblem:
    """A problem, and since when it has lasted, in seconds since 1970."""

    problem: NodeProblem
    since: int


@dataclass(frozen=True, slots=True)
class FailingClaim:
    """A claim whose last Prepare or Unprepare failed: `count` times in a row, since `since`, last at `last_at`, both in
    seconds since 1970. `error` is the last error, in one line."""

    ref: ClaimRef
    operation: Literal["prepare", "unprepare"]
    since: int
    last_at: int
    count: int
    error: str


# Reasons of events and of the condition Ready; users filter by them, so they never change.
PREPARED: Final = "Prepared"
PREPARE_FAILED: Final = "PrepareFailed"
PREPARE_SLOW: Final = "PrepareSlow"
UNPREPARE_FAILED: Final = "UnprepareFailed"
CLAIM_RECOVERED: Final = "ClaimRecovered"
CLAIM_STILL_IN_USE: Final = "ClaimStillInUse"
MPS_NEEDS_REQUEST_NAMES: Final = "MpsNeedsRequestNames"
MPS_NOT_EXCLUSIVE: Final = "MpsNotExclusive"
MPS_USERS_WAIT: Final = "MpsUsersWait"
MIG_DEVICE_CREATED: Final = "MigDeviceCreated"
MIG_DEVICE_DESTROYED: Final = "MigDeviceDestroyed"
MIG_DESTROY_DELAYED: Final = "MigDestroyDelayed"
MIG_MODE_CHANGED: Final = "MigModeChanged"
MIG_MODE_FAILED: Final = "MigModeFailed"
CLEANUP_PENDING: Final = "CleanupPending"
CLEANUP_DONE: Final = "CleanupDone"
GPU_UNHEALTHY: Final = "GPUUnhealthy"
GPU_RECOVERED: Final = "GPURecovered"
GPU_GONE: Final = "GPUGone"
GPU_LOST: Final = "GPULost"
DRIVER_UNAVAILABLE: Final = "DriverUnavailable"
DRIVER_AVAILABLE: Final = "DriverAvailable"
SLICES_NOT_PUBLISHED: Final = "SlicesNotPublished"
SLICES_PUBLISHED: Final = "SlicesPublished"
FOREIGN_DRIVER: Final = "ForeignDriver"
FOREIGN_DRIVER_GONE: Final = "ForeignDriverGone"
DISK_NOT_WRITABLE: Final = "DiskNotWritable"
DISK_WRITABLE: Final = "DiskWritable"
DRIVER_FILES_MISSING: Final = "DriverFilesMissing"
DRIVER_FILES_FOUND: Final = "DriverFilesFound"
GPU_HEALTH_UNKNOWN: Final = "GPUHealthUnknown"
GPU_HEALTH_KNOWN: Final = "GPUHealthKnown"
MPS_DAEMON_FAILED: Final = "MpsDaemonFailed"
MPS_DAEMONS_WORK: Final = "MpsDaemonsWork"
MPS_HOST_MISSING: Final = "MpsHostMissing"
MPS_HOST_RUNS: Final = "MpsHostRuns"
PASSTHROUGH_UNAVAILABLE: Final = "PassthroughUnavailable"
PASSTHROUGH_AVAILABLE: Final = "PassthroughAvailable"
PLUGIN_NOT_REGISTERED: Final = "PluginNotRegistered"
PLUGIN_REGISTERED: Final = "PluginRegistered"
SLICES_CONTESTED: Final = "SlicesContested"
SLICE_FIELDS_DROPPED: Final = "SliceFieldsDropped"
DEVICE_NOT_PUBLISHED: Final = "DeviceNotPublished"
MIG_LAYOUT_APPLIED: Final = "MigLayoutApplied"
MIG_LAYOUT_WAITS: Final = "MigLayoutWaits"
MIG_LAYOUT_REFUSED: Final = "MigLayoutRefused"
MEMORY_UNCLAIMED: Final = "MemoryUnclaimed"
PARTITIONS_NOT_SUPPORTED: Final = "PartitionsNotSupported"
SCHEDULER_OUTDATED: Final = "SchedulerOutdated"

EventObjectKind = Literal["ResourceClaim", "ResourceSlice", "Pod", "Node"]


@dataclass(frozen=True, slots=True)
class EventObject:
    """What an event is about; `namespace` is empty for what is cluster-scoped."""

    kind: EventObjectKind
    name: str
    uid: str
    namespace: str = ""


def claim_object(ref: ClaimRef) -> EventObject:
    """A claim as the object of an event."""
    return EventObject("ResourceClaim", ref.name, ref.uid, ref.namespace)


def node_object(name: str) -> EventObject:
    """A node as the object of an event. Its name stands for its UID, as in the kubelet's own events:
    `kubectl describe node` looks for both, and the UID of the Node object says nothing about the machine."""
    return EventObject("Node", name, name)
