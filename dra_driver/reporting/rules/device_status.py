"""The reported status of a claim's devices, and which health changes affect which claims."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dra_driver.health.rules.polling import FABRIC
from dra_driver.health.rules.taints import MadeInstance, device_reasons, device_targets, instances_by_device
from dra_driver.model.claim import DeviceFacts, DeviceResult, DeviceStatus, HeldDevice, MpsFacts
from dra_driver.model.health import HealthChange, HealthStates, HealthTarget, Reason, Severity
from dra_driver.model.inventory import (
    DynamicMigDevice,
    Inventory,
    OfferedDevice,
    StaticMigDevice,
    VfioDevice,
)
from dra_driver.model.mig import OwnedInstance
from dra_driver.model.mps import MpsShared
from dra_driver.model.problems import EventReason
from dra_driver.model.record import ClaimRecord

CreatedInstanceOf = Callable[[str], OwnedInstance | None]


def device_statuses(
    record: ClaimRecord,
    inventory: Inventory | None,
    created_instance: CreatedInstanceOf,
    states: HealthStates,
) -> tuple[DeviceStatus, ...]:
    """Return one entry for each device of a prepared claim."""
    held_by_result: Mapping[tuple[str, str | None], HeldDevice] = {
        (held.device, held.share_id): held for held in record.devices
    }
    return tuple(
        _status(result, held_by_result[result.device, result.share_id], inventory, created_instance, states)
        for result in record.claim.results
        if (result.device, result.share_id) in held_by_result
    )


def is_hit(
    record: ClaimRecord,
    target: HealthTarget,
    inventory: Inventory | None,
    created_instance: CreatedInstanceOf,
) -> bool:
    """Whether a health change affects a device of the claim, even with adminAccess."""
    if not target.is_instance:
        return target.gpu_uuid in record.gpu_uuids
    return any(
        target in device_targets(offered, _instances(held, created_instance))
        for held in record.devices
        if held.gpu_uuid == target.gpu_uuid and (offered := _offered(held, inventory)) is not None
    )


def event_of(change: HealthChange) -> tuple[EventReason, bool] | None:
    """Return the event's reason, and whether it is a warning; None if the device stays usable, or stays bad without
    becoming worse.
    """
    if change.is_gone:
        return "GPUGone", False
    if change.is_hang or (change.after > change.before and change.after >= Severity.DEGRADED):
        return "GPULost" if change.after == Severity.LOST else "GPUUnhealthy", True
    if change.before >= Severity.DEGRADED > change.after:
        return "GPURecovered", False
    return None


def _status(
    result: DeviceResult,
    held: HeldDevice,
    inventory: Inventory | None,
    created_instance: CreatedInstanceOf,
    states: HealthStates,
) -> DeviceStatus:
    bad = [
        reason
        for reason in _reasons(held, inventory, created_instance, states)
        if reason.severity >= Severity.UNHEALTHY
    ]
    worst = max((reason.severity for reason in bad), default=Severity.OK)
    return DeviceStatus(
        pool=result.pool,
        device=result.device,
        share_id=result.share_id,
        ready=not bad,
        reason="Prepared" if not bad else "GPULost" if worst == Severity.LOST else "GPUUnhealthy",
        message="; ".join(reason.text for reason in bad),
        facts=_facts(held, inventory, created_instance),
    )


def _reasons(
    held: HeldDevice, inventory: Inventory | None, created_instance: CreatedInstanceOf, states: HealthStates
) -> Sequence[Reason]:
    offered = _offered(held, inventory)
    if offered is not None:
        return device_reasons(offered, states, _instances(held, created_instance))
    # The device is not in the inventory, so only the health of its GPU is known.
    state = states.get(HealthTarget(held.gpu_uuid))
    found = () if state is None else state.reasons
    return [reason for reason in found if held.kind != "mig" or reason.key != FABRIC]


def _offered(held: HeldDevice, inventory: Inventory | None) -> OfferedDevice | None:
    if inventory is None:
        return None
    found = inventory.by_name.get(held.device) or inventory.withheld_by_name.get(held.device)
    return found if found is not None and found.gpu.uuid == held.gpu_uuid else None


def _instances(held: HeldDevice, created_instance: CreatedInstanceOf) -> Mapping[str, MadeInstance]:
    made = created_instance(held.device) if held.placement is not None else None
    return {} if made is None else instances_by_device([made])


def _facts(held: HeldDevice, inventory: Inventory | None, created_instance: CreatedInstanceOf) -> DeviceFacts:
    offered = _offered(held, inventory)
    gpus = inventory.every_gpu if inventory is not None else ()
    gpu = next((gpu for gpu in gpus if gpu.uuid == held.gpu_uuid), None)
    made = created_instance(held.device) if held.placement is not None else None
    instance = made or (offered.mig if isinstance(offered, StaticMigDevice) else None)
    profile = offered.profile.name if isinstance(offered, StaticMigDevice | DynamicMigDevice) else None
    product = gpu.product_name if gpu is not None else None
    bus_id = gpu.pci_bus_id if gpu is not None else None
    if isinstance(offered, VfioDevice):  # NVML does not list the GPU while the card is bound to vfio
        product, bus_id = offered.card.product_name or product, offered.card.bus_id
    return DeviceFacts(
        type=held.kind,
        uuid=held.uuid or (made.uuid if made is not None else None),
        product_name=product,
        driver_version=inventory.versions.driver if inventory is not None else None,
        pci_bus_id=bus_id,
        parent_uuid=held.gpu_uuid if held.kind == "mig" else None,
        gpu_instance_id=instance.gpu_instance_id if instance else None,
        compute_instance_id=instance.compute_instance_id if instance else None,
        profile=made.profile_name if made is not None else profile,
        mps=_mps(held),
    )


def _mps(held: HeldDevice) -> MpsFacts | None:
    match held.usage:
        case MpsShared(_, memory, percentage):
            return MpsFacts(percentage, memory)
        case _:
            return None
