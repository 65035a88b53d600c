"""What commands other than `run` find out about this machine, without a daemon. They change nothing."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dra_driver.app.platforms import Platform, platform_of
from dra_driver.errors import DraDriverError, InvalidConfigError, NvmlUnavailableError, StateError
from dra_driver.host.sysfs import Sysfs
from dra_driver.model.gpu import Gpu
from dra_driver.model.inventory import Inventory, OfferedDevice
from dra_driver.model.units import counted
from dra_driver.nvml.reader import NvmlReader
from dra_driver.settings import Settings, config_values

if TYPE_CHECKING:
    from dra_driver.diagnostics.doctor.checks import Check
    from dra_driver.diagnostics.rules.mig_map import GpuMap
    from dra_driver.diagnostics.rules.prepared_claims import NodeClaims
    from dra_driver.diagnostics.rules.top_data import NodeHealth
    from dra_driver.diagnostics.snapshot import NodeSnapshot
    from dra_driver.inventory.detachment import Detachments
    from dra_driver.journal.rules.debts import Debt
    from dra_driver.kube.client import ApiClient
    from dra_driver.model.mig import MigProfile
    from dra_driver.slices.rules.build import Taints
    from dra_driver.validation.documents import Document
    from dra_driver.validation.machine_fit import MachineFit

JsonObject = dict[str, Any]

_API_TIMEOUT_S = 4.0
_NVML_WAIT_S = 4.0
"""Less than a check of `doctor` may take: what is written down is shown also while NVML hangs."""


class OwnershipUnknownError(StateError):
    """It cannot be told which of a machine's MIG devices the driver made."""


def slices_to_publish(settings: Settings, *, is_empty: bool = False) -> tuple[list[JsonObject], list[str]]:
    """The slices that `run` would publish on this machine, and what is not published as asked for. An empty machine has
    no ill devices, no claims and no debts, and what the driver made for claims is gone.

    Raises: NvmlUnavailableError; for an empty machine OwnershipUnknownError.
    """
    from dra_driver.diagnostics.state_on_disk import OwnershipOnDisk
    from dra_driver.host.driver_root import DriverRoot
    from dra_driver.inventory.discovery import discover_once
    from dra_driver.inventory.host_facts import HostView
    from dra_driver.slices.rules.build import build_pool, none_withheld, untainted
    from dra_driver.slices.rules.diff import Owner, slice_changes

    platform = _platform(settings)
    boot_id = _boot_id(platform) or "unknown"
    ownership = OwnershipOnDisk(settings.plugin_directory, boot_id, ended=is_empty)

    def on_demand(gpu: Gpu) -> bool:
        # What the driver has cut comes back, also where this command was not told that the driver cuts GPUs.
        return _is_on_demand(settings, gpu) or (is_empty and ownership.makes_devices_of(gpu.uuid))

    reader = NvmlReader(platform.load_nvml, on_demand)
    with closing(reader.session):
        files = DriverRoot(platform.paths, nodes=platform.nodes)
        host = HostView(platform.paths, imex=settings.imex_channel is not None, files=files)
        inventory = discover_once(reader, host, ownership)
    if is_empty and ownership.unread is not None and any(gpu.mig_enabled for gpu in inventory.gpus):
        raise OwnershipUnknownError(f"which MIG devices the driver made is not known: {ownership.unread}")
    taints, withheld, unread = (
        (untainted, none_withheld, []) if is_empty else _kept_taints(settings, _boot_id(platform))
    )
    pool = build_pool(inventory, settings.node_name, settings.sharing, taints, withheld)
    changes = slice_changes(pool, (), Owner(settings.driver_name, settings.node_name, ""))
    slices = [
        {**entry, "metadata": {"generateName": entry["metadata"]["generateName"]}}
        for entry in changes.creates
    ]
    return slices, [*_unread(inventory), *unread, *pool.faults, *pool.notes]


