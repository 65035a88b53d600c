"""Making and destroying the MIG devices that claims ask for, with a ledger of what is ours.

An entry of the ledger is written before its GPU instance is made, and removed after the instance is gone:

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

When a creation fails, the same call undoes its instances and its entry; the MIG mode goes with the claim. What cannot
be undone stays in the ledger as `orphan`: it is never used again, and the collector destroys it. The same holds for a
while for an instance that NVML may have made without saying so (`destroy.py`). An instance is ours while the ledger has
its slot, the GPU instance's ID and the MIG device's UUID as far as they are known, and the boot is the same. All else
is somebody else's and is left alone, also what somebody made by hand in the place of ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

import structlog

from dra_driver.errors import (
    ClaimRefusedError,
    DeviceBusyError,
    DeviceLostError,
    DraDriverError,
    NvmlTransientError,
    NvmlUnavailableError,
    NvmlUnknownOutcomeError,
    RetryableError,
)
from dra_driver.mig.context import MigContext
from dra_driver.mig.destroy import InstanceDestroyer
from dra_driver.mig.mode import MigMode
from dra_driver.mig.rules.ownership import at_slot, is_ours
from dra_driver.model.mig import GpuAddress, GpuInstance, OwnedInstance
from dra_driver.model.steps import CreateMig, LeaveMigMode

_log = structlog.get_logger(__name__)


class MigDevices:
    """Makes and destroys MIG devices. Each call converges: any number of calls leaves what one call leaves.

    The caller holds the lock of the GPU.
    """

    def __init__(self, context: MigContext) -> None:
        self._context = context
        self._hardware = context.hardware
        self._ledger = context.ledger
        self._users = context.users
        self._destroyer = InstanceDestroyer(context)
        self.mode = MigMode(context)

    @property
    def expects_late_instances(self) -> bool:
        """Whether an instance may still appear because NVML did not say whether it made it. Needs no lock."""
        return self._destroyer.expects_any

    # --- creation ------------------------------------------------------------------------------

    def create(self, step: CreateMig, *, for_layout: bool = False) -> OwnedInstance:
        """Have the device of a step exist, for a claim or for the node's layout.

        Raises: ClaimRefusedError if something of somebody else's is in the way; DeviceBusyError; NvmlTransientError;
        RetryableError; StateError. What this call made is undone then, but for the MIG mode, which goes with the claim.
        """
        with self._context.observed("create", step.device) as made:
            entry = self._entry_in_use(step, for_layout)
            found = self._hardware.instances(*step.gpu)
            instance = None if entry is None else at_slot(entry, found)
            if entry is not None and instance is not None:
                created = self._complete(entry, instance)
            else:
                entry, created = None, self._make(step, found, for_layout)
        self._destroyer.stop_expecting(step.device)
        if created != entry:
            made()
        return created

    def _entry_in_use(self, step: CreateMig, for_layout: bool) -> OwnedInstance | None:
        """The device's entry, if its instance may be used again. An orphan is destroyed first, because nobody knows
        what is still in it."""
        entry = self._entry(step.device)
        if entry is None:
            return None
        if entry.phase == "orphan":
            self._destroyer.destroy(entry)
            return None
        if entry.is_of_layout != for_layout:
            entry = replace(entry, is_of_layout=for_layout)
            self._ledger.save(entry)
        return entry

    def _complete(self, entry: OwnedInstance, instance: GpuInstance) -> OwnedInstance:
        """Make what is missing of the device; its entry, which is the same if nothing was."""
        inside = self._hardware.compute_instances(*entry.gpu, instance.gpu_instance_id)
        if not is_ours(entry, instance, inside):
            raise ClaimRefusedError(
                f"GPU instance {instance.gpu_instance_id} of GPU {entry.gpu_uuid} is in the place of MIG device "
                f"{entry.device} but is not the one that this driver made; destroy it by hand (nvidia-smi mig), "
                "then delete the pod"
            )
        if not inside:
            return self._add_compute_instance(entry, instance.gpu_instance_id)
        return self._save_created(entry, instance.gpu_instance_id, *inside[0])

    def _make(self, step: CreateMig, found: Iterable[GpuInstance], for_layout: bool) -> OwnedInstance:
        """Make the device from nothing."""
        in_the_way = [instance for instance in found if instance.placement.overlaps(step.placement)]
        self._clear(step.gpu, in_the_way, f"MIG device {step.device}")
        self.mode.enter(step.gpu)
        entry = OwnedInstance(
            device=step.device,
            gpu_uuid=step.gpu_uuid,
            pci_bus_id=step.pci_bus_id,
            profile_id=step.profile_id,
            profile_name=step.profile_name,
            placement=step.placement,
            boot_id=self._ledger.boot_id,
            is_of_layout=for_layout,
        )
        try:
            self._ledger.save(entry)
            gpu_instance_id = self._make_gpu_instance(entry)
            entry = replace(entry, gpu_instance_id=gpu_instance_id)
            self._ledger.save(entry)
        except Exception:
            self._take_back(entry)
            raise
        return self._add_compute_instance(entry, gpu_instance_id)

    def _make_gpu_instance(self, entry: OwnedInstance) -> int:
        try:
            return self._hardware.create(*entry.gpu, entry.profile_id, entry.placement)
        except (NvmlUnavailableError, DeviceLostError):
            raise  # there may be an instance now; it is taken back with the entry
        except NvmlUnknownOutcomeError:
            self._destroyer.expect(entry)
            raise
        except DraDriverError as error:
            if self._is_late_in_the_way(entry) and type(error) is RetryableError:
                raise NvmlTransientError(str(error)) from error
            raise

    def _is_late_in_the_way(self, entry: OwnedInstance) -> bool:
        """Whether an instance of ours that NVML left open before may be in the way. NVML refused this creation, so that
        it left nothing: whatever is at the slot is somebody else's, unless it comes from such an earlier creation."""
        if self._destroyer.expects(entry.device):
            self._ledger.save(replace(entry, phase="orphan"))
            return True
        self._ledger.delete(entry.device)
        return any(
            self._destroyer.expects(other.device) and other.placement.overlaps(entry.placement)
            for other in self._ledger.entries_of(entry.gpu_uuid).values()
        )

    def _add_compute_instance(self, entry: OwnedInstance, gpu_instance_id: int) -> OwnedInstance:
        # A UUID in the entry is that of a compute instance which is gone.
        bare = replace(entry, gpu_instance_id=gpu_instance_id, compute_instance_id=None, uuid=None)
        try:
            if bare != entry:
                self._ledger.save(replace(bare, phase="creating"))
            return self._save_created(
                bare, gpu_instance_id, *self._hardware.create_compute(*bare.gpu, gpu_instance_id)
            )
        except Exception:
            self._take_back(entry)
            raise

    def _save_created(
        self, entry: OwnedInstance, gpu_instance_id: int, compute_instance_id: int, uuid: str
    ) -> OwnedInstance:
        finished = replace(
            entry,
            phase="created",
            gpu_instance_id=gpu_instance_id,
            compute_instance_id=compute_instance_id,
            uuid=uuid,
            gpu_minor=self._hardware.minor(*entry.gpu),
        )
        if finished != entry:
            self._ledger.save(finished)
        return finished

    def _take_back(self, entry: OwnedInstance) -> None:
        """Undo what a failed creation made, as far as the ledger knows it. The caller raises the error of the creation,
        so that one from here is only logged."""
        try:
            left = self._entry(entry.device)
            if left is not None and self._destroyer.destroy(left) == "expected":
                self._context.left_over()
        except DraDriverError as error:
            _log.error("mig_device_not_undone", device=entry.device, reason=str(error))
            with suppress(DraDriverError):
                self.abandon(entry.device)
            self._context.left_over()

    def _clear(self, gpu: GpuAddress, in_the_way: Sequence[GpuInstance], wanted: str) -> None:
        """Destroy the instances that are ours and that no claim uses. Raises: ClaimRefusedError if one is somebody
        else's, DeviceBusyError if one is in use; nothing is destroyed then."""
        if not in_the_way:
            return
        entries = self._ledger.entries_of(gpu.uuid)
        users = self._users.by_device()
        unused: list[tuple[GpuInstance, OwnedInstance]] = []
        for instance in in_the_way:
            entry = entries.get(instance.slot)
            if entry is None:
                raise _somebody_elses(gpu, instance, wanted)
            if entry.phase != "orphan" and entry.device in users:
                raise DeviceBusyError(
                    f"{wanted} needs GPU instance {instance.gpu_instance_id} of GPU {gpu.uuid} to be gone, which is "
                    f"MIG device {entry.device} of {users[entry.device]}; it is retried until that is unprepared"
                )
            unused.append((instance, entry))
        for instance, entry in unused:
            if self._destroyer.destroy(entry) == "foreign":
                raise _somebody_elses(gpu, instance, wanted)

    # --- destruction ---------------------------------------------------------------------------

    def destroy(
        self,
        device: str,
        gpu: GpuAddress,
        *,
        patience_s: float = 0.0,
        besides: str | None = None,
        keeps_mode: bool = False,
    ) -> bool:
        """Have the device gone; False if it is not there but may still appear. The MIG mode that we switched on goes
        with it, unless it is to be kept, or claims other than the one with the UID `besides` use other devices of
        the GPU.

        Raises: DeviceBusyError that names the holders, if they are still there after `patience_s` seconds;
        NvmlUnavailableError, DeviceLostError, RetryableError, StateError. The entry stays then.
        """
        entry = self._entry(device)
        outcome = None if entry is None else self._destroyer.destroy(entry, patience_s)
        try:
            if not keeps_mode and not self._users.use_others(gpu.uuid, device, besides):
                self.mode.leave_if_idle(gpu)
        except DraDriverError as error:
            # The device is gone, and the claim waits for nothing else; the collector leaves the mode later.
            _log.warning("mig_mode_not_left", gpu_uuid=gpu.uuid, reason=str(error))
            self._context.left_over()
        if outcome == "expected":
            self._context.left_over()
        return outcome != "expected"

    def destroy_foreign(self, gpu: GpuAddress, instance: GpuInstance) -> None:
        """Destroy an instance that somebody else made, with what is in it. Raises: DeviceBusyError if it is in use;
        RetryableError."""
        number = instance.gpu_instance_id
        inside = self._hardware.compute_instances(*gpu, number)
        _log.warning(
            "mig_instance_of_others_destroyed",
            gpu_uuid=gpu.uuid,
            gpu_instance_id=number,
            profile_id=instance.profile_id,
            uuids=[uuid for _, uuid in inside],
        )
        for compute_instance_id, _ in inside:
            self._hardware.destroy_compute(*gpu, number, compute_instance_id)
        self._hardware.destroy(*gpu, number)

    def abandon(self, device: str) -> None:
        """Mark what may be left of a device, so that the collector destroys it. Raises: StateError."""
        entry = self._ledger.get(device)
        if entry is not None:
            self._ledger.save(replace(entry, phase="orphan"))
            self._context.left_over()

    def make_whole(self, step: LeaveMigMode) -> None:
        """Have a GPU out of MIG mode.

        Raises: ClaimRefusedError if somebody else's instance is on it, or the mode is not ours; RetryableError if a
        claim uses an instance of ours; DeviceBusyError.
        """
        self._clear(step.gpu, self._hardware.instances(*step.gpu), f"GPU {step.gpu_uuid} as a whole")
        self.mode.leave(step.gpu)

    def _entry(self, device: str) -> OwnedInstance | None:
        """The device's entry of this boot; that of an older one speaks of an instance that is gone."""
        entry = self._ledger.get(device)
        if entry is not None and entry.boot_id != self._ledger.boot_id:
            self._ledger.delete(device)
            return None
        return entry


def _somebody_elses(gpu: GpuAddress, instance: GpuInstance, wanted: str) -> ClaimRefusedError:
    return ClaimRefusedError(
        f"{wanted} needs GPU instance {instance.gpu_instance_id} (profile {instance.profile_id}) of GPU {gpu.uuid} to "
        "be gone, which somebody else made and which is therefore left alone; destroy it by hand (nvidia-smi mig), "
        "or delete the pod and its claim so that they are allocated anew"
    )
