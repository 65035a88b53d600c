"""ResourceClaims as a node driver sees them."""

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
"""The API's limit."""


@dataclass(frozen=True, slots=True)
class ClaimRef:
    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name} (UID {self.uid})"


@dataclass(frozen=True, slots=True)
class PodRef:
    name: str
    uid: str


Pods = tuple[PodRef, ...] | None
"""In the API server's order; None if unknown."""


def allocation_results(claim: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the devices of a claim's allocation, empty if it has none."""
    allocation = (claim.get("status") or {}).get("allocation") or {}
    return list((allocation.get("devices") or {}).get("results") or ())


def pods_from(entries: Iterable[Any]) -> Pods:
    """Return the first 256 pods of `entries`, objects with `name` and `uid`.

    Pods are only shown: an invalid entry must not fail the claim (None), and must not reach a terminal.
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
    """`request` is `request` or `request/subrequest`."""

    request: str
    driver: str
    pool: str
    device: str
    admin_access: bool = False
    share_id: str | None = None
    consumed_capacity: Mapping[str, str] = field(default_factory=dict)

    @property
    def base_request(self) -> str:
        """The kubelet finds the containers by this name."""
        return self.request.partition("/")[0]


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """`driver` is None if it is not opaque. Equality ignores `requests`, which older records lack."""

    source: Literal["FromClass", "FromClaim"]
    requests: tuple[str, ...] = field(compare=False)
    driver: str | None
    parameters: Any = None


ReportedDevice = tuple[str, str, str, str | None]
"""Driver, pool, device and share ID."""


@dataclass(frozen=True, slots=True)
class AllocatedClaim:
    """The results and configs of all drivers, in the API server's order.

    `pod_claim_name` is the name in the pod's spec if the claim comes from a template. `pods` and `reported`
    are as last read. Equality ignores these three.
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
    """`uuid` is the device's own UUID. Each creation gives a MIG device on demand a new one, so its `uuid` is
    empty; only such a device has a `placement`.
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
    """The claim that the API server now has under a name. `allocated` has driver, pool and device of each
    result.
    """

    uid: str
    is_deleting: bool
    is_reserved: bool
    allocated: frozenset[tuple[str, str, str]] | None
    pods: Pods = None
    reported: frozenset[ReportedDevice] | None = None


@dataclass(frozen=True, slots=True)
class PreparedDevice:
    """Empty `requests` mean all requests."""

    requests: tuple[str, ...]
    pool: str
    device: str
    cdi_ids: tuple[str, ...]
    share_id: str | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    devices: tuple[PreparedDevice, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """`error` is one line."""

    error: str


PrepareOutcome = Prepared | Failed
UnprepareOutcome = Failed | None


@dataclass(frozen=True, slots=True)
class MpsFacts:
    """None means unlimited."""

    active_thread_percentage: int | None = None
    pinned_memory_limit_mib: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a claim's status reports; None is omitted."""

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
    """`reason` is a CamelCase word."""

    pool: str
    device: str
    ready: bool
    reason: str
    message: str
    share_id: str | None = None
    facts: DeviceFacts = DeviceFacts()