def _kept_taints(
    settings: Settings, boot_id: str | None
) -> tuple[Taints, Callable[[OfferedDevice], bool], list[str]]:
    """The taints that devices have, and which ones are withdrawn, by what the driver keeps on disk; and what of that
    could not be read. The API server is not asked whether it keeps taints."""
    from dra_driver.diagnostics.state_on_disk import read_state
    from dra_driver.health.rules.taints import TaintPolicy, device_taints, instances_by_device, is_withdrawn
    from dra_driver.journal.rules.debts import withholding
    from dra_driver.slices.rules.build import none_withheld

    state = read_state(settings.plugin_directory, boot_id)
    states = {entry.target: entry for entry in state.health}
    instances = instances_by_device(state.owned)
    policy = TaintPolicy(dict(settings.taint_effects))

    def taints(device: OfferedDevice) -> tuple[JsonObject, ...]:
        debt = withholding(state.debts, device, boot_id or "")
        return device_taints(device, states, instances, policy, debt)

    held = {held.device for record in state.records for held in record.devices if not held.admin_access}

    def withdrawn(device: OfferedDevice) -> bool:
        is_shared = settings.sharing.rule_for(device) is not None
        return is_withdrawn(device, taints(device), is_held=device.name in held, is_shared=is_shared)

    withdraws = settings.unhealthy_devices == "withdraw"
    return taints, withdrawn if withdraws else none_withheld, [*state.notes, *state.faults]


def possible_profiles(settings: Settings) -> tuple[list[MigProfile], list[str]]:
    """The MIG profiles of this machine's GPUs, each once, and what could not be read.

    Raises: NvmlUnavailableError.
    """
    from dra_driver.nvml.profiles import read_machine_profiles

    with ExitStack() as session:
        _open_nvml(_platform(settings), session)
        profiles, faults = read_machine_profiles()
    return profiles, [f"{fault.subject}: {fault.text}" for fault in faults]


def mig_maps(settings: Settings, session: ExitStack) -> tuple[list[GpuMap], list[str]]:
    """What to draw of each GPU that is in MIG mode or whose MIG devices are made on demand, and what could not be read.

    NVML stays open until `session` is closed: opening it anew after its last client takes seconds.
    Raises: NvmlUnavailableError.
    """
    from dra_driver.diagnostics.rules.mig_holders import gpu_maps, waiting_for_mig_mode
    from dra_driver.diagnostics.state_on_disk import read_state

    platform = _platform(settings)
    reader = _open_nvml(platform, session, lambda gpu: gpu.mig_enabled or _is_on_demand(settings, gpu))
    inventory = reader.read_inventory()
    notes = [*_unread(inventory), *waiting_for_mig_mode(inventory, lambda gpu: _is_on_demand(settings, gpu))]
    state = read_state(settings.plugin_directory, _boot_id(platform))
    maps = gpu_maps(inventory, state, lambda gpu: _is_on_demand(settings, gpu))
    return maps, notes + (list(state.faults) if maps else [])


def node_snapshot(settings: Settings) -> NodeSnapshot:
    """The node as `top` shows it. Raises: InvalidConfigError, StateError if a simulated machine cannot be made."""
    return _node_snapshot(settings, _platform(settings))


def _node_snapshot(settings: Settings, platform: Platform) -> NodeSnapshot:
    from dra_driver.diagnostics.snapshot import NodePaths, NodeSnapshot

    def on_demand(gpu: Gpu) -> bool:
        return _is_on_demand(settings, gpu)

    paths = NodePaths(
        node=settings.node_name,
        driver=settings.driver_name,
        plugin_directory=settings.plugin_directory,
        cdi_root=Path(settings.cdi_root),
        boot_id=_boot_id(platform),
        proc=platform.paths.proc,
        sys=platform.paths.sys,
    )
    reader = NvmlReader(platform.load_nvml, on_demand)
    return NodeSnapshot(
        paths, reader, on_demand, is_detached=lambda: _detachments(settings, platform).now() is not None
    )


