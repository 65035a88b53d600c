"""Clearing away MIG devices of ours that no claim uses, at the start, after a driver reload and for as long as
something is in the way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, Protocol

import structlog

from dra_driver.errors import DeviceBusyError, DraDriverError
from dra_driver.model.inventory import Inventory
from dra_driver.model.mig import OwnedInstance
from dra_driver.services.migdevices import MigDevices
from dra_driver.services.migports import Hardware, Ledger, Where
from dra_driver.services.migusers import MigUsers

_log = structlog.get_logger(__name__)

_LOCK_S = 30.0
_RETRY_FIRST_S = 0.2
_RETRY_MOST_S = 10.0
_LOOK_EVERY_S = 60.0
_AWAITED_EVERY_S = 1.0

Adoption = Literal["leave", "destroy"]


class Locks(Protocol):
    """Locks on physical GPUs."""

    def hold(self, gpu_uuids: Iterable[str], timeout_s: float) -> AbstractContextManager[None]:
        """Hold all of them."""


class OwnedMode(Protocol):
    """MIG mode that we switched on."""

    @property
    def pci_bus_id(self) -> str | None:
        """The GPU's address."""


class KeptLedger(Ledger, Protocol):
    """The ledger, with the modes."""

    def owned_modes(self) -> Mapping[str, OwnedMode]:
        """By GPU UUID, of any boot."""


@dataclass(frozen=True, slots=True)
class _Retry:
    """When to try again (the clock's time), the pause after that, and why it failed."""

    due: float
    pause_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class _Foreign:
    """Somebody else's instances on a GPU that are to be destroyed: all of them, or only those with the MIG devices
    `uuids`, which claims held when the others went."""

    where: Where
    uuids: frozenset[str] | None = None


def _nothing() -> None:
    pass


