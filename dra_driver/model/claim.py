"""The parts of a ResourceClaim that a node driver reads, the driver's responses to the kubelet, and the claim's
`status.devices`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Final, Literal

from dra_driver.model.dataclass import dataclass, field
from dra_driver.model.host import HostDevice, ImexChannels
from dra_driver.model.ids import is_subdomain, is_uid
from dra_driver.model.mig import Placement
from dra_driver.model.mps import SharingMode

_MAX_PODS: Final = 256
"""The API's limit for the pods of one claim."""


@dataclass(frozen=True, slots=True)
class ClaimRef:
    """A claim as the kubelet names it in NodePrepareResources and NodeUnprepareResources."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name} (UID {self.uid})"


@dataclass(frozen=True, slots=True)
class PodRef:
    """A pod that a claim is reserved for, in the claim's namespace."""

    name: str
    uid: str


Pods = tuple[PodRef, ...] | None
"""All pods that a claim is reserved for, in the API server's order; None if unknown."""


def allocation_results(claim: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the devices of a claim's allocation, as in resource.k8s.io/v1; empty if the claim is not allocated."""
    allocation = (claim.get("status") or {}).get("allocation") or {}
    return list((allocation.get("devices") or {}).get("results") or ())


def pods_from(entries: Iterable[Any]) -> Pods:
    """Return the first 256 pods of `entries`, which should be objects with `name` and `uid`; None if any
    entry is invalid.

    Pods are only shown to people, so a bad entry must not fail the claim, and must not reach a terminal.
    """
    pods = tuple(_pod_from(entry) for entry in islice(entries, _MAX_PODS))
    known = tuple(pod for pod in pods if pod is not None)
    return known if len(known) == len(pods) else None


def _pod_from(entry: Any) -> PodRef | None:
    if not isinstance(entry, Mapping):
        return None
    name, uid = entry.get("name"), entry.get("uid")
    if not isinstance(name, str) or not isinstance(uid, str):
        return None
    return PodRef(name, uid) if is_subdomain(name) and is_uid(uid) else None


@dataclass(frozen=True, slots=True)
class DeviceResult:
    """One entry of `status.allocation.devices.results`.

    `request` is the full name, `request` or `request/subrequest`; `consumed_capacity` maps capacity names to
    quantities as the scheduler wrote them.
    """

    request: str
    driver: str
    pool: str
    device: str
    admin_access: bool = False
    share_id: str | None = None
    consumed_capacity: Mapping[str, str] = field(default_factory=dict)

    @property
    def base_request(self) -> str:
        """The top-level request name, by which the kubelet finds the containers of a request."""
        return self.request.partition("/")[0]


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """One entry of `status.allocation.devices.config`; `driver` is None if the entry is not opaque.

    Equality ignores `requests`: an allocation never changes, and older records lack the request names.
    """

    source: Literal["FromClass", "FromClaim"]
    requests: tuple[str, ...] = field(compare=False)
    driver: str | None
    parameters: Any = None


ReportedDevice = tuple[str, str, str, str | None]
"""Driver, pool, device and share ID of an entry in a claim's `status.devices`."""


@dataclass(frozen=True, slots=True)
class AllocatedClaim:
    """A claim with its allocation: results and configs of all drivers, in the API server's order.

    `pod_claim_name` is the name in the pod's spec if the claim was created from a template. When the claim was
    last read, it was reserved for `pods`, and its status had the devices in `reported`; both are None if unknown.
    These three are not part of the allocation, so equality ignores them.
    """

    ref: ClaimRef
    results: tuple[DeviceResult, ...]
    configs: tuple[DeviceConfig, ...] = ()
    pod_claim_name: str | None = field(default=None, compare=False)
    pods: Pods = field(default=None, compare=False)
    reported: frozenset[ReportedDevice] | None = field(default=None, compare=False)


DeviceKind = Literal["gpu", "mig", "vfio"]


@dataclass(frozen=True, slots=True)
class HeldDevice:
    """A device that a claim holds. `gpu_uuid` is the physical GPU's UUID, `uuid` the device's own.

    `usage` is how the claim shares the device. A MIG device on demand has an empty `uuid`, because it gets a new
    UUID each time it is created. Only these devices have a `placement`, that of their GPU instance.
    `imex` and `host_devices` are additions for the claim's containers.
    """

    device: str
    kind: DeviceKind
    uuid: str
    gpu_uuid: str
    admin_access: bool = False
    share_id: str | None = None
    usage: SharingMode = None
    placement: Placement | None = None
    imex: ImexChannels | None = None
    host_devices: tuple[HostDevice, ...] = ()


@dataclass(frozen=True, slots=True)
class ClaimNow:
    """The claim that the API server currently has under a name; its devices may belong to any driver.

    `allocated` has the driver, pool and device of each result; None if not allocated. `reported` is as in
    `AllocatedClaim`.
    """

    uid: str
    is_deleting: bool
    is_reserved: bool
    allocated: frozenset[tuple[str, str, str]] | None
    pods: Pods = None
    reported: frozenset[ReportedDevice] | None = None


@dataclass(frozen=True, slots=True)
class PreparedDevice:
    """One Device of a NodePrepareResources response; `requests` are base names, empty for all requests."""

    requests: tuple[str, ...]
    pool: str
    device: str
    cdi_ids: tuple[str, ...]
    share_id: str | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """The claim is ready; `devices` may be empty."""

    devices: tuple[PreparedDevice, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """A claim could not be prepared or unprepared; `error` is one line for the claim's entry in the response."""

    error: str


PrepareOutcome = Prepared | Failed
UnprepareOutcome = Failed | None


@dataclass(frozen=True, slots=True)
class MpsFacts:
    """The limits of the MPS daemon that serves a device; None means unlimited."""

    active_thread_percentage: int | None = None
    pinned_memory_limit_mib: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a claim's status reports about a prepared device; fields that are None are omitted."""

    type: str | None = None
    uuid: str | None = None
    product_name: str | None = None
    driver_version: str | None = None
    pci_bus_id: str | None = None
    parent_uuid: str | None = None
    gpu_instance_id: int | None = None
    compute_instance_id: int | None = None
    profile: str | None = None
    mps: MpsFacts | None = None


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """One device of a claim: whether it is ready, why (a CamelCase `reason` and a sentence), and its facts.

    `pool`, `device` and `share_id` come from the allocation result.
    """

    pool: str
    device: str
    ready: bool
    reason: str
    message: str
    share_id: str | None = None
    facts: DeviceFacts = DeviceFacts()
