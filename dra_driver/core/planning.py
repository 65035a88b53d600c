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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from dra_driver.core.cdi import cdi_id
from dra_driver.core.devicemetadata import cdi_id as metadata_cdi_id
from dra_driver.core.devicemetadata import check_names
from dra_driver.core.holding import refuse_held
from dra_driver.core.usages import usages_of
from dra_driver.errors import ClaimRefusedError, DeviceLostError
from dra_driver.model.claim import AllocatedClaim, ClaimRef, DeviceResult, Prepared, PreparedDevice
from dra_driver.model.inventory import Inventory, MigPartition, OfferedDevice, PossibleMig, WholeGpu
from dra_driver.model.record import ClaimRecord, HeldDevice
from dra_driver.model.sharing import NO_SHARING, SharingPolicy, kind_of
from dra_driver.model.steps import (
    CreateMig,
    LeaveMigMode,
    RunMps,
    SetTimeSlice,
    Step,
    WriteCdiSpec,
    WriteDeviceMetadata,
)
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
    return replace(
        claim,
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
    metadata: tuple[str, ...] = (),
) -> Plan:
    """The plan for our part of a claim.

    `others` are the records of all other claims on this node, `sharing` is the node's policy, `known` is the
    claim's own record, `metadata` are the versions in which the node writes device metadata.
    Raises: ClaimRefusedError that names the claim's request, the device and what to do (DeviceHeldError if other
    claims hold it); InvalidConfigError for opaque parameters.
    """
    found = [(result, _as_held(_find(result, pool, inventory, known), known)) for result in claim.results]
    _refuse_repeats(found)
    kept = _kept_usages(claim, found, known)
    usages = usages_of(claim, found, driver, sharing) if kept is None else kept
    devices = tuple(PlannedDevice(*pair, usage) for pair, usage in zip(found, usages, strict=True))
    if kept is None:
        refuse_held([(device.result.request, _held(device)) for device in devices], others)
    return Plan(claim, devices, _steps(devices, _metadata(claim, devices, known, metadata)))


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


def _metadata(
    claim: AllocatedClaim,
    devices: Sequence[PlannedDevice],
    known: ClaimRecord | None,
    versions: tuple[str, ...],
) -> tuple[WriteDeviceMetadata, ...]:
    """What the claim's record has of it stays, and a claim that is prepared without it stays so: containers of one
    pod would else see different things, and a step that left the record would never be undone."""
    steps: tuple[WriteDeviceMetadata, ...] = (WriteDeviceMetadata(versions),) if versions and devices else ()
    if known is not None and known.devices == tuple(_held(device) for device in devices):
        kept = tuple(step for step in known.steps if isinstance(step, WriteDeviceMetadata))
        steps = kept if kept or known.phase == "prepared" else steps
    if steps:
        check_names(claim)
    return steps


def _steps(devices: Sequence[PlannedDevice], metadata: Iterable[Step]) -> tuple[Step, ...]:
    """Silicon first, then settings and daemons, then files, the CDI spec last; each once, in a fixed order."""
    used = [device for device in devices if not device.result.admin_access]
    whole = {
        LeaveMigMode(offered.gpu.uuid, offered.gpu.pci_bus_id)
        for offered in (device.offered for device in used)
        if isinstance(offered, WholeGpu) and offered.gpu.partitioning is not None
    }
    made = {_creation(device.offered) for device in used if isinstance(device.offered, PossibleMig)}
    time_slices = {
        SetTimeSlice(device.offered.gpu.uuid, device.usage.interval)
        for device in devices
        if isinstance(device.usage, TimeSliced) and device.usage.interval
    }
    daemons = {
        device.offered.name: device.usage.spec for device in devices if isinstance(device.usage, MpsShared)
    }
    return (
        *sorted(whole, key=lambda step: step.gpu_uuid),
        *sorted(made, key=lambda step: step.device),
        *sorted(time_slices, key=lambda step: step.gpu_uuid),
        *(RunMps(daemons[name]) for name in sorted(daemons)),
        *metadata,
        *((WriteCdiSpec(),) if devices else ()),
    )


def _creation(device: PossibleMig) -> CreateMig:
    profile = device.profile
    return CreateMig(
        device.name,
        device.gpu.uuid,
        device.gpu.pci_bus_id,
        profile.profile_id,
        profile.name,
        device.placement,
    )


