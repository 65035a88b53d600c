"""Decides how a claim is prepared: which devices and which steps, or why it is refused.

A record names every step that may have had an effect. After a crash the next Prepare runs them again, which
is safe. So does a Prepare of a prepared claim, because a reboot or a cleanup may have removed their results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from dra_driver.api.config import DEFAULTS, MaintenanceConfig, VfioDeviceConfig
from dra_driver.api.resolve import ResolvedConfig, asks_for_maintenance, config_for_result, manages
from dra_driver.cdi.rules.metadata import cdi_id as metadata_cdi_id
from dra_driver.cdi.rules.metadata import check_names
from dra_driver.cdi.rules.spec import SpecDevice, cdi_id
from dra_driver.claims.rules.holders import (
    claims_to_wait_for,
    refuse_crowded,
    refuse_held,
    refuse_in_maintenance,
)
from dra_driver.claims.rules.imex_channels import imex_of
from dra_driver.errors import ClaimRefusedError, DeviceLostError, InvalidConfigError, RetryableError
from dra_driver.model.claim import (
    AllocatedClaim,
    ClaimRef,
    DeviceKind,
    DeviceResult,
    HeldDevice,
    Prepared,
    PreparedDevice,
)
from dra_driver.model.dataclass import dataclass, replace
from dra_driver.model.host import NO_EXTRA_DEVICES, ExtraDevices
from dra_driver.model.ids import gpu_of_device
from dra_driver.model.inventory import (
    DynamicMigDevice,
    Inventory,
    OfferedDevice,
    StaticMigDevice,
    VfioDevice,
    WholeGpu,
)
from dra_driver.model.mps import LostMps, MpsShared, SharingMode, TimeSliced
from dra_driver.model.plan import Plan, PlannedDevice, cdi_device, held_silicon
from dra_driver.model.record import ClaimRecord
from dra_driver.model.remedies import RESET_OR_REBOOT
from dra_driver.model.sharing import NO_SHARING, SharingPolicy, kind_of
from dra_driver.model.steps import (
    EVERY_METADATA_VERSION,
    BindVfio,
    CreateMig,
    LeaveMigMode,
    Limit,
    RunMps,
    SetTimeSlice,
    StartMaintenance,
    Step,
    WriteCdiSpec,
    WriteDeviceMetadata,
)
from dra_driver.power.rules.limits import NO_POWER_POLICY, PowerPolicy, limits_of
from dra_driver.sharing.rules.client_limits import max_clients
from dra_driver.sharing.rules.modes import sharing_modes_of


def our_part(claim: AllocatedClaim, driver: str) -> AllocatedClaim:
    """Return the claim without other drivers' devices and parameters. A config that is not opaque comes from
    a newer Kubernetes and may be meant for this driver.
    """
    return replace(
        claim,
        results=tuple(result for result in claim.results if result.driver == driver),
        configs=tuple(config for config in claim.configs if config.driver in (driver, None)),
        reported=None
        if claim.reported is None
        else frozenset(device for device in claim.reported if device[0] == driver),
    )


@dataclass(frozen=True, slots=True)
class Identity:
    driver: str
    pool: str
    sharing: SharingPolicy = NO_SHARING
    metadata: tuple[str, ...] = ()
    extra_devices: ExtraDevices = NO_EXTRA_DEVICES
    power: PowerPolicy = NO_POWER_POLICY


def plan_claim(
    claim: AllocatedClaim,
    inventory: Inventory,
    identity: Identity,
    others: Iterable[ClaimRecord],
    known: ClaimRecord | None = None,
    setting_for_lost: str | None = None,
) -> Plan:
    """Return the plan for this driver's part of a claim.

    `others` are the node's other records, `known` is the claim's own. `setting_for_lost` is as in `ClaimPlanner`.

    A claim with adminAccess to many GPUs is prepared without the lost ones, because a monitor is needed most
    on a node with a bad GPU. A claim that uses a lost GPU, or has no other GPU, is not prepared, unless it is
    for maintenance.

    Raises: ClaimRefusedError that names the request, the device and the remedy (DeviceHeldError if other
    claims hold the device, or its MPS daemon is full); DeviceLostError; RetryableError; InvalidConfigError.
    """
    found = _found(claim, identity.pool, inventory, known, setting_for_lost)
    _refuse_repeats(found)
    is_for_machine = is_for_virtual_machine([(result, kind_of(offered)) for result, offered in found])
    kept = _kept_usages(claim, found, known)
    parameters = _parameters(claim, found, identity.driver, is_prepared=kept is not None)
    usages = (
        sharing_modes_of(found, parameters, identity.sharing, inventory.versions) if kept is None else kept
    )
    if kept is None or known is None:
        limits = limits_of(found, parameters, identity.power)
    else:
        limits = [step for step in known.steps if isinstance(step, Limit)]
    devices = tuple(
        _planned(result, offered, usage, resolved, inventory)
        for (result, offered), usage, resolved in zip(found, usages, parameters, strict=True)
    )
    if identity.extra_devices != NO_EXTRA_DEVICES or kept is not None:
        held = known.devices if known is not None and kept is not None else None
        devices = _with_extra_devices(devices, identity.extra_devices, inventory, held)
    maintenance = _maintenance(found, parameters) if kept is None or known is None else known.maintenance
    waits_for: tuple[str, ...] = ()
    if kept is None:
        wanted = [(device.result.request, device.held()) for device in devices]
        records = list(others)
        refuse_held(wanted, records, limits)
        if maintenance is not None:
            waits_for = claims_to_wait_for(maintenance, records)
        else:
            # A claim that already holds a device came before the maintenance claim, which waits for it, also after a
            # reboot.
            came_before = {held.device for held in known.devices} if known is not None else set()
            refuse_in_maintenance([one for one in wanted if one[1].device not in came_before], records)
        most = {
            device.offered.name: max_clients(device.offered.gpu, inventory.versions)
            for device in devices
            if isinstance(device.usage, MpsShared)
        }
        refuse_crowded(wanted, records, most)
    versions = EVERY_METADATA_VERSION if is_for_machine else identity.metadata
    steps = _steps(devices, limits, _metadata(claim, devices, known, versions), known)
    return Plan(claim, devices, (maintenance, *steps) if maintenance is not None else steps, waits_for)


def _maintenance(
    found: Sequence[tuple[DeviceResult, OfferedDevice]], parameters: Sequence[ResolvedConfig]
) -> StartMaintenance | None:
    """Refuse a MIG device on demand, which may not exist yet."""
    configs = [one.config for one in parameters if isinstance(one.config, MaintenanceConfig)]
    if not configs:
        return None
    for (result, offered), resolved in zip(found, parameters, strict=True):
        if resolved.config != configs[0]:
            raise ClaimRefusedError(
                f"request {result.request}: all requests of a maintenance claim need the same MaintenanceConfig; use "
                "two claims"
            )
        if isinstance(offered, DynamicMigDevice):
            raise ClaimRefusedError(
                f"request {result.request}: device {offered.name} is created on demand, so it cannot have a "
                "MaintenanceConfig; request the whole GPU"
            )
    gpus = tuple(sorted({offered.gpu.uuid for _, offered in found}))
    return StartMaintenance(gpus, configs[0].policy, configs[0].timeout_s)


def is_for_virtual_machine(devices: Sequence[tuple[DeviceResult, DeviceKind]]) -> bool:
    """Whether a claim's devices go to a virtual machine.

    Raises: ClaimRefusedError if only some do, because the NVIDIA driver's files would reach the virtual
    machine's pod; or if one is requested with adminAccess.
    """
    passed = [result for result, kind in devices if kind == "vfio"]
    others = [result for result, kind in devices if kind != "vfio"]
    for result in passed:
        if others:
            raise ClaimRefusedError(
                f"requests {result.request} and {others[0].request}: device {result.device} is for a virtual machine, "
                f"and device {others[0].device} is for containers, so one claim cannot have both; use two claims"
            )
        if result.admin_access:
            raise ClaimRefusedError(
                f"request {result.request}: device {result.device} is for a virtual machine, which adminAccess "
                "cannot monitor; request a device of type gpu or mig"
            )
    return bool(passed)


def _planned(
    result: DeviceResult,
    offered: OfferedDevice,
    usage: SharingMode,
    resolved: ResolvedConfig,
    inventory: Inventory,
) -> PlannedDevice:
    config = resolved.config
    if isinstance(config, VfioDeviceConfig):
        prefers = config.iommu_backend == "PreferIommuFD"
        return PlannedDevice(
            result, offered, prefers_iommufd=prefers, has_api_device=config.enable_api_device
        )
    return PlannedDevice(result, offered, usage, inventory.gpus if _manages(result, resolved) else ())


def _found(
    claim: AllocatedClaim,
    pool: str,
    inventory: Inventory,
    known: ClaimRecord | None,
    setting_for_lost: str | None,
) -> list[tuple[DeviceResult, OfferedDevice]]:
    found: list[tuple[DeviceResult, OfferedDevice]] = []
    lost: DeviceLostError | None = None
    for result in claim.results:
        try:
            device = _find(
                result, pool, inventory, known, setting_for_lost, is_maintenance=asks_for_maintenance(claim)
            )
            found.append((result, _as_held(device, known)))
        except DeviceLostError as error:
            has_it = known is not None and any(held.device == result.device for held in known.devices)
            if has_it or not result.admin_access:
                raise
            lost = error
    if lost is not None and not found:
        raise lost
    return found


def _kept_usages(
    claim: AllocatedClaim, found: Sequence[tuple[DeviceResult, OfferedDevice]], known: ClaimRecord | None
) -> list[SharingMode] | None:
    """Keep a prepared claim's sharing modes: its pod may be running, so a new policy or release must not
    change them.
    """
    if known is None or known.phase != "prepared" or known.claim != claim:
        return None
    silicon = [(offered.name, offered.uuid, offered.gpu.uuid) for _, offered in found]
    if silicon != [(held.device, held.uuid, held.gpu_uuid) for held in known.devices]:
        return None
    return [held.usage for held in known.devices]


def _parameters(
    claim: AllocatedClaim,
    found: Sequence[tuple[DeviceResult, OfferedDevice]],
    driver: str,
    *,
    is_prepared: bool,
) -> list[ResolvedConfig]:
    """Use the defaults if a prepared claim's parameters, which a newer release accepted, are unreadable."""
    resolved = []
    for result, offered in found:
        kind = kind_of(offered)
        try:
            resolved.append(config_for_result(result, claim.configs, driver, kind))
        except InvalidConfigError:
            if not is_prepared:
                raise
            resolved.append(ResolvedConfig(DEFAULTS[kind]))
    return resolved


