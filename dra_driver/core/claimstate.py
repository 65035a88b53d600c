"""What a claim's status says of its devices, from the claim's record and what is known of the node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dra_driver.core.signals import FABRIC
from dra_driver.core.taints import MadeInstance, device_reasons, device_subjects, instances_by_device
from dra_driver.model.claim import DeviceResult
from dra_driver.model.health import HealthStates, Reason, Severity, Subject
from dra_driver.model.inventory import Inventory, MigPartition, OfferedDevice, PossibleMig
from dra_driver.model.mig import OwnedInstance
from dra_driver.model.notices import (
    GPU_LOST,
    GPU_UNHEALTHY,
    PREPARED,
    DeviceFacts,
    DeviceStatus,
    MpsFacts,
)
from dra_driver.model.record import ClaimRecord, HeldDevice
from dra_driver.model.usage import MpsShared

Realised = Callable[[str], OwnedInstance | None]


def device_statuses(
    record: ClaimRecord, inventory: Inventory | None, realised: Realised, states: HealthStates
) -> tuple[DeviceStatus, ...]:
    """One entry for each device of a prepared claim. `realised` answers what was made for a device on demand.

    A device that cannot do its work, by the health `states`, is not ready.
    """
    held_by_result: Mapping[tuple[str, str | None], HeldDevice] = {
        (held.device, held.share_id): held for held in record.devices
    }
    return tuple(
        _status(result, held_by_result[result.device, result.share_id], inventory, realised, states)
        for result in record.claim.results
        if (result.device, result.share_id) in held_by_result
    )


def is_hit(record: ClaimRecord, subject: Subject, inventory: Inventory | None, realised: Realised) -> bool:
    """Whether what happens to a GPU, or to an instance of one, happens to something that the claim holds.

    Onlookers hold, too. An instance hits only the MIG devices in it.
    """
    if not subject.is_instance:
        return subject.gpu_uuid in record.gpu_uuids
    return any(
        subject in device_subjects(offered, _instances(held, realised))
        for held in record.devices
        if held.gpu_uuid == subject.gpu_uuid and (offered := _offered(held, inventory)) is not None
    )


def _status(
    result: DeviceResult,
    held: HeldDevice,
    inventory: Inventory | None,
    realised: Realised,
    states: HealthStates,
) -> DeviceStatus:
    bad = [
        reason
        for reason in _reasons(held, inventory, realised, states)
        if reason.severity >= Severity.UNHEALTHY
    ]
    worst = max((reason.severity for reason in bad), default=Severity.OK)
    return DeviceStatus(
        pool=result.pool,
        device=result.device,
        share_id=result.share_id,
        ready=not bad,
        reason=PREPARED if not bad else GPU_LOST if worst == Severity.LOST else GPU_UNHEALTHY,
        message="; ".join(reason.text for reason in bad),
        facts=_facts(result, held, inventory, realised),
    )


def _reasons(
    held: HeldDevice, inventory: Inventory | None, realised: Realised, states: HealthStates
) -> Sequence[Reason]:
    offered = _offered(held, inventory)
    if offered is not None:
        return device_reasons(offered, states, _instances(held, realised))
    # A device that is not there (any more, or yet): all that can be told is how its GPU is.
    state = states.get(Subject(held.gpu_uuid))
    found = () if state is None else state.reasons
    return [reason for reason in found if held.kind != "mig" or reason.key != FABRIC]


def _offered(held: HeldDevice, inventory: Inventory | None) -> OfferedDevice | None:
    if inventory is None:
        return None
    found = inventory.by_name.get(held.device) or inventory.withheld_by_name.get(held.device)
    return found if found is not None and found.gpu.uuid == held.gpu_uuid else None


def _instances(held: HeldDevice, realised: Realised) -> Mapping[str, MadeInstance]:
    made = realised(held.device) if held.placement is not None else None
    return {} if made is None else instances_by_device([made])


def _facts(
    result: DeviceResult, held: HeldDevice, inventory: Inventory | None, realised: Realised
) -> DeviceFacts:
    offered = inventory.by_name.get(result.device) if inventory is not None else None
    made = realised(held.device) if held.placement is not None else None
    static = offered.mig if isinstance(offered, MigPartition) else None
    profile = offered.profile.name if isinstance(offered, MigPartition | PossibleMig) else None
    return DeviceFacts(
        uuid=held.uuid or (made.uuid if made is not None else None),
        parent_uuid=held.gpu_uuid if held.kind == "mig" else None,
        gpu_instance_id=made.gpu_instance_id if made else static.gpu_instance_id if static else None,
        compute_instance_id=made.compute_instance_id
        if made
        else static.compute_instance_id
        if static
        else None,
        profile=made.profile_name if made is not None else profile,
        mps=_mps(held),
        driver_version=inventory.versions.driver if inventory is not None else None,
    )


def _mps(held: HeldDevice) -> MpsFacts | None:
    match held.usage:
        case MpsShared(_, memory, percentage):
            return MpsFacts(percentage, memory)
        case _:
            return None
