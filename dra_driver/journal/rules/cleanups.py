"""Pending cleanups: what is still to be undone for a claim that has ended. No I/O.

| To be undone | The device meanwhile | Is void |
|---|---|---|
| a time slice | is offered, and nobody waits for it | after a reboot |
| an MPS daemon, with its compute mode | is withheld; who wants the GPU has it undone first | after a reboot |
| a MIG device, while the GPU is busy | is withheld; who wants the GPU has it destroyed first | after a reboot |
| a card's return from vfio, while a virtual machine runs | is withheld in every view; the same | after a reboot |

A MIG device that cannot be destroyed for another reason is an orphan in the ledger of `mig`, and no pending cleanup. A
step is also void if a newer claim is prepared that has set the same thing again: then that claim's Unprepare takes it
back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from dra_driver.model.inventory import OfferedDevice
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import BindVfio, CreateMig, RunMps, SetTimeSlice, Step, writes_files

CleanupKind = Literal["time-slice", "mps", "mig-device", "vfio"]
CLEANUP_KINDS: tuple[CleanupKind, ...] = ("time-slice", "mps", "mig-device", "vfio")


@dataclass(frozen=True, slots=True)
class PendingCleanup:
    """What is still to be undone for one ended claim. `name` is the name of its file without suffix. `record` is the
    claim's last record, and `steps` are those of its steps whose undo is missing. `since` is in seconds since 1970.
    `cause` says why the last try failed, None if this process has not tried."""

    name: str
    record: ClaimRecord
    steps: tuple[Step, ...]
    since: int
    cause: str | None = None

    @property
    def kinds(self) -> tuple[CleanupKind, ...]:
        """What is to be undone, each kind once."""
        return tuple(dict.fromkeys(map(kind_of, self.steps)))

    @property
    def text(self) -> str:
        """One sentence: what is pending for which claim, why, and what to do."""
        pending = ", ".join(what(step) for step in self.steps)
        cause = f": {self.cause}" if self.cause else ""
        return f"Cleanup pending for claim {self.record.ref}: {pending}{cause}; {remedy(self.steps)}"


def kind_of(step: Step) -> CleanupKind:
    """The kind of a step whose undo can be pending."""
    match step:
        case RunMps():
            return "mps"
        case CreateMig():
            return "mig-device"
        case BindVfio():
            return "vfio"
        case _:
            return "time-slice"


def still_pending(steps: Iterable[Step], record: ClaimRecord, boot_id: str) -> tuple[Step, ...]:
    """Those of an ended claim's steps whose undo can be pending and that no reboot has made void."""
    return tuple(
        step
        for step in steps
        if isinstance(step, SetTimeSlice | RunMps | CreateMig | BindVfio)
        and (isinstance(step, RunMps) or record.boot_id == boot_id)
    )


def without(steps: Iterable[Step], others: Iterable[Step]) -> tuple[Step, ...]:
    """The steps that set something which none of the others sets: two of one thing are undone once."""
    things = {_thing(step) for step in others} - {None}
    return tuple(step for step in steps if _thing(step) not in things)


def gpus_of(step: Step) -> frozenset[str]:
    """UUIDs of the GPUs that the step changes."""
    if isinstance(step, RunMps):
        return frozenset(step.spec.gpu_uuids)
    uuid = getattr(step, "gpu_uuid", "")
    return frozenset({uuid} if uuid else ())


def by_gpus(steps: Iterable[Step]) -> list[tuple[frozenset[str], list[Step]]]:
    """The steps that change GPUs, in their order, by the GPUs that they change. Those of different groups may be done
    side by side, because no GPU is in two; an MPS daemon of several GPUs joins theirs."""
    changing = [(gpus_of(step), step) for step in steps if not writes_files(step)]
    groups: list[frozenset[str]] = []
    for gpus, _ in changing:
        joined = [group for group in groups if group & gpus or group == gpus]
        groups = [group for group in groups if group not in joined] + [gpus.union(*joined)]
    return [(group, [step for gpus, step in changing if gpus & group or gpus == group]) for group in groups]


def withholding(
    cleanups: Iterable[PendingCleanup], device: OfferedDevice, boot_id: str
) -> PendingCleanup | None:
    """The first pending cleanup that keeps a device from being given out, if there is one."""
    return next(
        (
            cleanup
            for cleanup in cleanups
            if cleanup.record.boot_id == boot_id and any(_withholds(step, device) for step in cleanup.steps)
        ),
        None,
    )


def what(step: Step) -> str:
    """What is to be done, such as `destroy MIG device gpu-1-mig-1g10gb-19-0`."""
    match step:
        case SetTimeSlice(gpu_uuid=uuid):
            return f"reset the time slice of GPU {uuid}"
        case RunMps(spec=spec):
            return f"stop the MPS daemon of device {', '.join(spec.devices)}"
        case CreateMig(device=device):
            return f"destroy MIG device {device}"
        case BindVfio(gpu_uuid=uuid, pci_bus_id=bus_id):
            return f"return GPU {uuid} ({bus_id}) to the NVIDIA driver"
        case _:
            return type(step).__name__


def remedy(steps: Sequence[Step]) -> str:
    """What a person can do about the worst of what is pending."""
    kinds = {kind_of(step) for step in steps}
    if "mps" in kinds:
        host = "the MPS host (DaemonSet gpu-dra-driver-mps)"
        return f"gpu-dra-driver retries; check that {host} and nvidia-smi work on the node"
    if "vfio" in kinds:
        return "gpu-dra-driver retries"
    if "mig-device" in kinds:
        return "gpu-dra-driver retries when the GPU is free"
    return "gpu-dra-driver retries; check that nvidia-smi works on the node"


def _thing(step: Step) -> tuple[str, str] | None:
    """What a step sets; None if that is not known."""
    match step:
        case SetTimeSlice(gpu_uuid=uuid):
            return ("time-slice", uuid)
        case RunMps(spec=spec):
            return ("mps", ",".join(spec.devices))
        case CreateMig(device=device):
            return ("mig-device", device)
        case BindVfio(pci_bus_id=bus_id):
            return ("vfio", bus_id)
        case _:
            return None


def _withholds(step: Step, device: OfferedDevice) -> bool:
    match step:
        case RunMps(spec=spec) if spec.kind == "mig":
            return device.name == spec.device
        case CreateMig(device=name):
            return device.name == name
        case RunMps(spec=spec):
            return device.gpu.uuid in spec.gpu_uuids
        case BindVfio(gpu_uuid=uuid):
            return device.gpu.uuid == uuid
        case _:
            return False
