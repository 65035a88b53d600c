"""Deciding how a claim is prepared: which devices, which steps, or why not. No I/O.

States of a claim on this node, as its record shows them:

    (no record) ──plan, record written──▶ preparing ──every step done──▶ prepared
         ▲                                    │                             │
         └──────── undo of every step, record removed (rollback, unprepare, recovery) ─────┘

A crash in `preparing` leaves a record that names every step that may have had an effect; the next Prepare
runs the same steps again (each converges), an Unprepare runs their undos. A Prepare in `prepared` runs
the steps again too, because a reboot or a clean-up may have taken away what they made.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dra_driver.core.cdi import cdi_id
from dra_driver.core.usages import incompatibility, usages_of
from dra_driver.errors import ClaimRefusedError
from dra_driver.model.claim import AllocatedClaim, DeviceResult, Prepared, PreparedDevice
from dra_driver.model.inventory import Inventory, OfferedDevice, WholeGpu
from dra_driver.model.record import ClaimRecord, HeldDevice
from dra_driver.model.sharing import NO_SHARING, SharingPolicy, kind_of
from dra_driver.model.steps import RunMps, SetTimeSlice, Step, WriteCdiSpec
from dra_driver.model.usage import MpsShared, TimeSliced, Usage

_SHARE_SUFFIX = re.compile(r"-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\Z")


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """One allocation result of ours with the device that it names, and how the claim uses that."""

    result: DeviceResult
    offered: OfferedDevice
    usage: Usage = None

    @property
    def cdi_device(self) -> str:
        """The device's name in the claim's CDI spec; see `cdi_device`."""
        return cdi_device(self.result)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a claim needs on this node."""

    claim: AllocatedClaim
    devices: tuple[PlannedDevice, ...]
    steps: tuple[Step, ...]

    @property
    def gpu_uuids(self) -> frozenset[str]:
        """The physical GPUs that the plan touches."""
        return frozenset(device.offered.gpu.uuid for device in self.devices)

    def held_devices(self) -> tuple[HeldDevice, ...]:
        """The devices as a record keeps them."""
        return tuple(_held(device) for device in self.devices)


def our_part(claim: AllocatedClaim, driver: str) -> AllocatedClaim:
    """The claim without results and configs of other drivers, which are normal in a claim of several.

    A config that is not opaque is kept: it is a kind of a newer Kubernetes that may be meant for us.
    """
    return AllocatedClaim(
        ref=claim.ref,
        results=tuple(result for result in claim.results if result.driver == driver),
        configs=tuple(config for config in claim.configs if config.driver in (driver, None)),
    )


def plan_claim(
    claim: AllocatedClaim,
    inventory: Inventory,
    pool: str,
    driver: str,
    others: Iterable[ClaimRecord],
    sharing: SharingPolicy = NO_SHARING,
    known: ClaimRecord | None = None,
) -> Plan:
    """The plan for our part of a claim.

    `others` are the records of all other claims on this node, `sharing` is the node's policy, `known` is the
    claim's own record.
    Raises: ClaimRefusedError that names the claim's request, the device and what to do; InvalidConfigError
    for opaque parameters.
    """
    found = [(result, _find(result, pool, inventory.by_name)) for result in claim.results]
    _refuse_repeats(found)
    kept = _kept_usages(claim, found, known)
    usages = usages_of(claim, found, driver, sharing) if kept is None else kept
    devices = tuple(PlannedDevice(*pair, usage) for pair, usage in zip(found, usages, strict=True))
    if kept is None:
        _refuse_double_allocation(devices, others)
    return Plan(claim, devices, _steps(devices))


def _kept_usages(
    claim: AllocatedClaim, found: Sequence[tuple[DeviceResult, OfferedDevice]], known: ClaimRecord | None
) -> list[Usage] | None:
    """How a claim that is prepared uses its devices already; None if it has to be decided.

    Its pod may be running: another policy of the node or another release must not change what it got.
    """
    if known is None or known.phase != "prepared" or known.claim != claim:
        return None
    silicon = [(offered.name, offered.uuid, offered.gpu.uuid) for _, offered in found]
    if silicon != [(held.device, held.uuid, held.gpu_uuid) for held in known.devices]:
        return None
    return [held.usage for held in known.devices]


