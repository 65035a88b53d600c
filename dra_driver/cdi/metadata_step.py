"""The step that tells a claim's containers which devices they have, and its undo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dra_driver.cdi.metadata_files import MetadataFiles
from dra_driver.cdi.rules.metadata import DescribedDevice, described, encode, requests_of
from dra_driver.errors import NvmlUnavailableError
from dra_driver.model.claim import AllocatedClaim
from dra_driver.model.inventory import Inventory
from dra_driver.model.mig import OwnedInstance
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import Step, WriteDeviceMetadata


@dataclass(eq=False)
class MetadataSteps:
    """Does and undoes `WriteDeviceMetadata`. It runs after the steps that make devices, since it writes their UUIDs.

    `created_instance` answers which instance a MIG device on demand has now, by the device's name.
    """

    files: MetadataFiles
    inventory: Callable[[], Inventory | None]
    created_instance: Callable[[str], OwnedInstance | None]

    def do(self, step: Step, plan: Plan) -> None:
        """Write a file for each request. Raises: StateError, ClaimRefusedError; NvmlUnavailableError if the devices
        of the node are not known now."""
        assert isinstance(step, WriteDeviceMetadata)  # noqa: S101  the dispatcher's contract
        by_request = self._described(plan)
        for request in requests_of(plan.claim):
            self._write(plan.claim, request, by_request[request], step.versions)

    def _write(
        self, claim: AllocatedClaim, request: str, devices: list[DescribedDevice], versions: tuple[str, ...]
    ) -> None:
        self.files.write(claim, request, lambda generation: encode(claim, devices, versions, generation))

    def _described(self, plan: Plan) -> dict[str, list[DescribedDevice]]:
        inventory = self.inventory()
        if inventory is None:
            raise NvmlUnavailableError(
                "the devices of this node are not known now, so their metadata cannot be written; see the log of "
                "gpu-dra-driver for what NVML answers"
            )
        by_request: dict[str, list[DescribedDevice]] = {}
        for planned in plan.devices:
            offered = planned.offered
            made = self.created_instance(offered.name)
            device = described(planned.result, offered, planned.usage, inventory, made)
            by_request.setdefault(planned.result.base_request, []).append(device)
        return by_request

    def undo(self, step: Step, record: ClaimRecord) -> None:
        """Remove the claim's files; running containers keep what they have. Raises: StateError."""
        if record.claim.results:
            self.files.remove(record.claim)
        else:  # the claim's record was lost, and only its UID is known
            self.files.forget(record.ref.uid)

    def in_place(self, step: Step, record: ClaimRecord) -> bool:
        """Whether every file and CDI spec of the claim is there."""
        return self.files.in_place(record.claim)
