"""What a claim's status says of its devices, from the claim's record and what is known of the node."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dra_driver.model.claim import DeviceResult
from dra_driver.model.inventory import Inventory, MigPartition, PossibleMig
from dra_driver.model.mig import OwnedInstance
from dra_driver.model.notices import PREPARED, DeviceFacts, DeviceStatus, MpsFacts
from dra_driver.model.record import ClaimRecord, HeldDevice
from dra_driver.model.usage import MpsShared

Realised = Callable[[str], OwnedInstance | None]


def device_statuses(
    record: ClaimRecord, inventory: Inventory | None, realised: Realised
) -> tuple[DeviceStatus, ...]:
    """One entry for each device of a prepared claim. `realised` answers what was made for a device on demand."""
    held_by_result: Mapping[tuple[str, str | None], HeldDevice] = {
        (held.device, held.share_id): held for held in record.devices
    }
    return tuple(
        DeviceStatus(
            pool=result.pool,
            device=result.device,
            share_id=result.share_id,
            ready=True,
            reason=PREPARED,
            message="",
            facts=_facts(result, held_by_result[result.device, result.share_id], inventory, realised),
        )
        for result in record.claim.results
        if (result.device, result.share_id) in held_by_result
    )


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
