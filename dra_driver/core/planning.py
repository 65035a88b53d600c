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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, assert_never

from dra_driver.core.cdi import cdi_id
from dra_driver.errors import ClaimRefusedError
from dra_driver.model.claim import AllocatedClaim, DeviceResult, Prepared, PreparedDevice
from dra_driver.model.inventory import Inventory, MigPartition, OfferedDevice, WholeGpu
from dra_driver.model.record import ClaimRecord, HeldDevice
from dra_driver.model.steps import Step, WriteCdiSpec

DeviceKind = Literal["gpu", "mig"]


@dataclass(frozen=True, slots=True)
class PlannedDevice:
    """One allocation result of ours with the device that it names."""

    result: DeviceResult
    offered: OfferedDevice


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
) -> Plan:
    """The plan for our part of a claim.

    `others` are the records of all other claims on this node. Raises: ClaimRefusedError that names the
    claim's request, the device and what to do; InvalidConfigError for opaque parameters.
    """
    devices = tuple(PlannedDevice(result, _find(result, pool, inventory.by_name)) for result in claim.results)
    _refuse_repeats(devices)
    for device in devices:
        _check_config(claim, device, driver)
    _refuse_double_allocation(devices, others)
    return Plan(claim, devices, (WriteCdiSpec(),) if devices else ())


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


def _refuse_repeats(devices: Sequence[PlannedDevice]) -> None:
    """One device twice in a claim is only legal for admin access and for different shares."""
    seen: set[tuple[str, str | None]] = set()
    for device in devices:
        if device.result.admin_access:
            continue
        key = (device.offered.name, device.result.share_id)
        if key in seen:
            raise ClaimRefusedError(
                f"request {device.result.request}: device {device.offered.name} is allocated twice in this claim; "
                "delete the claim so that it is allocated anew"
            )
        seen.add(key)


def _check_config(claim: AllocatedClaim, device: PlannedDevice, driver: str) -> None:
    if not claim.configs:
        return
    # Most claims have no parameters, and pydantic costs a fifth of a second and several MiB.
    from dra_driver.api.resolve import config_for_result, unbuilt_features

    config = config_for_result(device.result, claim.configs, driver, device_kind(device.offered))
    unbuilt = unbuilt_features(config.config)
    if unbuilt:
        raise ClaimRefusedError(f"request {device.result.request}: {'; '.join(unbuilt)}")
    if device.result.admin_access and config.entry is not None:
        raise ClaimRefusedError(
            f"request {device.result.request}: opaque parameters ({config.entry}) would change a device that may be "
            "in use by others, which adminAccess must not; remove them or adminAccess"
        )


def _refuse_double_allocation(devices: Sequence[PlannedDevice], others: Iterable[ClaimRecord]) -> None:
    """The last line of defence: schedulers have given one device out twice."""
    for record in others:
        for held in record.devices:
            for device in devices:
                if _excludes(held, device):
                    raise ClaimRefusedError(
                        f"request {device.result.request}: device {device.offered.name} is held by claim "
                        f"{record.ref} ({held.device}, {record.phase}); it becomes free when that claim's pod is gone"
                    )


def _excludes(held: HeldDevice, device: PlannedDevice) -> bool:
    """Whether both use the same silicon and neither is an onlooker with admin access."""
    if held.admin_access or device.result.admin_access or held.gpu_uuid != device.offered.gpu.uuid:
        return False
    if held.kind == "gpu" or isinstance(device.offered, WholeGpu):
        return True
    return held.device == device.offered.name


def device_kind(offered: OfferedDevice) -> DeviceKind:
    """`gpu` or `mig`: the value of the attribute `type`."""
    match offered:
        case WholeGpu():
            return "gpu"
        case MigPartition():
            return "mig"
        case _:
            assert_never(offered)


def _held(device: PlannedDevice) -> HeldDevice:
    offered = device.offered
    return HeldDevice(
        device=offered.name,
        kind=device_kind(offered),
        uuid=offered.uuid,
        gpu_uuid=offered.gpu.uuid,
        admin_access=device.result.admin_access,
        share_id=device.result.share_id,
    )


def answer(claim: AllocatedClaim, driver: str) -> Prepared:
    """What the kubelet gets for a prepared claim; the same for a first and for any later Prepare."""
    return Prepared(
        tuple(
            PreparedDevice(
                requests=(result.base_request,),
                pool=result.pool,
                device=result.device,
                cdi_ids=(cdi_id(driver, claim.ref.uid, result.device),),
                share_id=result.share_id,
            )
            for result in claim.results
        )
    )
