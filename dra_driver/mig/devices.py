"""Creates and destroys the MIG devices that claims and the node's layout need.

The ledger of the GPU has a detail for each device, from before its GPU instance is created until after it is gone:

    (none) ──▶ creating ──▶ creating, with the GPU instance's ID ──▶ created, with compute instance and UUID
       ▲          │ ▲                     │                              │
       │          ▼ └ it appears, or the next attempt creates it         │
       ├─30 s── unknown: NVML did not report whether it created it       │
       └──────────┴── compute instance, GPU instance and detail gone ◀───┘

| Step of a creation | A crash after it leaves | The next Prepare | The undo, if no claim needs the device |
|---|---|---|---|
| mode recorded as ours | a record, mode off | enables the mode | removes the record |
| mode on | record, mode on | continues | disables the mode |
| detail `creating` | only a detail | creates the GPU instance | removes the detail |
| GPU instance, its ID in the detail | a detail, and a GPU instance at its slot | adopts it | destroys it |
| compute instance | GPU instance with one compute instance | adopts both | destroys both |
| detail `created` | everything | finds nothing to do | destroys everything |

A destruction removes, in this order: compute instance, GPU instance, detail, mode, its record. After a crash, the next
undo continues, and the next Prepare creates what is missing.

If a creation fails, the same call destroys what it created. A device in phase `unknown` is pending cleanup until its
instance has appeared and is destroyed, or has not appeared for 30 s, counted after a crash from the first check.

An instance is ours if the ledger of this boot has its slot, and the GPU instance's ID and the MIG device's UUID match
as far as they are known. All others are foreign; the plugin destroys them only for a layout that allows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import structlog

from dra_driver.base.backoff import Backoff
from dra_driver.base.deadline import seconds_for
from dra_driver.errors import (
    ClaimRefusedError,
    DeviceBusyError,
    DeviceLostError,
    DraDriverError,
    NotSupportedError,
    NvmlTransientError,
    NvmlUnavailableError,
    NvmlUnknownOutcomeError,
    RetryableError,
)
from dra_driver.host.gpu_nodes import MigCaps
from dra_driver.mig.mode import MigContext, MigMode
from dra_driver.mig.rules.offered_devices import at_slot, is_ours
from dra_driver.model.claim import ClaimRef
from dra_driver.model.dataclass import replace
from dra_driver.model.mig import GpuAddress, GpuInstance, OwnedInstance
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import CreateMig, LeaveMigMode

_log = structlog.get_logger(__name__)

_PAUSE_FIRST_S, _PAUSE_MOST_S = 0.02, 0.1
_BUSY_S = 0.5
"""How long an undo waits for the processes on its device."""
_EXPECTED_S = 30.0
"""How long an instance may still appear after a creation with unknown outcome."""


class MayAppearError(RetryableError):
    """A GPU instance does not exist, but may still appear."""


class MigDevices:
    """Runs and undoes `CreateMig` and `LeaveMigMode`. All calls are idempotent, and run in the GPU's lane."""

    def __init__(self, context: MigContext, mode: MigMode, proc: str) -> None:
        self._context = context
        self._hardware = context.hardware
        self._ledger = context.ledger
        self._mode = mode
        self._proc = proc
        self._expected_until: dict[str, float] = {}  # by device

    # --- steps of claims -----------------------------------------------------------------------

    def do(self, step: CreateMig | LeaveMigMode, plan: Plan) -> None:
        """Create the device, or take the GPU out of MIG mode. Raises: ClaimRefusedError, RetryableError, StateError."""
        try:
            with self._context.operation():
                if isinstance(step, CreateMig):
                    self.create(step)
                else:
                    self._make_whole(step)
        except NotSupportedError as error:
            raise ClaimRefusedError(
                f"{error}; delete the pod and its claim so that the scheduler allocates another device"
            ) from error

    def undo(self, step: CreateMig | LeaveMigMode, ref: ClaimRef) -> None:
        """Destroy the device; `MigMode` leaves MIG mode later. Raises: the errors of `destroy`."""
        instance = self._instance(step) if isinstance(step, CreateMig) else None
        if instance is not None:
            patience = seconds_for(f"destroy MIG device {instance.device}", _BUSY_S)
            with self._context.operation():
                self.destroy(instance, patience)

    def in_place(self, step: CreateMig | LeaveMigMode, record: ClaimRecord) -> bool:
        """Whether the device was created in this boot and still has its capability files."""
        if not isinstance(step, CreateMig):
            return True
        made = self._instance(step)
        if made is None or made.phase != "created":
            return False
        minor, gpu_instance, compute = made.gpu_minor, made.gpu_instance_id, made.compute_instance_id
        if minor is None or gpu_instance is None or compute is None:
            return False
        return MigCaps(self._proc).exist(minor, gpu_instance, compute)

    # --- creation ------------------------------------------------------------------------------

    def create(self, step: CreateMig, *, for_layout: bool = False) -> OwnedInstance:
        """Create the device, for a claim or for the node's layout, unless it exists.

        Raises: ClaimRefusedError if a foreign instance is in the way; DeviceBusyError; NvmlTransientError;
        RetryableError; StateError. After an error, the device is destroyed again, but the GPU stays in MIG mode until
        the claim ends.
        """
        with self._context.observed("create", step.device) as made:
            known, found = self._instance(step), self._hardware.instances(*step.gpu)
            there = None if known is None else at_slot(known, found)
            if known is not None and there is not None:
                if known.is_of_layout != for_layout:
                    known = replace(known, is_of_layout=for_layout)
                    self._ledger.save(known)
                created = self._complete(known, there)
            else:
                known, created = None, self._make(step, found, for_layout)
        self._expected_until.pop(step.device, None)
        if created != known:
            made()
        return created

    def _instance(self, step: CreateMig) -> OwnedInstance | None:
        of_gpu = self._ledger.details(OwnedInstance, step.gpu_uuid)
        return next((one for one in of_gpu if one.device == step.device), None)

    def _complete(self, known: OwnedInstance, there: GpuInstance) -> OwnedInstance:
        inside = self._hardware.compute_instances(*known.gpu, there.gpu_instance_id)
        if not is_ours(known, there, inside):
            raise ClaimRefusedError(
                f"GPU instance {there.gpu_instance_id} of GPU {known.gpu_uuid} occupies the place of MIG device "
                f"{known.device}, but gpu-dra-driver did not create it; destroy it with `nvidia-smi mig`, then delete "
                "the pod"
            )
        if not inside:
            return self._add_compute_instance(known, there.gpu_instance_id)
        return self._save_created(known, there.gpu_instance_id, *inside[0])

    def _make(self, step: CreateMig, found: Iterable[GpuInstance], for_layout: bool) -> OwnedInstance:
        in_the_way = [instance for instance in found if instance.placement.overlaps(step.placement)]
        self._clear(step.gpu, in_the_way, f"MIG device {step.device}")
        self._mode.enter(step.gpu)
        instance = OwnedInstance(
            device=step.device,
            gpu_uuid=step.gpu_uuid,
            pci_bus_id=step.pci_bus_id,
            profile_id=step.profile_id,
            profile_name=step.profile_name,
            placement=step.placement,
            boot_id=self._ledger.boot_id or "",
            is_of_layout=for_layout,
        )
        try:
            self._ledger.save(instance)
            gpu_instance_id = self._make_gpu_instance(instance)
            instance = replace(instance, gpu_instance_id=gpu_instance_id)
            self._ledger.save(instance)
        except Exception:
            self._roll_back(step)
            raise
        return self._add_compute_instance(instance, gpu_instance_id)

    def _make_gpu_instance(self, instance: OwnedInstance) -> int:
        try:
            return self._hardware.create(*instance.gpu, instance.profile_id, instance.placement)
        except (NvmlUnavailableError, DeviceLostError):
            raise  # there may be an instance now; it is removed together with the detail
        except NvmlUnknownOutcomeError:
            self._expected_until[instance.device] = self._context.clock() + _EXPECTED_S
            self._ledger.save(replace(instance, phase="unknown"))
            raise
        except DraDriverError as error:
            if self._may_be_in_the_way(instance) and type(error) is RetryableError:
                raise NvmlTransientError(str(error)) from error
            raise

    def _may_be_in_the_way(self, refused: OwnedInstance) -> bool:
        """Whether an earlier creation with unknown outcome may occupy this placement. This one, which NVML refused,
        created nothing.
        """
        if self._may_appear(refused.device):
            self._ledger.save(replace(refused, phase="unknown"))
            return True
        self._ledger.remove(refused)
        return any(
            self._may_appear(other.device) and other.placement.overlaps(refused.placement)
            for other in self._ledger.details(OwnedInstance, refused.gpu_uuid)
        )

    def _may_appear(self, device: str) -> bool:
        return self._context.clock() < self._expected_until.get(device, 0.0)

    def _add_compute_instance(self, instance: OwnedInstance, gpu_instance_id: int) -> OwnedInstance:
        # A UUID in the ledger belongs to a compute instance that no longer exists.
        bare = replace(instance, gpu_instance_id=gpu_instance_id, compute_instance_id=None, uuid=None)
        try:
            if bare != instance:
                self._ledger.save(replace(bare, phase="creating"))
            return self._save_created(
                bare, gpu_instance_id, *self._hardware.create_compute(*bare.gpu, gpu_instance_id)
            )
        except Exception:
            self._roll_back(instance)
            raise

    def _save_created(
        self, known: OwnedInstance, gpu_instance_id: int, compute_instance_id: int, uuid: str
    ) -> OwnedInstance:
        created = replace(
            known,
            phase="created",
            gpu_instance_id=gpu_instance_id,
            compute_instance_id=compute_instance_id,
            uuid=uuid,
            gpu_minor=self._hardware.minor(*known.gpu),
        )
        if created != known:
            self._ledger.save(created)
        return created

    def _roll_back(self, failed: CreateMig | OwnedInstance) -> None:
        """Destroy what was created. Only logs errors: the caller raises the error of the creation."""
        try:
            of_gpu = self._ledger.details(OwnedInstance, failed.gpu_uuid)
            for instance in of_gpu:
                if instance.device == failed.device:
                    self.destroy(instance)
        except MayAppearError:
            pass
        except DraDriverError as error:
            _log.error("mig_device_cleanup_failed", device=failed.device, reason=str(error))

    def _clear(self, gpu: GpuAddress, in_the_way: Sequence[GpuInstance], wanted: str) -> None:
        """Destroy instances of ours. Raises: ClaimRefusedError if one is foreign, DeviceBusyError if one is in use."""
        if not in_the_way:
            return
        ours = {one.slot: one for one in self._ledger.details(OwnedInstance, gpu.uuid)}
        users = self._context.users.by_device()
        unused: list[tuple[GpuInstance, OwnedInstance]] = []
        for instance in in_the_way:
            known = ours.get(instance.slot)
            if known is None:
                raise _foreign_in_the_way(gpu, instance, wanted)
            if known.device in users:
                raise DeviceBusyError(
                    f"{wanted} overlaps with MIG device {known.device} (GPU instance {instance.gpu_instance_id} of GPU "
                    f"{gpu.uuid}) of {users[known.device]}; the kubelet retries until that claim is unprepared"
                )
            unused.append((instance, known))
        for instance, known in unused:
            if not self.destroy(known):
                raise _foreign_in_the_way(gpu, instance, wanted)

    def _make_whole(self, step: LeaveMigMode) -> None:
        self._clear(step.gpu, self._hardware.instances(*step.gpu), f"GPU {step.gpu_uuid} as a whole")
        self._mode.leave(step.gpu)

    # --- destruction ---------------------------------------------------------------------------

    def destroy(self, instance: OwnedInstance, patience_s: float = 0.0) -> bool:
        """Destroy the device, then remove the detail. Returns False if the instance is foreign: then it only removes
        the detail.

        Raises: DeviceBusyError that names the processes that still use the device after `patience_s` seconds;
        MayAppearError, NvmlUnavailableError, DeviceLostError, RetryableError, StateError. The detail is then kept.
        """
        with self._context.observed("destroy", instance.device) as destroyed:
            outcome = self._destroy_patiently(instance, self._context.clock() + patience_s)
            if outcome == "destroyed":
                # Remove the detail before observers are called, because they publish the ledger's content.
                self._ledger.remove(instance)
                destroyed()
        if outcome == "missing" and instance.phase == "unknown":
            self._expected_until.setdefault(instance.device, self._context.clock() + _EXPECTED_S)
            if self._may_appear(instance.device):
                raise MayAppearError(
                    f"NVML may have created MIG device {instance.device}; it may still appear"
                )
        self._expected_until.pop(instance.device, None)
        if outcome != "destroyed":
            self._ledger.remove(instance)
        return outcome != "foreign"

    def _destroy_patiently(
        self, instance: OwnedInstance, deadline: float
    ) -> Literal["destroyed", "missing", "foreign"]:
        backoff = Backoff(_PAUSE_FIRST_S, _PAUSE_MOST_S)
        while True:
            pause = backoff.step()
            try:
                return self._destroy(instance)
            except DeviceBusyError:
                if self._context.clock() + pause > deadline:
                    raise
            self._context.pause(pause)

    def _destroy(self, known: OwnedInstance) -> Literal["destroyed", "missing", "foreign"]:
        there = at_slot(known, self._hardware.instances(*known.gpu))
        if there is None:
            return "missing"
        inside = self._hardware.compute_instances(*known.gpu, there.gpu_instance_id)
        if not is_ours(known, there, inside):
            _log.warning(
                "mig_device_replaced",
                device=known.device,
                gpu_uuid=known.gpu_uuid,
                gpu_instance_id=there.gpu_instance_id,
                remedy="another program created an instance in the same place; delete it with `nvidia-smi mig -dgi`",
            )
            return "foreign"
        self._destroy_whole(known.gpu, there.gpu_instance_id, inside)
        if at_slot(known, self._hardware.instances(*known.gpu)) is not None:
            raise RetryableError(
                f"NVML reported success, but GPU instance {there.gpu_instance_id} of GPU {known.gpu_uuid} is still "
                "there"
            )
        return "destroyed"

    def _destroy_whole(self, gpu: GpuAddress, number: int, inside: Sequence[tuple[int, str]]) -> None:
        for compute_instance_id, _ in inside:
            self._hardware.destroy_compute(*gpu, number, compute_instance_id)
        self._hardware.destroy(*gpu, number)

    def destroy_foreign(self, gpu: GpuAddress, instance: GpuInstance) -> None:
        """Destroy an instance that is not ours. Raises: DeviceBusyError if it is in use; RetryableError."""
        number = instance.gpu_instance_id
        inside = self._hardware.compute_instances(*gpu, number)
        _log.warning(
            "mig_instance_of_others_destroyed",
            gpu_uuid=gpu.uuid,
            gpu_instance_id=number,
            profile_id=instance.profile_id,
            uuids=[uuid for _, uuid in inside],
        )
        self._destroy_whole(gpu, number, inside)


def _foreign_in_the_way(gpu: GpuAddress, instance: GpuInstance, wanted: str) -> ClaimRefusedError:
    return ClaimRefusedError(
        f"{wanted} overlaps with GPU instance {instance.gpu_instance_id} (profile {instance.profile_id}) of GPU "
        f"{gpu.uuid}, which gpu-dra-driver did not create; destroy it with `nvidia-smi mig`, or delete the pod and its "
        "claim so that the scheduler allocates another device"
    )
