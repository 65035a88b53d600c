"""The step that writes a claim's CDI spec, and the host's extra devices in it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, assert_never

import structlog

from dra_driver.cdi.directory import CdiDirectory
from dra_driver.cdi.rules.spec import (
    MAINTENANCE,
    claim_spec,
    common_edits,
    node_paths,
    vfio_spec,
    with_mps,
    with_nodes,
)
from dra_driver.errors import RetryableError, StateError
from dra_driver.host.device_nodes import DevCharLinks, DeviceNodeReader, HostDeviceFinder
from dra_driver.host.driver_root import DriverRoot
from dra_driver.host.gpu_nodes import GpuNodes
from dra_driver.host.imex import ImexChannelNodes, ImexDaemon
from dra_driver.host.vfio import CONTAINER_NODE, IOMMU_NODE, VfioCards
from dra_driver.journal.ledger import Ledger
from dra_driver.model.claim import ClaimRef
from dra_driver.model.dataclass import dataclass, replace
from dra_driver.model.driver_files import CdiDevice, CdiMount, DriverFiles, FindPrograms, HostNode
from dra_driver.model.gpu import Gpu
from dra_driver.model.host import HOST_DEVICE_NODES, HOST_DEVICE_REMEDIES, HostDevice, HostPaths, ImexChannels
from dra_driver.model.inventory import DynamicMigDevice, StaticMigDevice, VfioDevice, WholeGpu
from dra_driver.model.mps import MpsShared
from dra_driver.model.plan import Plan, PlannedDevice
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import Step, maintenance_of
from dra_driver.mps_host.host_files import MpsLayout

_log = structlog.get_logger(__name__)


class ExtraDeviceFinder:
    """Changes nothing on the host.

    It looks for IMEX channels before the first step, and again when the spec is built.
    """

    def __init__(self, paths: HostPaths, programs: FindPrograms, *, nodes: DeviceNodeReader) -> None:
        self._finder = HostDeviceFinder(paths, nodes)
        self._channels = ImexChannelNodes(paths.proc)
        self._daemon = ImexDaemon(paths, programs)
        self._lock = threading.Lock()
        self._reported: set[HostDevice] = set()

    def check(self, plan: Plan) -> None:
        """Raise RetryableError if the claim needs IMEX channels, but the NVIDIA driver has none."""
        channels = channels_of(plan)
        if channels is not None:
            self._channels.nodes(channels)

    def refuse_unready_imex(self, timeout_s: float) -> None:
        """Raise RetryableError unless nvidia-imex reports within `timeout_s` seconds that it is ready."""
        self._daemon.refuse_unready(timeout_s)

    def with_extra_devices(self, device: CdiDevice, planned: PlannedDevice) -> CdiDevice:
        for kind in planned.host_devices:
            found = self._finder.find(kind)
            self._report(kind, is_there=bool(found.nodes))
            device = with_host_devices(device, found.nodes, found.mounts)
        return device

    def channel_nodes(self, plan: Plan) -> tuple[HostNode, ...]:
        """Return the nodes of the plan's IMEX channels. Raises: RetryableError if the NVIDIA driver has none."""
        channels = channels_of(plan)
        if channels is None:
            return ()
        return tuple(HostNode(node, node.path) for node in self._channels.nodes(channels))

    def _report(self, kind: HostDevice, *, is_there: bool) -> None:
        with self._lock:
            if is_there:
                self._reported.discard(kind)
                return
            if kind in self._reported:
                return
            self._reported.add(kind)
        _log.warning("host_devices_missing", notes=[note(kind)])


def channels_of(plan: Plan) -> ImexChannels | None:
    """Return the IMEX channels of a plan, the same for all its devices that have any."""
    return next((planned.imex for planned in plan.devices if planned.imex is not None), None)


def with_host_devices(device: CdiDevice, nodes: Sequence[HostNode], mounts: Sequence[CdiMount]) -> CdiDevice:
    here = {node.node.path for node in (*device.nodes, *device.drm)}
    return replace(
        device,
        nodes=(*device.nodes, *(node for node in nodes if node.node.path not in here)),
        mounts=(*device.mounts, *mounts),
    )