def _find(result: DeviceResult, pool: str, inventory: Inventory, known: ClaimRecord | None) -> OfferedDevice:
    if result.pool != pool:
        raise ClaimRefusedError(
            f"request {result.request}: device {result.device} was allocated from pool {result.pool}, but this "
            f"node serves pool {pool}; the pod landed on a node that its claim was not allocated for"
        )
    withheld = inventory.withheld_by_name.get(result.device)
    if withheld is not None and known is not None and _holds(known, withheld.uuid):
        return withheld
    device = inventory.usable(result.device)
    if device is not None:
        if device.gpu.uuid in inventory.lost_uuids:
            raise DeviceLostError(
                f"request {result.request}: device {device.name} is on GPU {device.gpu.uuid}, which does not answer "
                "any more; reset it or reboot the node, or delete the pod so that it starts elsewhere"
            )
        return device
    if withheld is None:
        raise ClaimRefusedError(
            f"request {result.request}: device {result.device} of pool {pool} does not exist on this node (any "
            "more); delete the pod and its claim so that they are allocated anew"
        )
    raise ClaimRefusedError(
        f"request {result.request}: device {result.device} is MIG device {withheld.uuid}, which somebody else made "
        "on this GPU and which is therefore left alone; destroy it by hand (nvidia-smi mig), then delete the pod"
    )


def _holds(known: ClaimRecord, uuid: str) -> bool:
    return any(held.uuid == uuid for held in known.devices)


def _as_held(device: OfferedDevice, known: ClaimRecord | None) -> OfferedDevice:
    """A MIG device that was made for the claim stays one, though the node offers it as somebody's own now."""
    is_ours = known is not None and any(
        held.device == device.name and held.placement is not None for held in known.devices
    )
    if is_ours and isinstance(device, MigPartition):
        return PossibleMig(device.name, device.gpu, device.profile, device.placement)
    return device


def _refuse_repeats(found: Sequence[tuple[DeviceResult, OfferedDevice]]) -> None:
    """One device twice in a claim is only legal for admin access and for different shares; the same silicon
    under two names never is."""
    used: list[tuple[DeviceResult, OfferedDevice]] = []
    for result, offered in found:
        if result.admin_access:
            continue
        for other, same in used:
            if same.name == offered.name and other.share_id == result.share_id:
                raise ClaimRefusedError(
                    f"request {result.request}: device {offered.name} is allocated twice in this claim; "
                    "delete the claim so that it is allocated anew"
                )
            if same.name != offered.name and _overlap(same, offered):
                raise ClaimRefusedError(
                    f"requests {other.request} and {result.request}: devices {same.name} and {offered.name} are the "
                    "same silicon; delete the claim so that it is allocated anew"
                )
        used.append((result, offered))


def _overlap(one: OfferedDevice, other: OfferedDevice) -> bool:
    """Whether two devices cannot be used at a time."""
    if one.gpu.uuid != other.gpu.uuid:
        return False
    if isinstance(one, PossibleMig) and isinstance(other, PossibleMig):
        return one.placement.overlaps(other.placement)
    return isinstance(one, WholeGpu) or isinstance(other, WholeGpu)


def _held(device: PlannedDevice) -> HeldDevice:
    bare = _held_silicon(device.offered)
    result = device.result
    return replace(bare, admin_access=result.admin_access, share_id=result.share_id, usage=device.usage)


def _held_silicon(offered: OfferedDevice) -> HeldDevice:
    return HeldDevice(
        device=offered.name,
        kind=kind_of(offered),
        uuid=offered.uuid,
        gpu_uuid=offered.gpu.uuid,
        placement=offered.placement if isinstance(offered, PossibleMig) else None,
    )


def lost_claim(uid: str, devices: Iterable[OfferedDevice]) -> ClaimRecord:
    """What stands for a claim whose record was lost and whose CDI spec names the devices: it holds them."""
    held = tuple(_held_silicon(device) for device in devices)
    return ClaimRecord(AllocatedClaim(ClaimRef("?", "?", uid), ()), "prepared", "", held, ())


def cdi_device(result: DeviceResult) -> str:
    """The name of a result's device within its claim: two shares of one device have limits of their own."""
    return result.device if result.share_id is None else f"{result.device}-{result.share_id}"


def device_of_cdi_name(name: str) -> str:
    """The device's name in a name of `cdi_device`."""
    return _SHARE_SUFFIX.sub("", name)


def answer(claim: AllocatedClaim, driver: str, steps: Iterable[Step]) -> Prepared:
    """What the kubelet gets for a prepared claim; the same for a first and for any later Prepare.

    `steps` are those of its record. The first device of each request brings the request's metadata file.
    """
    uid = claim.ref.uid
    is_described = any(isinstance(step, WriteDeviceMetadata) for step in steps)
    first = {result.base_request: number for number, result in reversed([*enumerate(claim.results)])}
    return Prepared(
        tuple(
            PreparedDevice(
                requests=(result.base_request,),
                pool=result.pool,
                device=result.device,
                cdi_ids=(
                    cdi_id(driver, uid, cdi_device(result)),
                    *(
                        [metadata_cdi_id(driver, uid, result.base_request)]
                        if is_described and first[result.base_request] == number
                        else []
                    ),
                ),
                share_id=result.share_id,
            )
            for number, result in enumerate(claim.results)
        )
    )