class MigKeeper:
    """Looks after the ledger in a thread of its own.

    Level-triggered: each look goes over everything, when asked, when something failed before, and once a minute.
    Whatever is to be changed is decided again from the disk under the GPU's lock, because claims are prepared
    meanwhile, also by a second instance of the plugin.
    """

    def __init__(
        self,
        devices: MigDevices,
        hardware: Hardware,
        ledger: KeptLedger,
        users: MigUsers,
        locks: Locks,
        boot_id: str,
        *,
        adopt: Adoption = "leave",
        on_change: Callable[[], None] = _nothing,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`adopt` says what is done at a start or reload with instances on partitioned GPUs that somebody else made.
        `on_change` is called after a look that changed something, or found that something else is stuck than before."""
        self._devices = devices
        self._hardware = hardware
        self._ledger = ledger
        self._users = users
        self._locks = locks
        self._boot_id = boot_id
        self._adopt = adopt
        self._on_change = on_change
        self._clock = clock
        self._retries: dict[str, _Retry] = {}
        self._stuck: Mapping[str, str] = {}
        self._adoptable: Inventory | None = None
        self._foreign: dict[str, _Foreign] = {}  # by GPU UUID
        self._foreign_names: Mapping[str, str] = {}  # device name to MIG UUID
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mig-keeper", daemon=True)

    def start(self) -> None:
        """Begin to look, as soon as somebody asks."""
        self._thread.start()

    def stop(self) -> None:
        """Stop looking."""
        self._stopping.set()
        self._wake.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=5)

    def reconcile(self, inventory: Inventory) -> None:
        """The driver was found or loaded again, or the GPUs are others than before: look soon."""
        self._adoptable = inventory
        self._retries = {}
        self._wake.set()

    def look_soon(self) -> None:
        """Something of ours was left over."""
        self._wake.set()

    def claim_gone(self) -> None:
        """A claim was unprepared; it may have held what is to be destroyed."""
        if self._foreign:
            self._wake.set()

    def stuck(self) -> Mapping[str, str]:
        """Devices that should be gone and cannot be destroyed, with the reason."""
        return self._stuck

    def _run(self) -> None:
        while not self._stopping.is_set():
            now = self._clock()
            longest = _AWAITED_EVERY_S if self._devices.awaits_some else _LOOK_EVERY_S
            due = min((retry.due for retry in self._retries.copy().values()), default=now + longest)
            self._wake.wait(min(max(due - now, 0.0), longest))
            self._wake.clear()
            if self._stopping.is_set():
                return
            try:
                self.look()
            except Exception:  # noqa: BLE001  a surprise must not end the thread
                _log.exception("mig_keeper_failed")

    def look(self) -> None:
        """Clear away everything that nobody uses. What fails is told and tried again later."""
        adoptable, self._adoptable = self._adoptable, None
        try:
            entries, modes, users = self._ledger.all(), self._ledger.owned_modes(), self._users.by_device()
        except DraDriverError as error:
            self._adoptable = self._adoptable or adoptable
            self._failed("the ledger", error)
            return
        self._retries.pop("the ledger", None)
        changed = False
        for device, entry in entries.items():
            if self._is_to_go(entry, users):
                changed |= self._tried(device, entry.gpu_uuid, partial(self._destroy, device))
        in_use = {entry.gpu_uuid for entry in entries.values()}
        for gpu_uuid, mode in modes.items():
            if gpu_uuid not in in_use or changed:
                changed |= self._tried(gpu_uuid, gpu_uuid, partial(self._leave, (gpu_uuid, mode.pci_bus_id)))
        if self._adopt == "destroy":
            changed |= self._adopted(adoptable)
        subjects = {*entries, *modes, *map(_gpu_key, self._foreign)}
        self._retries = {key: retry for key, retry in self._retries.items() if key in subjects}
        before, self._stuck = (
            self._stuck,
            {key: retry.reason for key, retry in self._retries.items() if key in entries},
        )
        # What becomes stuck takes its place from what is on offer, and nothing else shows that it has.
        if changed or self._stuck.keys() != before.keys():
            self._on_change()

    def _adopted(self, inventory: Inventory | None) -> bool:
        """Make room on the partitioned GPUs of a new inventory, or where claims held something then; whether something
        changed."""
        if inventory is not None:
            self._foreign = {
                gpu.uuid: _Foreign((gpu.uuid, gpu.pci_bus_id))
                for gpu in inventory.gpus
                if gpu.partitioning is not None
            }
            self._foreign_names = {name: device.uuid for name, device in inventory.withheld_by_name.items()}
        changed = False
        for gpu_uuid in tuple(self._foreign):
            changed |= self._tried(_gpu_key(gpu_uuid), gpu_uuid, partial(self._destroy_foreign, gpu_uuid))
        return changed

    def _is_to_go(self, entry: OwnedInstance, users: Mapping[str, str]) -> bool:
        """Whether an entry's instance, or what is left of it, is not wanted by any claim (any more)."""
        return (
            entry.boot_id != self._boot_id
            or entry.phase == "orphan"
            or entry.device not in users
            or self._ledger.is_leaving(entry.device)
        )

    def _tried(self, key: str, gpu_uuid: str, action: Callable[[], bool]) -> bool:
        """Do it under the GPU's lock, unless it failed a moment ago; whether something changed."""
        retry = self._retries.get(key)
        if retry is not None and retry.due > self._clock():
            return False
        try:
            with self._locks.hold({gpu_uuid}, _LOCK_S):
                changed = action()
        except DraDriverError as error:
            self._failed(key, error)
            return False
        self._retries.pop(key, None)
        return changed

    def _failed(self, key: str, error: DraDriverError) -> None:
        before, reason = self._retries.get(key), str(error)
        if before is None or before.reason != reason:
            _log.warning("mig_not_cleared", subject=key, reason=reason)
        pause = _RETRY_FIRST_S if before is None else min(2 * before.pause_s, _RETRY_MOST_S)
        self._retries[key] = _Retry(self._clock() + pause, pause, reason)

    def _destroy(self, device: str) -> bool:
        """Destroy a device that is still not wanted."""
        entry, users = self._ledger.get(device), self._users.by_device()
        if entry is None or not self._is_to_go(entry, users):
            return False
        # An orphan that a claim wants is in the way of a new one, which needs the MIG mode.
        keeps_mode = device in users and not self._ledger.is_leaving(device)
        where = (entry.gpu_uuid, entry.pci_bus_id)
        if not self._devices.destroy(device, where, keeps_mode=keeps_mode):
            return False
        _log.info("mig_device_cleared", device=device, gpu_uuid=entry.gpu_uuid)
        return True

    def _leave(self, where: Where) -> bool:
        """Leave a MIG mode that nobody needs; forget one of an older boot, which ended with it."""
        gpu_uuid, _ = where
        if not self._ledger.mode_owned(gpu_uuid, self._boot_id):
            self._ledger.disown_mode(gpu_uuid)
            return False
        if gpu_uuid in self._users.gpu_uuids():
            return False
        return self._devices.mode.leave_if_idle(where)

    def _destroy_foreign(self, gpu_uuid: str) -> bool:
        """Destroy the GPU instances that the ledger does not know and that hold no device of a claim. What claims hold
        has its turn after them."""
        foreign = self._foreign[gpu_uuid]
        ours = {
            entry.slot
            for entry in self._ledger.all().values()
            if entry.gpu_uuid == gpu_uuid and entry.boot_id == self._boot_id
        }
        lost = (self._foreign_names.get(name) for name in self._users.lost())
        held = self._users.held_uuids().union(uuid for uuid in lost if uuid)
        spared: set[str] = set()
        changed = False
        for instance in self._hardware.instances(*foreign.where):
            inside = self._hardware.compute_instances(*foreign.where, instance.gpu_instance_id)
            uuids = {uuid for _, uuid in inside}
            if instance.slot in ours or (foreign.uuids is not None and not uuids & foreign.uuids):
                continue
            if uuids & held:
                spared |= uuids
                continue
            _log.warning(
                "mig_instance_of_others_destroyed",
                gpu_uuid=gpu_uuid,
                gpu_instance_id=instance.gpu_instance_id,
                profile_id=instance.profile_id,
                uuids=[uuid for _, uuid in inside],
            )
            changed |= self._destroyed(foreign.where, instance.gpu_instance_id, inside)
        if spared:
            self._foreign[gpu_uuid] = replace(foreign, uuids=frozenset(spared))
        else:
            del self._foreign[gpu_uuid]
        return changed

    def _destroyed(self, where: Where, gpu_instance_id: int, inside: Sequence[tuple[int, str]]) -> bool:
        """Whether it could be; one that is in use hinders no other."""
        try:
            for compute_instance_id, _ in inside:
                self._hardware.destroy_compute(*where, gpu_instance_id, compute_instance_id)
            self._hardware.destroy(*where, gpu_instance_id)
        except DeviceBusyError as error:
            _log.warning("mig_instance_not_destroyed", gpu_uuid=where[0], reason=str(error))
            return False
        return True


def _gpu_key(gpu_uuid: str) -> str:
    """A GPU as the subject of a retry; the bare UUID stands for its mode."""
    return f"GPU {gpu_uuid}"
