"""Making and destroying the MIG devices that claims ask for, under a ledger.

An entry of the ledger is written before its GPU instance is made, and removed after that is gone:

    (none) ──▶ creating ──▶ creating, with the GPU instance's ID ──▶ created, with compute instance and UUID
       ▲                                  │                                       │
       └──── compute instance, GPU instance, entry, MIG mode if ours and idle ◀───┴── orphan: could not be undone

| Step of a creation | A crash after it leaves | The next Prepare | Unprepare, or the next start without a claim |
|---|---|---|---|
| mode noted as ours | a note, mode off | switches it on | removes the note |
| mode on | note, mode on | goes on | mode off |
| entry `creating` | an entry alone | makes the GPU instance | removes the entry |
| GPU instance | an entry, and a GPU instance at its slot | takes that one over | destroys it |
| its ID in the entry | the same | the same | the same |
| compute instance | GPU instance with one compute instance | takes both over | destroys both |
| entry `created` | everything | finds its work done | destroys everything |

| Step of a destruction | A crash after it leaves | The next Prepare | Unprepare, or the next start without a claim |
|---|---|---|---|
| compute instance gone | entry, GPU instance | makes a new one in it | goes on |
| GPU instance gone | entry | makes everything | removes the entry |
| entry gone | mode on | makes everything | mode off |
| mode off | a note | the same | removes the note |

Of a device that fails on the way to `created` the instances and the entry are undone in the same call; the MIG mode
goes with the claim. What cannot be undone stays in the ledger as `orphan`, is never used again and is destroyed in
the background; so is for a while what NVML may have made without saying so (`services.migteardown`). An instance is
ours while the ledger has its slot, the GPU instance's ID and the MIG device's UUID as far as they are known, and the
boot is the same; all else is somebody else's and left alone, also what somebody made by hand in the place of ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import structlog

from dra_driver.errors import (
    ClaimRefusedError,
    DeviceBusyError,
    DeviceLostError,
    DraDriverError,
    NvmlUnavailableError,
    PassingRefusalError,
    RetryableError,
    UnsureOutcomeError,
)
from dra_driver.model.mig import GpuInstance, OwnedInstance
from dra_driver.model.steps import CreateMig, LeaveMigMode
from dra_driver.services.migmode import MigMode
from dra_driver.services.migports import Hardware, Ledger, Observe, Where
from dra_driver.services.migteardown import MigTeardown, at_slot, is_ours, where_of
from dra_driver.services.migusers import MigUsers

_log = structlog.get_logger(__name__)


def _nothing() -> None:
    pass


def _unobserved(_kind: str, _device: str, _duration_s: float, _error: Exception | None) -> None:
    pass


class MigDevices:
    """Makes and destroys MIG devices, each call converging: any number of calls leaves what one call leaves.

    The caller holds the lock of the GPU for every call but the questions (`realised`, `sort_out`).
    """

    def __init__(
        self,
        hardware: Hardware,
        ledger: Ledger,
        users: MigUsers,
        boot_id: str,
        *,
        left_over: Callable[[], None] = _nothing,
        observe: Observe = _unobserved,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        """`left_over` is called when something of ours could not be cleared away and has to be tried again."""
        self._hardware = hardware
        self._ledger = ledger
        self._users = users
        self._boot_id = boot_id
        self._left_over = left_over
        self._observe = observe
        self._clock = clock
        self._teardown = MigTeardown(hardware, ledger, observe, clock, pause)
        self.mode = MigMode(hardware, ledger, boot_id, left_over, observe, clock)

    # --- questions -----------------------------------------------------------------------------

    def realised(self, device: str) -> OwnedInstance | None:
        """The device as it was made in this boot, with IDs and UUID; None if it is not. Raises: StateError."""
        entry = self._ledger.get(device)
        is_made = entry is not None and entry.boot_id == self._boot_id and entry.phase == "created"
        return entry if is_made else None

    def sort_out(self, gpu_uuid: str, existing: Sequence[GpuInstance]) -> tuple[GpuInstance, ...]:
        """Those of a GPU's instances that are not ours to give out: somebody else's, and `leaving` orphans of ours.

        Raises: StateError.
        """
        ours = self._ledger.owned_lately(self._boot_id)
        orphans = {slot for slot, entry in self._entries_of(gpu_uuid).items() if entry.phase == "orphan"}
        return tuple(
            replace(instance, leaving=instance.slot in orphans)
            for instance in existing
            if (gpu_uuid, *instance.slot) not in ours or instance.slot in orphans
        )

    @property
    def awaits_some(self) -> bool:
        """Whether an instance may appear that NVML was asked for and did not say whether it made."""
        return self._teardown.awaits_some

    # --- creation ------------------------------------------------------------------------------

    def create(self, step: CreateMig) -> OwnedInstance:
        """Have the device of a step exist.

        Raises: ClaimRefusedError if something of somebody else's is in the way; DeviceBusyError; PassingRefusalError;
        RetryableError; StateError. What this call made is undone then, but for the MIG mode, which goes with the claim.
        """
        began = self._clock()
        try:
            entry = self._entry_in_use(step)
            found = self._hardware.instances(*where_of(step))
            instance = None if entry is None else at_slot(entry, found)
            if entry is not None and instance is not None:
                created, is_new = self._completed(entry, instance)
            else:
                created, is_new = self._made(step, found), True
        except Exception as error:
            self._observe("create", step.device, self._clock() - began, error)
            raise
        self._teardown.stop_awaiting(step.device)
        if is_new:
            self._observe("create", step.device, self._clock() - began, None)
        return created

    def _entry_in_use(self, step: CreateMig) -> OwnedInstance | None:
        """The device's entry, if its instance may be used on: an orphan's is destroyed first, since nobody
        knows what is still in it."""
        entry = self._entry(step.device)
        if entry is None:
            return None
        if entry.phase == "orphan":
            self._teardown.take_down(entry)
            return None
        if self._ledger.is_leaving(step.device):
            self._ledger.save(entry)
        return entry

    def _completed(self, entry: OwnedInstance, instance: GpuInstance) -> tuple[OwnedInstance, bool]:
        """The entry with everything that was missing, and whether something was."""
        inside = self._hardware.compute_instances(*where_of(entry), instance.gpu_instance_id)
        if not is_ours(entry, instance, inside):
            raise ClaimRefusedError(
                f"GPU instance {instance.gpu_instance_id} of GPU {entry.gpu_uuid} is in the place of MIG device "
                f"{entry.device} but is not the one that this driver made; destroy it by hand (nvidia-smi mig), "
                "then delete the pod"
            )
        if not inside:
            return self._with_compute(entry, instance.gpu_instance_id), True
        return self._finished(entry, instance.gpu_instance_id, *inside[0]), entry.phase != "created"

    def _made(self, step: CreateMig, found: Iterable[GpuInstance]) -> OwnedInstance:
        """The device made from nothing."""
        where = where_of(step)
        in_the_way = [instance for instance in found if instance.placement.overlaps(step.placement)]
        self._clear(where, in_the_way, f"MIG device {step.device}")
        self.mode.enter(where)
        entry = OwnedInstance(
            device=step.device,
            gpu_uuid=step.gpu_uuid,
            pci_bus_id=step.pci_bus_id,
            profile_id=step.profile_id,
            profile_name=step.profile_name,
            placement=step.placement,
            boot_id=self._boot_id,
        )
        try:
            self._ledger.save(entry)
            gpu_instance_id = self._gpu_instance(entry)
            entry = replace(entry, gpu_instance_id=gpu_instance_id)
            self._ledger.save(entry)
        except Exception:
            self._take_back(entry)
            raise
        return self._with_compute(entry, gpu_instance_id)

    def _gpu_instance(self, entry: OwnedInstance) -> int:
        try:
            return self._hardware.create(*where_of(entry), entry.profile_id, entry.placement)
        except (NvmlUnavailableError, DeviceLostError):
            raise  # there may be one now, which is taken back with the entry
        except UnsureOutcomeError:
            self._teardown.await_late(entry)
            raise
        except DraDriverError as error:
            if self._is_late_in_the_way(entry) and type(error) is RetryableError:
                raise PassingRefusalError(str(error)) from error
            raise

    def _is_late_in_the_way(self, entry: OwnedInstance) -> bool:
        """The driver said no: whatever is there by now is somebody else's, unless it is what it left open before."""
        if self._teardown.awaits(entry.device):
            self._ledger.save(replace(entry, phase="orphan"))
            return True
        self._ledger.delete(entry.device)
        return any(
            self._teardown.awaits(other.device) and other.placement.overlaps(entry.placement)
            for other in self._entries_of(entry.gpu_uuid).values()
        )

    def _with_compute(self, entry: OwnedInstance, gpu_instance_id: int) -> OwnedInstance:
        # A UUID that is noted is that of a compute instance which is gone.
        bare = replace(entry, gpu_instance_id=gpu_instance_id, compute_instance_id=None, uuid=None)
        try:
            if bare != entry:
                self._ledger.save(replace(bare, phase="creating"))
            return self._finished(bare, *self._compute_instance(bare, gpu_instance_id))
        except Exception:
            self._take_back(entry)
            raise

    def _compute_instance(self, entry: OwnedInstance, gpu_instance_id: int) -> tuple[int, int, str]:
        return (gpu_instance_id, *self._hardware.create_compute(*where_of(entry), gpu_instance_id))

    def _finished(
        self, entry: OwnedInstance, gpu_instance_id: int, compute_instance_id: int, uuid: str
    ) -> OwnedInstance:
        finished = replace(
            entry,
            phase="created",
            gpu_instance_id=gpu_instance_id,
            compute_instance_id=compute_instance_id,
            uuid=uuid,
            gpu_minor=self._hardware.minor(*where_of(entry)),
        )
        if finished != entry:
            self._ledger.save(finished)
        return finished

    def _take_back(self, entry: OwnedInstance) -> None:
        """Undo what a failed creation made, as the ledger tells it; the first error is the one to be told."""
        try:
            left = self._entry(entry.device)
            if left is not None and self._teardown.take_down(left) == "awaited":
                self._left_over()
        except DraDriverError as error:
            _log.error("mig_device_not_undone", device=entry.device, reason=str(error))
            with suppress(DraDriverError):
                self.abandon(entry.device)
            self._left_over()

    def _clear(self, where: Where, in_the_way: Sequence[GpuInstance], wanted: str) -> None:
        """Destroy the instances of ours that no claim uses. Raises: ClaimRefusedError, DeviceBusyError if one
        is somebody else's or used; nothing is destroyed then."""
        if not in_the_way:
            return
        entries = self._entries_of(where[0])
        users = self._users.by_device()
        unused: list[tuple[GpuInstance, OwnedInstance]] = []
        for instance in in_the_way:
            entry = entries.get(instance.slot)
            if entry is None:
                raise _somebody_elses(where, instance, wanted)
            if entry.phase != "orphan" and entry.device in users:
                raise DeviceBusyError(
                    f"{wanted} needs GPU instance {instance.gpu_instance_id} of GPU {where[0]} to be gone, which is "
                    f"MIG device {entry.device} of {users[entry.device]}; it is retried until that is unprepared"
                )
            unused.append((instance, entry))
        for instance, entry in unused:
            if self._teardown.take_down(entry) == "foreign":
                raise _somebody_elses(where, instance, wanted)

    # --- destruction ---------------------------------------------------------------------------

    def destroy(
        self,
        device: str,
        where: Where,
        *,
        patience_s: float = 0.0,
        besides: str | None = None,
        keeps_mode: bool = False,
    ) -> bool:
        """Have the device gone; whether it is, and not just awaited. With it goes the MIG mode that we switched on,
        unless it is to be kept, or claims other than the one with the UID `besides` use other devices of the GPU.

        Raises: DeviceBusyError that names the holders, if they are still there after `patience_s` seconds;
        NvmlUnavailableError, DeviceLostError, RetryableError, StateError. The entry stays then.
        """
        entry = self._entry(device)
        outcome = None if entry is None else self._teardown.take_down(entry, patience_s)
        try:
            if not keeps_mode and not self._users.use_others(where[0], device, besides):
                self.mode.leave_if_idle(where)
        except DraDriverError as error:
            # The device is gone, which is what the claim waits for; the mode is left in the background.
            _log.warning("mig_mode_not_left", gpu_uuid=where[0], reason=str(error))
            self._left_over()
        if outcome == "awaited":
            self._left_over()
        return outcome != "awaited"

    def abandon(self, device: str) -> None:
        """Mark what may be left of a device, so that it is destroyed in the background. Raises: StateError."""
        entry = self._ledger.get(device)
        if entry is not None:
            self._ledger.save(replace(entry, phase="orphan"))
            self._left_over()

    def let_go(self, device: str) -> None:
        """Note that the device is to go although its last claim's record is still there; a creation that comes
        first keeps it. Raises: StateError."""
        entry = self._ledger.get(device)
        if entry is not None:
            self._ledger.save(entry, leaving=True)
            self._left_over()

    def make_whole(self, step: LeaveMigMode) -> None:
        """Have a GPU out of MIG mode.

        Raises: ClaimRefusedError if somebody else's instance is on it, or the mode is not ours; RetryableError if a
        claim uses an instance of ours; DeviceBusyError.
        """
        where = (step.gpu_uuid, step.pci_bus_id)
        self._clear(where, self._hardware.instances(*where), f"GPU {step.gpu_uuid} as a whole")
        self.mode.leave(where)

    def _entry(self, device: str) -> OwnedInstance | None:
        """The device's entry of this boot; that of an older one speaks of an instance that is gone."""
        entry = self._ledger.get(device)
        if entry is not None and entry.boot_id != self._boot_id:
            self._ledger.delete(device)
            return None
        return entry

    def _entries_of(self, gpu_uuid: str) -> Mapping[tuple[int, int], OwnedInstance]:
        """A GPU's entries of this boot by slot."""
        return {
            entry.slot: entry
            for entry in self._ledger.all().values()
            if entry.gpu_uuid == gpu_uuid and entry.boot_id == self._boot_id
        }


def _somebody_elses(where: Where, instance: GpuInstance, wanted: str) -> ClaimRefusedError:
    return ClaimRefusedError(
        f"{wanted} needs GPU instance {instance.gpu_instance_id} (profile {instance.profile_id}) of GPU {where[0]} to "
        "be gone, which somebody else made and which is therefore left alone; destroy it by hand (nvidia-smi mig), "
        "or delete the pod and its claim so that they are allocated anew"
    )
