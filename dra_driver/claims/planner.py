"""What a claim gets on this node, by the devices, records and configuration of now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dra_driver.cdi.extra_devices import ExtraDeviceFinder
from dra_driver.claims.kubelet_call import KubeletCall
from dra_driver.claims.rules.imex_channels import gets_channels
from dra_driver.claims.rules.plan import answer, lost_claim, plan_claim
from dra_driver.claims.specs_without_record import SpecsWithoutRecord
from dra_driver.errors import NvmlUnavailableError
from dra_driver.inventory.discovery import Discovery
from dra_driver.journal.records import RecordStore
from dra_driver.model.claim import AllocatedClaim, DeviceResult, Prepared
from dra_driver.model.host import NO_EXTRA_DEVICES, ExtraDevices
from dra_driver.model.inventory import Inventory, OfferedDevice
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord
from dra_driver.model.sharing import NO_SHARING, SharingPolicy

_SCAN_WAIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Identity:
    """Driver and pool name of this node's devices, how claims may share them, the versions of the metadata that
    containers get, and what they get beside their GPUs."""

    driver: str
    pool: str
    sharing: SharingPolicy = NO_SHARING
    metadata: tuple[str, ...] = ()
    extra_devices: ExtraDevices = NO_EXTRA_DEVICES


@dataclass(eq=False)
class ClaimPlanner:
    """Plans claims. It takes no lock and changes nothing; it may have discovery look again.

    `setting_for_lost` returns what to set so that new pods stay away from lost GPUs, None if they do.
    """

    identity: Identity
    discovery: Discovery
    records: RecordStore
    without_record: SpecsWithoutRecord
    extra_devices: ExtraDeviceFinder
    setting_for_lost: Callable[[], str | None]

    def gpus_of(self, claim: AllocatedClaim, call: KubeletCall) -> frozenset[str]:
        """UUIDs of the GPUs whose locks the claim needs, as far as its devices are known; adminAccess needs none.

        Raises: NvmlUnavailableError."""
        known = self.discovery.inventory
        is_known = known is not None and all(result.device in known.by_name for result in claim.results)
        if self.discovery.unavailable() is not None or not is_known:
            # The devices may be newer than the last look: a MIG device made by hand, a driver loaded just now.
            self.look_again(call)
        inventory = self._inventory()
        found = (inventory.usable(result.device) for result in claim.results if not result.admin_access)
        return frozenset(device.gpu.uuid for device in found if device is not None)

    def plan(self, claim: AllocatedClaim, known: ClaimRecord | None) -> Plan:
        """The plan of a claim, whose record is `known`. Raises: as `plan_claim`; NvmlUnavailableError;
        RetryableError if the node lacks what comes beside the devices."""
        inventory = self._inventory()
        plan = plan_claim(
            claim,
            inventory,
            self.identity.pool,
            self.identity.driver,
            self._others(claim, inventory),
            self.identity.sharing,
            known,
            self.identity.metadata,
            setting_for_lost=self.setting_for_lost() if inventory.lost_uuids else None,
            extra_devices=self.identity.extra_devices,
        )
        if plan.has_extra_devices:
            self.extra_devices.check(plan)
        return plan

    def refuse_unready_imex(
        self, claim: AllocatedClaim, known: ClaimRecord | None, call: KubeletCall
    ) -> None:
        """Ask for the claims that get a channel, before the locks of GPUs: the daemon may take its time. A fabric that
        was not ready at the last look may be by now, so it is looked at again. A prepared claim keeps what it has.

        Raises: RetryableError if the fabric or the daemon is not ready.
        """
        is_prepared = known is not None and known.phase == "prepared" and known.claim == claim
        if self.identity.extra_devices.imex is None or is_prepared:
            return
        if any(device.gpu.unready_fabric is not None for _, device in self._used(claim)):
            self.look_again(call)
        if any([gets_channels(*pair) for pair in self._used(claim)]):
            self.extra_devices.refuse_unready_imex(call.left())

    def look_again(self, call: KubeletCall) -> None:
        """Have discovery look at the node's devices now."""
        self.discovery.scan_now(min(call.left(), _SCAN_WAIT_S))

    def is_usable(self) -> bool:
        """Whether the NVIDIA driver answers."""
        return self.discovery.unavailable() is None

    def answer(self, claim: AllocatedClaim, made: Plan | ClaimRecord) -> Prepared:
        """The answer to the kubelet for a claim with this plan or record."""
        held = made.devices if isinstance(made, ClaimRecord) else made.held_devices()
        return answer(claim, self.identity.driver, made.steps, held)

    def _used(self, claim: AllocatedClaim) -> Iterator[tuple[DeviceResult, OfferedDevice]]:
        """The devices that the claim does more with than look, but for those of lost GPUs."""
        inventory = self._inventory()
        for result in claim.results:
            device = inventory.usable(result.device)
            if device is not None and not result.admin_access and device.gpu.uuid not in inventory.lost_uuids:
                yield result, device

    def _inventory(self) -> Inventory:
        problem = self.discovery.unavailable()
        inventory = self.discovery.inventory
        if problem is not None or inventory is None:
            raise NvmlUnavailableError(f"devices of this node are not usable now: {problem}")
        return inventory

    def _others(self, claim: AllocatedClaim, inventory: Inventory) -> Iterator[ClaimRecord]:
        """The records of the other claims, and one for each claim whose record was lost."""
        records = self.records.all()
        for uid, record in records.items():
            if uid != claim.ref.uid:
                yield record
        if not self.records.quarantined():
            return
        for uid, devices in self.without_record.lost(records).items():
            lost = lost_claim(uid, devices, inventory)
            if uid != claim.ref.uid and lost is not None:
                yield lost
