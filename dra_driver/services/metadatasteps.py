"""The step that tells a claim's containers which devices they have, and its undo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from dra_driver.core.devicemetadata import DescribedDevice, described, encode, requests_of
from dra_driver.core.planning import Plan
from dra_driver.errors import NvmlUnavailableError
from dra_driver.model.claim import AllocatedClaim
from dra_driver.model.inventory import Inventory
from dra_driver.model.mig import OwnedInstance
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import Step, WriteDeviceMetadata


class MetadataFiles(Protocol):
    """The files on the host and the CDI specs that mount them."""

    def write(self, claim: AllocatedClaim, request: str, encode: Callable[[int], bytes]) -> None:
        """Write the file of a request, if its content for the present generation differs, and its CDI spec."""

    def in_place(self, claim: AllocatedClaim) -> bool:
        """Whether all files and CDI specs of the claim are there."""

    def remove(self, claim: AllocatedClaim) -> None:
        """Remove them, whatever part is there."""

    def forget(self, claim_uid: str) -> None:
        """Remove those of a claim of which only the UID is known."""


class MetadataSteps:
    """Does and undoes `WriteDeviceMetadata`. It runs after the steps that make devices, whose UUIDs it tells."""

    def __init__(
        self,
        files: MetadataFiles,
        inventory: Callable[[], Inventory | None],
        realised: Callable[[str], OwnedInstance | None],
    ) -> None:
        """`realised` answers the instance that stands for a MIG device on demand now."""
        self._files = files
        self._inventory = inventory
        self._realised = realised

    def do(self, step: Step, plan: Plan) -> None:
        """Write a file for each request. Raises: StateError, ClaimRefusedError; NvmlUnavailableError if the devices
        are not known any more."""
        assert isinstance(step, WriteDeviceMetadata)  # noqa: S101  the dispatcher's contract
        by_request = self._described(plan)
        for request in requests_of(plan.claim):
            self._write(plan.claim, request, by_request[request], step.versions)

    def _write(
        self, claim: AllocatedClaim, request: str, devices: list[DescribedDevice], versions: tuple[str, ...]
    ) -> None:
        self._files.write(claim, request, lambda generation: encode(claim, devices, versions, generation))

    def _described(self, plan: Plan) -> dict[str, list[DescribedDevice]]:
        inventory = self._inventory()
        if inventory is None:
            raise NvmlUnavailableError("the devices of this node are not known now, so none can be described")
        by_request: dict[str, list[DescribedDevice]] = {}
        for planned in plan.devices:
            offered = planned.offered
            made = self._realised(offered.name)
            device = described(planned.result, offered, planned.usage, inventory, made)
            by_request.setdefault(planned.result.base_request, []).append(device)
        return by_request

    def undo(self, step: Step, record: ClaimRecord) -> None:
        """Remove the claim's files; containers that run keep what they have. Raises: StateError."""
        self._files.remove(record.claim)

    def in_place(self, step: Step, record: ClaimRecord) -> bool:
        """Whether every file and CDI spec of the claim is there."""
        return self._files.in_place(record.claim)

    def forget(self, claim_uid: str) -> None:
        """Remove files that no record speaks of."""
        self._files.forget(claim_uid)
