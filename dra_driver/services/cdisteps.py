"""The step that writes a claim's CDI spec, and its undo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from dra_driver.core.cdi import claim_spec
from dra_driver.core.planning import Plan, PlannedDevice
from dra_driver.model.driver_files import CdiDevice, DriverFiles
from dra_driver.model.inventory import MigPartition, WholeGpu
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import Step


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
    ) -> None:
        self._driver_name = driver_name
        self._specs = specs
        self._installation = installation
        self._nodes = nodes
        self._driver_version = driver_version

    def do(self, step: Step, plan: Plan) -> None:
        """Write the claim's spec. Raises: RetryableError if the host lacks a file or node; StateError."""
        self._specs.write(plan.claim.ref.uid, self.spec(plan))

    def spec(self, plan: Plan) -> dict[str, Any]:
        """The spec as it would be written now."""
        return claim_spec(
            plan.claim.ref.uid,
            self._driver_name,
            self._installation.files(self._driver_version()),
            [self._device(device) for device in plan.devices],
        )

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
        match planned.offered:
            case WholeGpu(name, gpu):
                return self._nodes.whole_gpu(name, gpu.minor, gpu.pci_bus_id)
            case MigPartition(name, gpu, mig):
                return self._nodes.mig_device(
                    name,
                    gpu.minor,
                    gpu.pci_bus_id,
                    mig.gpu_instance_id,
                    mig.compute_instance_id,
                    graphics="+gfx" in mig.profile.name,
                )