def _steps(devices: Sequence[PlannedDevice]) -> tuple[Step, ...]:
    """Settings and daemons first, the CDI spec last; each once, in a fixed order."""
    time_slices = {
        SetTimeSlice(device.offered.gpu.uuid, device.usage.interval)
        for device in devices
        if isinstance(device.usage, TimeSliced) and device.usage.interval
    }
    daemons = {
        device.offered.name: device.usage.spec for device in devices if isinstance(device.usage, MpsShared)
    }
    return (
        *sorted(time_slices, key=lambda step: step.gpu_uuid),
        *(RunMps(daemons[name]) for name in sorted(daemons)),
        *((WriteCdiSpec(),) if devices else ()),
    )


def _find(result: DeviceResult, pool: str, offered: Mapping[str, OfferedDevice]) -> OfferedDevice:
    if result.pool != pool:
        raise ClaimRefusedError(
            f"request {result.request}: device {result.device} was allocated from pool {result.pool}, but this "
            f"node serves pool {pool}; the pod landed on a node that its claim was not allocated for"
        )
    device = offered.get(result.device)
    if device is None:
        raise ClaimRefusedError(
            f"request {result.request}: device {result.device} of pool {pool} does not exist on this node (any "
            "more); delete the pod and its claim so that they are allocated anew"
        )
    return device


def _refuse_repeats(found: Sequence[tuple[DeviceResult, OfferedDevice]]) -> None:
    """One device twice in a claim is only legal for admin access and for different shares."""
    seen: set[tuple[str, str | None]] = set()
    for result, offered in found:
        if result.admin_access:
            continue
        key = (offered.name, result.share_id)
        if key in seen:
            raise ClaimRefusedError(
                f"request {result.request}: device {offered.name} is allocated twice in this claim; "
                "delete the claim so that it is allocated anew"
            )
        seen.add(key)


def _refuse_double_allocation(devices: Sequence[PlannedDevice], others: Iterable[ClaimRecord]) -> None:
    """The last line of defence: schedulers have given one device out twice.

    Shares of one device are no double allocation, but all that use it at a time must use it in one way.
    """
    for record in others:
        for held in record.devices:
            for device in devices:
                if not _same_silicon(held, device):
                    continue
                if not _are_shares(held, device):
                    raise ClaimRefusedError(
                        f"request {device.result.request}: device {device.offered.name} is held by claim "
                        f"{record.ref} ({held.device}, {record.phase}); it becomes free when that claim's pod is gone"
                    )
                reason = incompatibility(held.usage, device.usage)
                if reason is not None:
                    raise ClaimRefusedError(
                        f"request {device.result.request}: device {device.offered.name} is shared with claim "
                        f"{record.ref}, with which this claim's way of sharing cannot live: {reason}"
                    )


def _same_silicon(held: HeldDevice, device: PlannedDevice) -> bool:
    """Whether both use the same silicon and neither is an onlooker with admin access."""
    if held.admin_access or device.result.admin_access or held.gpu_uuid != device.offered.gpu.uuid:
        return False
    if held.kind != "mig" or isinstance(device.offered, WholeGpu):
        return True
    return held.device == device.offered.name


def _are_shares(held: HeldDevice, device: PlannedDevice) -> bool:
    """Whether both are shares of one device, as the scheduler counts them."""
    is_same = held.device == device.offered.name
    return is_same and held.share_id is not None and device.result.share_id not in (None, held.share_id)


def _held(device: PlannedDevice) -> HeldDevice:
    offered = device.offered
    return HeldDevice(
        device=offered.name,
        kind=kind_of(offered),
        uuid=offered.uuid,
        gpu_uuid=offered.gpu.uuid,
        admin_access=device.result.admin_access,
        share_id=device.result.share_id,
        usage=device.usage,
    )


def cdi_device(result: DeviceResult) -> str:
    """The name of a result's device within its claim: two shares of one device have limits of their own."""
    return result.device if result.share_id is None else f"{result.device}-{result.share_id}"


def device_of_cdi_name(name: str) -> str:
    """The device's name in a name of `cdi_device`."""
    return _SHARE_SUFFIX.sub("", name)


def answer(claim: AllocatedClaim, driver: str) -> Prepared:
    """What the kubelet gets for a prepared claim; the same for a first and for any later Prepare."""
    return Prepared(
        tuple(
            PreparedDevice(
                requests=(result.base_request,),
                pool=result.pool,
                device=result.device,
                cdi_ids=(cdi_id(driver, claim.ref.uid, cdi_device(result)),),
                share_id=result.share_id,
            )
            for result in claim.results
        )
    )