def prepared_claims(settings: Settings) -> NodeClaims:
    """What is prepared on this node, from its files alone."""
    from dra_driver.diagnostics.state_on_disk import read_claims, read_state

    # A simulated machine has its own boot ID. It is read here directly, because making the platform would repair the
    # machine.
    proc = "/proc" if settings.simulator_dir is None else f"{settings.simulator_dir}/root/proc"
    directory, cdi_root = settings.plugin_directory, Path(settings.cdi_root)
    state = read_state(directory, Sysfs(proc=proc).boot_id())
    return read_claims(state, directory, cdi_root, settings.driver_name, datetime.now(UTC))


def node_debts(settings: Settings, *, pay: bool) -> tuple[Sequence[Debt], Sequence[str]]:
    """What claims that have ended owe to this node, and what could not be read of it. With `pay` everything is tried
    first. Raises: StateError if that needs rights that this process does not have."""
    from dra_driver.cdi.directory import CdiDirectory
    from dra_driver.claims.specs_without_record import SpecsWithoutRecord
    from dra_driver.diagnostics.state_on_disk import read_state
    from dra_driver.host.driver_programs import InstalledPrograms
    from dra_driver.host.nvidia_smi import NvidiaSmi
    from dra_driver.journal.debts import DebtKeeper, Debts
    from dra_driver.journal.executor import StepDispatcher
    from dra_driver.journal.gpu_locks import GpuLocks
    from dra_driver.journal.records import RecordStore
    from dra_driver.model.steps import RunMps, SetTimeSlice
    from dra_driver.mps.client import MpsClient
    from dra_driver.mps.layout import mps_layout
    from dra_driver.sharing.steps import MpsSteps, TimeSliceSteps

    directory = settings.plugin_directory
    platform = _platform(settings)
    boot_id = _boot_id(platform)
    boot = boot_id or "unknown"
    state = read_state(directory, boot_id)
    if not pay or not state.debts:
        return state.debts, state.faults
    records = RecordStore(directory / "claims")
    programs = InstalledPrograms(platform.paths.driver_root, directory / "host.lib")
    smi = NvidiaSmi(programs, _detachments(settings, platform).problem)
    without_record = SpecsWithoutRecord(records, CdiDirectory(Path(settings.cdi_root), settings.driver_name))
    runner = StepDispatcher(
        {
            SetTimeSlice: TimeSliceSteps(smi, records, boot),
            # An owed step names its device with the UUID that it had.
            RunMps: MpsSteps(
                MpsClient(mps_layout(directory)), records, without_record.mps_users, lambda _: None, boot
            ),
        }
    )
    locks = GpuLocks(directory / "locks")
    debts = Debts(directory / "debts", records, boot)
    return DebtKeeper(debts, locks, runner, boot).pay_all(), state.faults


def detach_node(settings: Settings, seconds: int, gpus: Sequence[str], *, force: bool) -> str:
    """Have every instance of the driver on this node close NVML for `seconds`; what to tell the user. `gpus` are those
    whose claims count, all if empty.

    Raises: ClaimsInTheWayError, unless `force`; InvalidConfigError if there is no such GPU; NvmlInUseError if the
    driver does not let go; StateError.
    """
    from dra_driver.diagnostics.state_on_disk import read_state
    from dra_driver.inventory.detachment import detach
    from dra_driver.model.record import ClaimRecord
    from dra_driver.model.steps import RunMps

    platform = platform_of(settings)
    chosen = _chosen_gpus(settings, gpus) if gpus and not force else None

    def concerns(record: ClaimRecord) -> bool:
        return chosen is None or not record.gpu_uuids.isdisjoint(chosen)

    def claims() -> list[str]:
        state = read_state(settings.plugin_directory, _boot_id(platform))
        if state.faults:
            raise StateError(f"not all claims are known: {state.faults[0]}")
        found = [f"{one.ref.namespace}/{one.ref.name}" for one in state.records if concerns(one)]
        owing = [
            debt.record.ref
            for debt in state.debts
            if concerns(debt.record) and any(isinstance(step, RunMps) for step in debt.steps)
        ]
        return found + [f"{ref.namespace}/{ref.name} (ended, but its MPS daemon is left)" for ref in owing]

    made = detach(_detachments(settings, platform), seconds, None if force else claims)
    return (
        f"no instance of the driver has NVML open; none opens it before {made.until}\n"
        "no device of this node is offered meanwhile; `gpu-dra-driver detach --end` ends that"
    )


