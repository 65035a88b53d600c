"""The step that writes a claim's CDI spec, and its undo."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol, assert_never

import structlog

from dra_driver.core.cdi import claim_spec, common_edits
from dra_driver.core.mpsclient import with_mps
from dra_driver.core.planning import Plan, PlannedDevice
from dra_driver.errors import StateError
from dra_driver.model.driver_files import CdiDevice, DriverFiles
from dra_driver.model.gpu import Gpu
from dra_driver.model.inventory import MigPartition, PossibleMig, WholeGpu
from dra_driver.model.mig import OwnedInstance
from dra_driver.model.mps import MpsDirectories
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import Step
from dra_driver.model.usage import MpsShared

_log = structlog.get_logger(__name__)


class Specs(Protocol):
    """The CDI directory."""

    def write(self, claim_uid: str, spec: dict[str, Any]) -> bool:
        """Write, if it differs from what is there."""

    def remove(self, claim_uid: str) -> bool:
        """Remove, if there."""

    def read(self, claim_uid: str) -> dict[str, Any] | None:
        """The claim's spec, None if there is none that can be read."""


class DriverInstallation(Protocol):
    """The driver's files on this host."""

    def files(self, nvml_version: str | None) -> DriverFiles:
        """What every container with a GPU gets."""


class DeviceNodes(Protocol):
    """The device nodes on this host."""

    def whole_gpu(self, name: str, minor: int | None, bus_id: str | None) -> CdiDevice:
        """A whole GPU."""

    def mig_device(
        self,
        name: str,
        minor: int | None,
        bus_id: str | None,
        gpu_instance: int,
        compute_instance: int,
        *,
        graphics: bool = False,
    ) -> CdiDevice:
        """A MIG device."""


class MadeInstances(Protocol):
    """The MIG devices that are made on demand."""

    def realised(self, device: str) -> OwnedInstance | None:
        """The instance that stands for a device now; None if it was not made."""

    def minor(self, gpu_uuid: str, pci_bus_id: str | None) -> int | None:
        """The GPU's device minor now: it may change with the MIG mode."""


class NoInstances:
    """Where MIG devices are not made on demand."""

    def realised(self, device: str) -> OwnedInstance | None:
        """None."""
        return None

    def minor(self, gpu_uuid: str, pci_bus_id: str | None) -> int | None:
        """Unknown."""
        return None


def _no_mps(device: str) -> MpsDirectories:
    raise StateError(f"device {device}: MPS is not set up on this node")


class CdiSteps:
    """Does and undoes `WriteCdiSpec`. The spec is made from the disk each time: a driver or toolkit that was
    replaced since must not leave containers with paths that are gone."""

    def __init__(
        self,
        driver_name: str,
        specs: Specs,
        installation: DriverInstallation,
        nodes: DeviceNodes,
        driver_version: Callable[[], str | None],
        mps_directories: Callable[[str], MpsDirectories] = _no_mps,
        instances: MadeInstances | None = None,
    ) -> None:
        self._driver_name = driver_name
        self._specs = specs
        self._installation = installation
        self._nodes = nodes
        self._driver_version = driver_version
        self._mps_directories = mps_directories
        self._instances = instances or NoInstances()
        self._lock = threading.Lock()
        self._told: tuple[str, ...] = ()
        self._common: tuple[DriverFiles, dict[str, Any]] | None = None

    def do(self, step: Step, plan: Plan) -> None:
        """Write the claim's spec. Raises: RetryableError if the host lacks a file or node; StateError."""
        self._specs.write(plan.claim.ref.uid, self.spec(plan))

    def spec(self, plan: Plan) -> dict[str, Any]:
        """The spec as it would be written now."""
        files = self._installation.files(self._driver_version())
        self._tell(files.notes)
        return claim_spec(
            plan.claim.ref.uid,
            self._driver_name,
            files,
            [self._device(device) for device in plan.devices],
            self._common_edits(files),
        )

    def _common_edits(self, files: DriverFiles) -> dict[str, Any]:
        """As `common_edits`, the same object as long as the host's files are; nobody may change it."""
        known = self._common
        if known is not None and known[0] is files:
            return known[1]
        edits = common_edits(files)
        self._common = (files, edits)
        return edits

    def _tell(self, notes: tuple[str, ...]) -> None:
        """Log what the host lacks, once until it lacks something else."""
        with self._lock:
            if notes == self._told:
                return
            self._told = notes
        if notes:
            _log.warning("driver_files_incomplete", notes=list(notes))

    def undo(self, step: Step, record: ClaimRecord) -> None:
        """Remove the claim's spec; containers that run keep what they have."""
        self._specs.remove(record.ref.uid)

    def in_place(self, step: Step, record: ClaimRecord) -> bool:
        """Whether the claim's spec file is there."""
        return self._specs.read(record.ref.uid) is not None

    def forget(self, claim_uid: str) -> None:
        """Remove a spec that no record speaks of."""
        self._specs.remove(claim_uid)

    def _device(self, planned: PlannedDevice) -> CdiDevice:
        device = self._bare_device(planned)
        match planned.usage:
            case MpsShared() as usage:
                return with_mps(device, usage, self._mps_directories(planned.offered.name))
            case _:
                return device

    def _bare_device(self, planned: PlannedDevice) -> CdiDevice:
        match planned.offered:
            case WholeGpu(gpu=gpu):
                return self._nodes.whole_gpu(planned.cdi_device, self._minor(gpu), gpu.pci_bus_id)
            case MigPartition(gpu=gpu, mig=mig):
                return self._nodes.mig_device(
                    planned.cdi_device,
                    gpu.minor,
                    gpu.pci_bus_id,
                    mig.gpu_instance_id,
                    mig.compute_instance_id,
                    graphics="+gfx" in mig.profile.name,
                )
            case PossibleMig() as possible:
                return self._made_device(planned, possible)
            case _:
                assert_never(planned.offered)

    def _made_device(self, planned: PlannedDevice, possible: PossibleMig) -> CdiDevice:
        gpu = possible.gpu
        made = self._instances.realised(possible.name)
        if made is None or made.gpu_instance_id is None or made.compute_instance_id is None:
            if planned.result.admin_access:
                # An onlooker makes nothing; the GPU's node is what there is to look through.
                return self._nodes.whole_gpu(planned.cdi_device, self._minor(gpu), None)
            raise StateError(f"MIG device {possible.name} was not made; this is a fault of the driver")
        return self._nodes.mig_device(
            planned.cdi_device,
            made.gpu_minor if made.gpu_minor is not None else gpu.minor,
            gpu.pci_bus_id,
            made.gpu_instance_id,
            made.compute_instance_id,
            graphics="+gfx" in possible.profile.name,
        )

    def _minor(self, gpu: Gpu) -> int | None:
        if gpu.partitioning is None:
            return gpu.minor
        now = self._instances.minor(gpu.uuid, gpu.pci_bus_id)
        return gpu.minor if now is None else now