def _manages(result: DeviceResult, resolved: ResolvedConfig) -> bool:
    return result.admin_access and manages(resolved.config)


def _with_extra_devices(
    devices: Sequence[PlannedDevice],
    extra_devices: ExtraDevices,
    inventory: Inventory,
    held: Sequence[HeldDevice] | None,
) -> tuple[PlannedDevice, ...]:
    """Keep what a prepared claim has in `held`, even if the node's configuration has changed."""
    planned = []
    for number, device in enumerate(devices):
        if isinstance(device.offered, VfioDevice):
            planned.append(device)
        elif held is not None:
            planned.append(replace(device, imex=held[number].imex, host_devices=held[number].host_devices))
        else:
            imex = imex_of(device.result, device.offered, extra_devices.imex, inventory)
            planned.append(replace(device, imex=imex, host_devices=extra_devices.host_devices))
    return tuple(planned)


def _metadata(
    claim: AllocatedClaim,
    devices: Sequence[PlannedDevice],
    known: ClaimRecord | None,
    versions: tuple[str, ...],
) -> tuple[WriteDeviceMetadata, ...]:
    """Keep a prepared claim's versions, or none: else its containers would see different files, and a step
    that disappeared from the record would never be undone.
    """
    steps: tuple[WriteDeviceMetadata, ...] = (WriteDeviceMetadata(versions),) if versions and devices else ()
    if known is not None and known.devices == tuple(device.held() for device in devices):
        kept = tuple(step for step in known.steps if isinstance(step, WriteDeviceMetadata))
        steps = kept if kept or known.phase == "prepared" else steps
    if steps:
        check_names(claim)
    return steps


