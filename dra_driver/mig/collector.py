"""Destroying left-over MIG devices: those of ours that no claim uses, at the start, after a driver reload, and again
until nothing is in the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Literal

import structlog

from dra_driver.errors import DeviceBusyError, DraDriverError
from dra_driver.journal.lanes import Lanes, Operation
from dra_driver.mig.context import MigContext
from dra_driver.mig.create import MigDevices
from dra_driver.mig.rules.ownership import FoundInstance, foreign_to_destroy, is_left_over
from dra_driver.model.inventory import Inventory
from dra_driver.model.mig import GpuAddress, GpuInstance

_log = structlog.get_logger(__name__)

_HANGS_S = 60.0
"""How long one GPU may keep the others from being looked after."""

Adoption = Literal["leave", "destroy"]


@dataclass(eq=False)
class MigCollector:
    """Works off the ledger; a `LeftOver` of the loop over pending cleanups.

    Level-triggered: each look goes over everything. In the GPU's lane the collector decides from the disk again what is
    to be changed, because claims are prepared meanwhile, also by a second instance of the plugin.

    `adopt` says what to do, at a start or reload, with the instances on partitioned GPUs that somebody else
    made. `on_change` is called after a look that changed something, or that found other devices stuck than the
    look before. `wake` wakes the loop.
    """

    context: MigContext
    devices: MigDevices
    lanes: Lanes
    _: KW_ONLY
    adopt: Adoption
    on_change: Callable[[], None]
    wake: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._hardware = self.context.hardware
        self._ledger = self.context.ledger
        self._users = self.context.users
        self._is_asked = False
        self._failures: dict[str, str] = {}  # what failed in the last look, and why
        self._stuck: Mapping[str, str] = {}
        self._adoptable: Inventory | None = None
        self._foreign: dict[GpuAddress, frozenset[str] | None] = {}
        """The GPUs on which somebody else's instances are to be destroyed: with None all of them, else those with these
        MIG devices, which claims held when the others went."""
        self._foreign_names: Mapping[str, str] = {}  # device name to MIG UUID

    def reconcile(self, inventory: Inventory) -> None:
        """The driver was found or loaded again: look soon, and adopt what is there."""
        self._adoptable = inventory
        self.look_soon()

    def look_soon(self) -> None:
        """Something of ours was left over, or the GPUs may be others than before. A look itself may call it, too."""
        self._is_asked = True
        self.wake()

    def claim_gone(self) -> None:
        """A claim was unprepared; it may have held what is to be destroyed."""
        if self._foreign:
            self.look_soon()

    def stuck(self) -> Mapping[str, str]:
        """Devices that should be gone and cannot be destroyed, with the reason."""
        return self._stuck

    def is_left(self) -> bool:
        """Whether somebody asks, something failed in the last look, or an instance may still appear."""
        return self._is_asked or bool(self._failures) or self.devices.expects_late_instances

    def work_off(self) -> None:
        """Clear away everything that nobody uses. What fails is logged and tried again later."""
        self._is_asked = False
        adoptable, self._adoptable = self._adoptable, None
        before, self._failures = self._failures, {}
        try:
            entries, modes, users = self._ledger.all(), self._ledger.owned_modes(), self._users.by_device()
        except DraDriverError as error:
            self._adoptable = self._adoptable or adoptable
            self._failures["the ledger"] = str(error)
            self._tell_failures(before)
            return
        changed = False
        for device, entry in entries.items():
            if is_left_over(entry, self._ledger.boot_id, users):
                changed |= self._tried(device, entry.gpu_uuid, partial(self._destroy, device))
        in_use = {entry.gpu_uuid for entry in entries.values()}
        for gpu_uuid, mode in modes.items():
            if gpu_uuid not in in_use or changed:
                address = GpuAddress(gpu_uuid, mode.pci_bus_id)
                changed |= self._tried(gpu_uuid, gpu_uuid, partial(self._leave_mode, address))
        if self.adopt == "destroy":
            changed |= self._adopted(adoptable)
        self._tell_failures(before)
        stuck = {key: reason for key, reason in self._failures.items() if key in entries}
        # What becomes stuck takes its place from what is on offer, and nothing else shows that it has.
        changed |= stuck.keys() != self._stuck.keys()
        self._stuck = stuck
        if changed:
            self.on_change()

    def _tell_failures(self, before: Mapping[str, str]) -> None:
        for subject, reason in self._failures.items():
            if before.get(subject) != reason:
                _log.warning("mig_not_cleared", subject=subject, reason=reason)

    def _adopted(self, inventory: Inventory | None) -> bool:
        """Destroy the foreign instances on the partitioned GPUs of a new inventory, and those that claims still held
        at an earlier look; whether something changed."""
        if inventory is not None:
            partitioned = (gpu for gpu in inventory.gpus if gpu.partitioning is not None)
            self._foreign = {GpuAddress(gpu.uuid, gpu.pci_bus_id): None for gpu in partitioned}
            self._foreign_names = {name: device.uuid for name, device in inventory.withheld_by_name.items()}
        changed = False
        for gpu in tuple(self._foreign):
            changed |= self._tried(f"GPU {gpu.uuid}", gpu.uuid, partial(self._destroy_foreign, gpu))
        return changed

    def _tried(self, key: str, gpu_uuid: str, action: Callable[[], bool]) -> bool:
        """Do it in the GPU's lane and with NVML kept open; whether it changed something."""

        def alone(_operation: Operation) -> bool:
            with self.context.operation():
                return action()

        try:
            self.lanes.refuse_unresponsive({gpu_uuid}, _HANGS_S)
            done = self.lanes.ask({gpu_uuid}, f"the collection of {key}", alone)
            return done.result(_HANGS_S)
        except TimeoutError:
            done.cancel()  # the others are looked after
            self._failures[key] = f"it has not ended within {_HANGS_S:.0f} s"
        except DraDriverError as error:
            self._failures[key] = str(error)
        return False

    def _destroy(self, device: str) -> bool:
        """Destroy a device that is still not wanted."""
        entry, users = self._ledger.get(device), self._users.by_device()
        if entry is None or not is_left_over(entry, self._ledger.boot_id, users):
            return False
        # An orphan that a claim wants is in the way of a new one, which needs the MIG mode.
        keeps_mode = device in users
        if not self.devices.destroy(device, entry.gpu, keeps_mode=keeps_mode):
            return False
        _log.info("mig_device_cleared", device=device, gpu_uuid=entry.gpu_uuid)
        return True

    def _leave_mode(self, gpu: GpuAddress) -> bool:
        """Leave a MIG mode that nobody needs. A mode of an older boot ended with that boot and is only forgotten."""
        if not self._ledger.mode_owned(gpu.uuid):
            self._ledger.disown_mode(gpu.uuid)
            return False
        if self._users.use_others(gpu.uuid):
            return False
        return self.devices.mode.leave_if_idle(gpu)

    def _destroy_foreign(self, gpu: GpuAddress) -> bool:
        """Destroy the GPU instances that the ledger does not know and that hold no device of a claim. Those that
        claims hold stay noted for later looks."""
        ours = self._ledger.entries_of(gpu.uuid)
        lost = (self._foreign_names.get(name) for name in self._users.lost_devices())
        found = [
            FoundInstance(instance, self._hardware.compute_instances(*gpu, instance.gpu_instance_id))
            for instance in self._hardware.instances(*gpu)
        ]
        held = self._users.held_uuids().union(uuid for uuid in lost if uuid)
        free, still_held = foreign_to_destroy(found, ours, held, self._foreign[gpu])
        changed = False
        for item in free:
            changed |= self._is_destroyed(gpu, item.instance)
        if still_held:
            self._foreign[gpu] = still_held
        else:
            del self._foreign[gpu]
        return changed

    def _is_destroyed(self, gpu: GpuAddress, found: GpuInstance) -> bool:
        """Destroy a foreign instance; False if it is in use, which does not keep the others from being destroyed."""
        try:
            self.devices.destroy_foreign(gpu, found)
        except DeviceBusyError as error:
            _log.warning("mig_instance_not_destroyed", gpu_uuid=gpu.uuid, reason=str(error))
            return False
        return True