def _chosen_gpus(settings: Settings, names: Sequence[str]) -> frozenset[str]:
    """The UUIDs of named GPUs, also of one that was lost, and while NVML is closed. Raises: InvalidConfigError."""
    from dra_driver.diagnostics.state_on_disk import read_state
    from dra_driver.inventory.rules.gpu_names import named_gpus
    from dra_driver.model.ids import gpu_device_names

    known: dict[str, str] = {}
    state = read_state(settings.plugin_directory)
    for record in state.records:
        known |= {held.device: held.gpu_uuid for held in record.devices}
        known |= {uuid: uuid for uuid in record.gpu_uuids}
    for entry in state.health:
        known[entry.target.gpu_uuid] = entry.target.gpu_uuid
        if entry.pci_bus_id is not None:
            known[entry.pci_bus_id] = entry.target.gpu_uuid
    platform = _platform(settings)
    sysfs = Sysfs(platform.paths.sys, platform.paths.proc)
    for bus_id, uuid in sysfs.gpus_of_the_nvidia_driver().items():
        if uuid is not None:
            known |= {bus_id: uuid, uuid: uuid}
    known |= {name: uuid for uuid, name in gpu_device_names(sorted(set(known.values()))).items()}
    inventory = None
    with suppress(NvmlUnavailableError):
        inventory = _inventory_once(platform)
    shown = {gpu.pci_bus_id for gpu in inventory.gpus} if inventory is not None else set()
    return named_gpus(names, inventory, known, is_whole=sysfs.gpu_functions() <= shown)


def attach_node(settings: Settings) -> str:
    """End what `detach_node` began. Raises: StateError."""
    detachments = _detachments(settings, platform_of(settings))
    was = detachments.now()
    detachments.end()
    return "the driver was not detached" if was is None else "the driver opens NVML again"


def doctor_checks(settings: Settings) -> list[Check]:
    """All checks of `doctor`, in the order in which it prints them."""
    from dra_driver.concurrency.bounded_call import bounded
    from dra_driver.diagnostics.doctor.checks import Shared
    from dra_driver.diagnostics.doctor.cluster import ClusterChecks
    from dra_driver.diagnostics.doctor.driver import DriverChecks
    from dra_driver.diagnostics.doctor.kubelet import KubeletChecks
    from dra_driver.diagnostics.doctor.runtime import RuntimeChecks, host_directory
    from dra_driver.diagnostics.rules.top_data import NvmlFacts
    from dra_driver.diagnostics.state_on_disk import read_state
    from dra_driver.host.processes import gpu_users

    platform = _platform(settings)
    snapshot = _node_snapshot(settings, platform)
    # NVML is opened once: in one process, one session would shut down the other's.
    inventory = Shared(lambda: bounded("NVML", snapshot.read_inventory, _NVML_WAIT_S))

    def look() -> NvmlFacts:
        with closing(snapshot):
            return snapshot.read_gpus(inventory.get())

    def node_health() -> NodeHealth:
        try:
            return snapshot.health(bounded("NVML", look, _NVML_WAIT_S))
        except DraDriverError:
            found = inventory.or_none()
            return snapshot.health(None if found is None else NvmlFacts(found))

    in_pod = "KUBERNETES_SERVICE_HOST" in os.environ
    host = host_directory(platform.paths, simulated=settings.simulate is not None, in_pod=in_pod)
    driver = DriverChecks(
        platform.paths,
        platform.nodes,
        inventory,
        node_health,
        settings.nvidia_cdi_hook_path,
        settings.dynamic_mig,
        lambda: gpu_users("/proc", _pods_of_claims(settings)),
        settings.companions,
    )
    kubelet = KubeletChecks(
        settings.driver_name,
        Path(settings.kubelet_registrar_directory_path),
        Path(settings.kubelet_plugins_directory_path),
        settings.mps_host == "external",
        Path(settings.cdi_root),
    )
    cluster = ClusterChecks(
        Shared(lambda: _api_client(settings)),
        settings.driver_name,
        settings.node_name,
        settings.dynamic_mig,
        sharing=bool(settings.sharing.entries),
        configured=settings.kubeconfig is not None or in_pod,
        claims=lambda: [record.ref for record in read_state(settings.plugin_directory).records],
    )
    return [*driver.all(), *RuntimeChecks(settings.cdi_root, host).all(), *kubelet.all(), *cluster.all()]