def _steps(
    devices: Sequence[PlannedDevice],
    limits: Iterable[Limit],
    metadata: Iterable[Step],
    known: ClaimRecord | None,
) -> tuple[Step, ...]:
    used = [device for device in devices if not device.result.admin_access]
    whole = {
        LeaveMigMode(offered.gpu.uuid, offered.gpu.pci_bus_id)
        for offered in (device.offered for device in used)
        if isinstance(offered, WholeGpu | VfioDevice) and offered.gpu.partitioning is not None
    }
    bindings = {step for device in devices for step in _bindings(device.offered, known)}
    made = {_creation(device.offered) for device in used if isinstance(device.offered, DynamicMigDevice)}
    time_slices = {
        SetTimeSlice(device.offered.gpu.uuid, device.usage.interval)
        for device in devices
        if isinstance(device.usage, TimeSliced) and device.usage.interval
    }
    daemons = {
        device.usage.spec.device: device.usage.spec
        for device in devices
        if isinstance(device.usage, MpsShared)
    }
    return (
        *sorted(whole, key=lambda step: step.gpu_uuid),
        *sorted(made, key=lambda step: step.device),
        *sorted(time_slices, key=lambda step: step.gpu_uuid),
        *limits,
        *(RunMps(daemons[name]) for name in sorted(daemons)),
        *sorted(bindings, key=lambda step: step.device),
        *metadata,
        *((WriteCdiSpec(),) if devices else ()),
    )