def note(kind: HostDevice) -> str:
    paths = HOST_DEVICE_NODES[kind][-1:] if kind == "nvswitch" else HOST_DEVICE_NODES[kind]
    missing, remedy = " and no ".join(paths), HOST_DEVICE_REMEDIES[kind]
    return f"hostDevices {kind} is configured, but this node has no {missing}; {remedy}"


@dataclass(eq=False)
class CdiSteps:
    """Each spec is built from the current files on disk, because paths become stale when the NVIDIA driver or the
    toolkit is replaced.
    """

    driver_name: str
    specs: CdiDirectory
    installation: DriverRoot
    nodes: GpuNodes
    driver_version: Callable[[], str | None]
    mps: MpsLayout
    ledger: Ledger | None
    extra_devices: ExtraDeviceFinder
    cards: VfioCards
    dev_char: DevCharLinks | None = None

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._reported: tuple[str, ...] = ()
        self._common: tuple[DriverFiles, tuple[HostNode, ...], dict[str, Any]] | None = None

    def do(self, step: Step, plan: Plan) -> None:
        """Write the claim's spec. Raises: RetryableError if the host lacks a file or node; StateError."""
        spec = self.spec(plan)
        self.specs.write(plan.claim.ref.uid, spec)
        if self.dev_char is not None:
            self.dev_char.make(node_paths(spec))

    def spec(self, plan: Plan) -> dict[str, Any]:
        """Return the spec as it would be written now."""
        if any(isinstance(one.offered, VfioDevice) for one in plan.devices):
            return vfio_spec(
                plan.claim.ref.uid, self.driver_name, [self._bare_device(one) for one in plan.devices]
            )
        files = self.installation.files(self.driver_version())
        self._report(files.notes)
        used = {device.cdi_device for device in plan.devices if not device.result.admin_access}
        devices = [
            replace(self._device(one), admin_access=one.cdi_device not in used) for one in plan.devices
        ]
        managing = {one.result.request: one for one in reversed(plan.devices) if one.managed}
        # Prefer a device that no other request of the claim uses; otherwise the other request's containers get
        # the management nodes too.
        managing |= {
            one.result.request: one
            for one in reversed(plan.devices)
            if one.managed and one.cdi_device not in used
        }
        if managing:
            devices = self._with_management(devices, managing)
        step = maintenance_of(plan.steps)
        if step is not None:
            env = MAINTENANCE + ",".join(step.gpu_uuids)
            devices = [replace(device, env=(*device.env, env)) for device in devices]
        common = self._common_edits(
            files, self.extra_devices.channel_nodes(plan) if plan.has_extra_devices else ()
        )
        return claim_spec(plan.claim.ref.uid, self.driver_name, files, devices, common)

    def _with_management(
        self, devices: list[CdiDevice], managing: Mapping[str, PlannedDevice]
    ) -> list[CdiDevice]:
        """Add the management nodes to one device of each managing request: a container gets all devices of a
        request.
        """
        gpus = next(iter(managing.values())).managed
        nodes, missing = self.nodes.management(
            [self._minor(gpu) for gpu in gpus], has_mig=any(gpu.mig_capable for gpu in gpus)
        )
        if missing:
            _log.warning("management_incomplete", missing=list(missing))
        names = {one.cdi_device for one in managing.values()}
        return [
            replace(device, nodes=tuple(dict.fromkeys((*device.nodes, *nodes))))
            if device.name in names
            else device
            for device in devices
        ]

    def _common_edits(self, files: DriverFiles, channels: tuple[HostNode, ...]) -> dict[str, Any]:
        """Return edits that are cached until the host's files or the channels change; callers must not modify them."""
        known = self._common
        if known is not None and known[0] is files and known[1] == channels:
            return known[2]
        edits = common_edits(files)
        if channels:
            edits = with_nodes(edits, channels)
        self._common = (files, channels, edits)
        return edits

    def _report(self, notes: tuple[str, ...]) -> None:
        with self._lock:
            if notes == self._reported:
                return
            self._reported = notes
        if notes:
            _log.warning("driver_files_incomplete", notes=list(notes))

    def undo(self, step: Step, ref: ClaimRef) -> None:
        self.specs.remove(ref.uid)

    def in_place(self, step: Step, record: ClaimRecord) -> bool:
        return self.specs.read(record.ref.uid) is not None

    def _device(self, planned: PlannedDevice) -> CdiDevice:
        device = self._bare_device(planned)
        if planned.host_devices:
            device = self.extra_devices.with_extra_devices(device, planned)
        match planned.usage:
            case MpsShared() as usage:
                return with_mps(device, usage, self.mps.directories(usage.spec.device))
            case _:
                return device

    def _bare_device(self, planned: PlannedDevice) -> CdiDevice:
        match planned.offered:
            case WholeGpu(gpu=gpu):
                return self.nodes.whole_gpu(planned.cdi_device, self._minor(gpu), gpu.pci_bus_id)
            case StaticMigDevice(gpu=gpu, mig=mig):
                return self.nodes.mig_device(
                    planned.cdi_device,
                    gpu.minor,
                    gpu.pci_bus_id,
                    mig.gpu_instance_id,
                    mig.compute_instance_id,
                    graphics="+gfx" in mig.profile.name,
                )
            case DynamicMigDevice() as possible:
                return self._created_mig_device(planned, possible)
            case VfioDevice() as device:
                return self._for_virtual_machine(planned, device)
            case _:
                assert_never(planned.offered)

    def _created_mig_device(self, planned: PlannedDevice, possible: DynamicMigDevice) -> CdiDevice:
        gpu = possible.gpu
        made = None if self.ledger is None else self.ledger.created_instance(possible.name)
        if made is None or made.gpu_instance_id is None or made.compute_instance_id is None:
            if planned.result.admin_access:
                # A claim with adminAccess creates no MIG device. It monitors through the GPU's node.
                return self.nodes.whole_gpu(planned.cdi_device, self._minor(gpu), None)
            raise StateError(
                f"MIG device {possible.name} does not exist, although an earlier step should have created it; this is "
                "a bug in gpu-dra-driver; please report it"
            )
        return self.nodes.mig_device(
            planned.cdi_device,
            made.gpu_minor if made.gpu_minor is not None else gpu.minor,
            gpu.pci_bus_id,
            made.gpu_instance_id,
            made.compute_instance_id,
            graphics="+gfx" in possible.profile.name,
        )

    def _for_virtual_machine(self, planned: PlannedDevice, device: VfioDevice) -> CdiDevice:
        """Return the device with the card's current nodes; their names may change when vfio takes the card."""
        card, own = device.card, None
        if planned.prefers_iommufd and self.cards.node(IOMMU_NODE) is not None:
            own = self.cards.vfio_device(card.bus_id)
        interface, path = CONTAINER_NODE, f"/dev/vfio/{card.iommu_group}"
        # A kernel without VFIO_DEVICE_CDEV names the device but has no node for it.
        if own is not None and self.cards.node(f"/dev/vfio/devices/{own}") is not None:
            interface, path = IOMMU_NODE, f"/dev/vfio/devices/{own}"
        else:
            self.cards.ready_container(None)
        nodes = []
        for wanted in (interface, path) if planned.has_api_device else (path,):
            node = self.cards.node(wanted)
            if node is None:
                raise RetryableError(
                    f"device node {wanted} of {device.name} is missing on the host, and no virtual machine can use the "
                    "GPU without it; see the kernel log for vfio errors"
                )
            nodes.append(node)
        return CdiDevice(planned.cdi_device, tuple(nodes))

    def _minor(self, gpu: Gpu) -> int | None:
        """Read the minor number, which may change with the MIG mode, from a file, because NVML may hang."""
        if gpu.partitioning is None or gpu.pci_bus_id is None:
            return gpu.minor
        now = self.nodes.minor(gpu.pci_bus_id)
        return gpu.minor if now is None else now
