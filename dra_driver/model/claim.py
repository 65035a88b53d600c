"""The parts of a ResourceClaim that a node driver reads, what it answers to the kubelet, and what it writes into the
claim's `status.devices`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, Literal

from dra_driver.model.ids import is_subdomain, is_uid

_MAX_PODS: Final = 256
"""The API lets a claim be reserved for at most this many pods."""


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
    """A pod that a claim is reserved for; its namespace is the claim's."""

    name: str
    uid: str


Pods = tuple[PodRef, ...] | None
"""All pods that a claim is reserved for, in the API server's order; None if they are not known."""


def allocation_results(claim: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The devices of the allocation of a claim in the shape of v1; none if it has no allocation yet."""
    allocation = (claim.get("status") or {}).get("allocation") or {}
    return list((allocation.get("devices") or {}).get("results") or ())


def pods_from(entries: Iterable[Any]) -> Pods:
    """The first 256 pods of `entries`, which should be objects with `name` and `uid`.

    None if one of them is something else. The pods are information for people only. So a bad entry must not keep a
    claim from being served, and must not reach a terminal.
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

    `request` is the full name, `request` or `request/subrequest`; `consumed_capacity` maps capacity
    names to quantities as the scheduler wrote them.
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
        """The top-level request name; the kubelet finds the containers of a request by it."""
        return self.request.partition("/")[0]


@dataclass(frozen=True, slots=True)
class DeviceConfig:
    """One entry of `status.allocation.devices.config`; `driver` is None if the entry is not opaque.

    Equality ignores `requests`: an allocation never changes, and older records lack the names that `kube` puts back.
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

    `pod_claim_name` is the name in the pod's spec of a claim that was made from a template. `pods` are the pods that
    the claim was reserved for at the last look, and `reported` the devices that its status named then: driver, pool,
    device and share ID (None without one). `reported` is None if that is not known. None of them is part of the
    allocation, so equality ignores them.
    """

    ref: ClaimRef
    results: tuple[DeviceResult, ...]
    configs: tuple[DeviceConfig, ...] = ()
    pod_claim_name: str | None = field(default=None, compare=False)
    pods: Pods = field(default=None, compare=False)
    reported: frozenset[ReportedDevice] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class ClaimNow:
    """The claim that has a name now, as the API server has it; its allocation may be of any driver.

    `allocated` has driver, pool and device of each result, None while there is no allocation. `reported` is as in
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
    """One Device of a NodePrepareResources answer; `requests` are base names, none means all requests."""

    requests: tuple[str, ...]
    pool: str
    device: str
    cdi_ids: tuple[str, ...]
    share_id: str | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A claim is ready; an empty tuple is a valid answer."""

    devices: tuple[PreparedDevice, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """A claim could not be prepared or unprepared; `error` is one line for the claim's entry in the answer."""

    error: str


PrepareOutcome = Prepared | Failed
UnprepareOutcome = Failed | None


@dataclass(frozen=True, slots=True)
class MpsFacts:
    """The limits of the MPS daemon that serves a device; None is no limit."""

    active_thread_percentage: int | None = None
    pinned_memory_limit_mib: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a claim's status says about a prepared device; a field that is None is left out."""

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
    """One device of a claim: whether it can be used, why (a CamelCase `reason`, a sentence), and what it is.

    `pool`, `device` and `share_id` are those of the allocation result.
    """

    pool: str
    device: str
    ready: bool
    reason: str
    message: str
    share_id: str | None = None
    facts: DeviceFacts = DeviceFacts()