def _bindings(offered: OfferedDevice, known: ClaimRecord | None) -> Iterator[BindVfio]:
    """Yield no step for a card that an administrator bound. Keep a step of the record, which would never be
    undone otherwise.
    """
    if not isinstance(offered, VfioDevice):
        return
    card = offered.card
    begun = [
        step
        for step in (() if known is None else known.steps)
        if isinstance(step, BindVfio) and step.device == offered.name
    ]
    if begun:
        yield from begun
    elif card.by_us or not card.is_bound:
        yield BindVfio(offered.name, card.gpu_uuid, card.bus_id, card.vfio_driver)


def _creation(device: DynamicMigDevice) -> CreateMig:
    profile = device.profile
    return CreateMig(
        device.name,
        device.gpu.uuid,
        device.gpu.pci_bus_id,
        profile.profile_id,
        profile.name,
        device.placement,
    )


def _elsewhere(missing: str | None) -> str:
    if missing is None:
        return "delete the pod so that it starts on another GPU"
    return f"set {missing} and then delete the pod (without this setting, a new pod may get the same GPU)"


def _find(
    result: DeviceResult,
    pool: str,
    inventory: Inventory,
    known: ClaimRecord | None,
    setting_for_lost: str | None,
    *,
    is_maintenance: bool,
) -> OfferedDevice:
    if result.pool != pool:
        raise ClaimRefusedError(
            f"request {result.request}: device {result.device} was allocated from pool {result.pool}, but this "
            f"node serves pool {pool}; the pod is on a node that its claim was not allocated for"
        )
    withheld = inventory.withheld_by_name.get(result.device)
    if withheld is not None and known is not None and _holds(known, withheld.uuid):
        return withheld
    device = inventory.usable(result.device)
    if (device is None or result.admin_access) and _is_passed_through(result.device, inventory):
        # A monitor's claim is prepared without this device, as it would be without a lost GPU.
        raise (DeviceLostError if result.admin_access else RetryableError)(
            f"request {result.request}: the GPU of device {result.device} was passed to a virtual machine and is not "
            "back with the NVIDIA driver yet; the kubelet retries"
        )
    if device is not None:
        if device.gpu.uuid in inventory.lost_uuids and not (result.admin_access and is_maintenance):
            raise DeviceLostError(
                f"request {result.request}: device {device.name} is on GPU {device.gpu.uuid}, which no longer "
                f"answers; {RESET_OR_REBOOT}, or {_elsewhere(setting_for_lost)}"
            )
        return device
    if withheld is None:
        raise ClaimRefusedError(
            f"request {result.request}: device {result.device} of pool {pool} does not exist on this node; "
            "delete the pod and its claim so that the scheduler allocates another device"
        )
    raise ClaimRefusedError(
        f"request {result.request}: device {result.device} is MIG device {withheld.uuid}, which gpu-dra-driver "
        "did not create and does not use; destroy it with `nvidia-smi mig`, then delete the pod"
    )