def machine_to_try(settings: Settings) -> tuple[MachineFit | None, str]:
    """The machine on which `validate` tries claims, None if there is none; and why there is none, or how large it is.

    Raises: NvmlUnavailableError if a simulated machine has no NVML.
    """
    from dra_driver.validation.machine_fit import MachineFit

    name = settings.simulate or "this node"
    try:
        slices, _ = slices_to_publish(settings, is_empty=True)
    except NvmlUnavailableError as error:
        if settings.simulate is not None:
            raise
        reason = str(error).partition(";")[0]
        return None, f"this one has no usable GPU ({reason}); name one with --simulate"
    except OwnershipUnknownError as error:
        return None, f"{error}; run this as root"
    fit = MachineFit(name, settings.driver_name, slices, settings.companions)
    if settings.simulate is None and not fit.devices:
        return None, "this one has no GPU; name one with --simulate"
    return fit, counted(len(fit.devices), "device")


def configured_among(documents: Sequence[Document]) -> tuple[JsonObject, Mapping[int, tuple[str, ...]]]:
    """The settings in those of the documents that are configuration files, and the faults of these by their number."""
    values: JsonObject = {}
    faults: dict[int, tuple[str, ...]] = {}
    for number, document in enumerate(documents):
        if document.is_configuration:
            try:
                values |= config_values(document.content, Path(document.file))
            except InvalidConfigError as error:
                faults[number] = error.faults or (str(error),)
    return values, faults


def _platform(settings: Settings) -> Platform:
    """The machine; its NVML stays closed while the driver is detached."""
    platform = platform_of(settings)
    return replace(platform, load_nvml=_detachments(settings, platform).guarded(platform.load_nvml))


def _is_on_demand(settings: Settings, gpu: Gpu) -> bool:
    return settings.on_demand is not None and settings.on_demand(gpu)


def _detachments(settings: Settings, platform: Platform) -> Detachments:
    from dra_driver.inventory.detachment import Detachments

    return Detachments(settings.plugin_directory, _boot_id(platform) or "unknown")


def _pods_of_claims(settings: Settings) -> set[str]:
    """UIDs of the pods for which claims are prepared on this node."""
    from dra_driver.diagnostics.state_on_disk import read_state

    records = read_state(settings.plugin_directory).records
    return {pod.uid for record in records for pod in record.claim.pods or ()}


def _boot_id(platform: Platform) -> str | None:
    return Sysfs(platform.paths.sys, platform.paths.proc).boot_id()


def _open_nvml(
    platform: Platform, session: ExitStack, on_demand: Callable[[Gpu], bool] | None = None
) -> NvmlReader:
    reader = NvmlReader(platform.load_nvml, on_demand)
    reader.reopen()
    session.callback(reader.session.close)
    return reader


def _inventory_once(platform: Platform) -> Inventory:
    from dra_driver.inventory.rules.nvlink import with_nvlink_domains

    with ExitStack() as session:
        return with_nvlink_domains(_open_nvml(platform, session).read_inventory())


def _api_client(settings: Settings) -> ApiClient:
    from dra_driver.kube.client import ApiClient
    from dra_driver.kube.endpoint import load_endpoint

    return ApiClient(load_endpoint(settings.kubeconfig), timeout_s=_API_TIMEOUT_S)


def _unread(inventory: Inventory) -> list[str]:
    """What could not be read of a machine."""
    return [f"{fault.subject}: {fault.text}" for fault in inventory.faults]