def _is_passed_through(name: str, inventory: Inventory) -> bool:
    """Return True also for a GPU that is being returned and has no name, because NVML does not list it yet."""
    gpu = gpu_of_device(name)
    shown = {one.uuid for one in inventory.every_gpu}
    return any(
        card.by_us and card.gpu_uuid not in shown and inventory.gpu_names.get(card.gpu_uuid, gpu) == gpu
        for card in inventory.cards
    )


def _holds(known: ClaimRecord, uuid: str) -> bool:
    return any(held.uuid == uuid for held in known.devices)


def _as_held(device: OfferedDevice, known: ClaimRecord | None) -> OfferedDevice:
    """Keep the device as it was created on demand, even if the node now has it as a static one."""
    is_ours = known is not None and any(
        held.device == device.name and held.placement is not None for held in known.devices
    )
    if is_ours and isinstance(device, StaticMigDevice):
        return DynamicMigDevice(device.name, device.gpu, device.profile, device.placement)
    return device


def _refuse_repeats(found: Sequence[tuple[DeviceResult, OfferedDevice]]) -> None:
    """Allow a device twice with adminAccess or as different shares."""
    used: list[tuple[DeviceResult, OfferedDevice]] = []
    for result, offered in found:
        if result.admin_access:
            continue
        for other, same in used:
            if same.name == offered.name and other.share_id == result.share_id:
                raise ClaimRefusedError(
                    f"request {result.request}: device {offered.name} is allocated twice in this claim; "
                    "delete the pod and its claim so that the scheduler allocates it again"
                )
            if same.name != offered.name and _overlap(same, offered):
                raise ClaimRefusedError(
                    f"requests {other.request} and {result.request}: devices {same.name} and {offered.name} overlap "
                    "on the same GPU; delete the claim so that the scheduler allocates it again"
                )
        used.append((result, offered))


def _overlap(one: OfferedDevice, other: OfferedDevice) -> bool:
    if one.gpu.uuid != other.gpu.uuid:
        return False
    if isinstance(one, DynamicMigDevice) and isinstance(other, DynamicMigDevice):
        return one.placement.overlaps(other.placement)
    return not kind_of(one) == kind_of(other) == "mig"


def lost_claim(uid: str, devices: Iterable[SpecDevice], inventory: Inventory) -> ClaimRecord | None:
    """Return a record for a claim whose own was lost; None if the node has none of its devices."""
    devices = sorted(devices, key=lambda one: one.device)
    held = tuple(
        replace(
            held_silicon(inventory.by_name[one.device]),
            admin_access=one.admin_access,
            share_id=one.share_id,
            usage=LostMps() if one.uses_mps else None,
        )
        for one in devices
        if one.device in inventory.by_name
    )
    if not held:
        return None
    gpus = sorted({uuid for one in devices for uuid in one.in_maintenance})
    steps = (StartMaintenance(tuple(gpus), "Wait", 0),) if gpus else ()
    return ClaimRecord(AllocatedClaim(ClaimRef("?", "?", uid), ()), "prepared", "", held, steps)


def answer(
    claim: AllocatedClaim, driver: str, steps: Iterable[Step], devices: Iterable[HeldDevice]
) -> Prepared:
    """Return the answer, the same for every Prepare of a claim. The first device of each request also mounts
    the request's metadata file.
    """
    uid = claim.ref.uid
    prepared = {(held.device, held.share_id) for held in devices}
    results = [result for result in claim.results if (result.device, result.share_id) in prepared]
    is_described = any(isinstance(step, WriteDeviceMetadata) for step in steps)
    first = {result.base_request: number for number, result in reversed([*enumerate(results)])}
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
            for number, result in enumerate(results)
        )
    )
