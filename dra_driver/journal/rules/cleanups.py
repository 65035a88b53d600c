"""Decides which cleanups are pending: ledger entries whose claims no longer need them.

| Step to undo | Its device until the cleanup |
|---|---|
| a time slice | is offered, and no claim waits for the cleanup |
| an MPS daemon and its compute mode | is withheld; a Prepare that needs the GPU does the cleanup first |
| a MIG device | is withheld, and so is what overlaps it; a Prepare that needs the GPU destroys it first |
| a card in vfio, while a virtual machine runs | is withheld, like all devices of the GPU; a Prepare returns it first |

A setting that an active claim also needs is not undone; the active claim's own entry stays. A reboot undoes everything
except the directories of MPS daemons.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal

from dra_driver.model.claim import AllocatedClaim, ClaimRef
from dra_driver.model.dataclass import dataclass
from dra_driver.model.gpu import OwnedCard
from dra_driver.model.inventory import OfferedDevice
from dra_driver.model.mig import OwnedInstance, OwnedMode
from dra_driver.model.record import (
    BindVfio,
    ClaimRecord,
    CreateMig,
    HeldDevice,
    RunMps,
    SetTimeSlice,
    StartMaintenance,
    Step,
    writes_files,
)

CleanupKind = Literal["time-slice", "mps", "mig-device", "vfio"]
Thing = tuple[str, str]
"""What a step sets, such as the time slice of a GPU."""
CLEANUP_KINDS: tuple[CleanupKind, ...] = ("time-slice", "mps", "mig-device", "vfio")


@dataclass(frozen=True, slots=True)
class LedgerEntry:
    """A step that was done, or is about to be done, for a claim in boot `boot_id`.

    `ended` is when the claim ended, in seconds since 1970, and `cause` is why the last undo failed; both are None
    before the first try.
    """

    claim: ClaimRef
    boot_id: str
    step: Step
    ended: int | None = None
    cause: str | None = None

    @property
    def key(self) -> tuple[str, Step]:
        """The key of the entry. A claim has each step at most once."""
        return self.claim.uid, self.step

    @property
    def home(self) -> str:
        """The UUID of the GPU whose ledger has the entry: the first GPU of its step."""
        return min(gpus_of(self.step))


@dataclass(frozen=True, slots=True)
class PendingCleanup:
    """What must still be undone for one ended claim. `name` is the claim's UID.

    `record` contains the claim's data from the ledgers, and `steps` are the steps to undo. `since` is when the claim
    ended, in seconds since 1970. `cause` is why the last try failed; None before the first try.
    """

    name: str
    record: ClaimRecord
    steps: tuple[Step, ...]
    since: int
    cause: str | None = None

    @property
    def kinds(self) -> tuple[CleanupKind, ...]:
        """The kinds of the steps to undo, without duplicates."""
        return tuple(dict.fromkeys(map(kind_of, self.steps)))

    def withholds(self, boot_id: str | None) -> bool:
        """Whether a device is withheld until this cleanup is done, as in the table above."""
        return boot_id in (None, self.record.boot_id) and self.kinds != ("time-slice",)

    @property
    def text(self) -> str:
        """One sentence: what is pending for which claim, why, and what to do."""
        pending = ", ".join(what(step) for step in self.steps)
        cause = f": {self.cause}" if self.cause else ""
        return f"Cleanup pending for claim {self.record.ref}: {pending}{cause}; {remedy(self.steps)}"


@dataclass(frozen=True, slots=True)
class UnreadLedger:
    """A GPU's ledger that a newer release wrote, at `since` seconds since 1970. Nothing is known about its cleanups, so
    it withholds every device of the GPU.
    """

    gpu_uuid: str
    since: int
    why: str

    @property
    def kinds(self) -> tuple[str, ...]:
        """Like `PendingCleanup.kinds`."""
        return ("unknown",)

    @property
    def text(self) -> str:
        """One sentence: which GPU gets no new claims, why, and what to do."""
        return f"GPU {self.gpu_uuid} gets no new claims: {self.why}"


Withholding = PendingCleanup | UnreadLedger
"""Why a device is withheld."""


def kind_of(step: Step) -> CleanupKind:
    """Return the kind of cleanup for a step."""
    match step:
        case RunMps():
            return "mps"
        case CreateMig():
            return "mig-device"
        case BindVfio():
            return "vfio"
        case _:
            return "time-slice"


def is_undone_in_lane(step: Step) -> bool:
    """Whether the undo of the step changes a GPU, and can therefore be pending."""
    return isinstance(step, SetTimeSlice | RunMps | CreateMig | BindVfio)


def counts(item: LedgerEntry | OwnedInstance | OwnedMode | OwnedCard, boot_id: str | None) -> bool:
    """Whether a ledger item is still valid: no reboot has undone it. A reboot does not remove the directory of an MPS
    daemon.

    Without a `boot_id`, every item is valid.
    """
    return boot_id in (None, item.boot_id) or (
        isinstance(item, LedgerEntry) and isinstance(item.step, RunMps)
    )


def has_ended(
    entry: LedgerEntry, records: Mapping[str, ClaimRecord], without_record: Collection[str]
) -> bool:
    """Whether no claim still needs the entry: its claim's record does not name the step, and the claim is not in
    `without_record`.
    """
    record = records.get(entry.claim.uid)
    return entry.claim.uid not in without_record if record is None else entry.step not in record.steps


def pending_cleanups(
    entries: Iterable[LedgerEntry], needed: Sequence[Step], since: Callable[[LedgerEntry], int]
) -> list[PendingCleanup]:
    """Return one pending cleanup for each ended claim, ordered by UID.

    Leaves out a step that sets the same thing as a `needed` step, because another claim still uses it.
    """
    ended: dict[str, list[LedgerEntry]] = {}
    for entry in entries:
        ended.setdefault(entry.claim.uid, []).append(entry)
    kept = things(needed)
    found = (_pending(ended[uid], kept, since) for uid in sorted(ended))
    return [one for one in found if one.steps]


def _pending(
    entries: Sequence[LedgerEntry], kept: Collection[Thing], since: Callable[[LedgerEntry], int]
) -> PendingCleanup:
    causes = dict.fromkeys(entry.cause for entry in entries if entry.cause)
    record = record_of(entries)
    return PendingCleanup(
        record.ref.uid,
        record,
        without(record.steps, kept),
        min(map(since, entries)),
        "; ".join(causes) or None,
    )


def record_of(entries: Sequence[LedgerEntry]) -> ClaimRecord:
    """Return a record with the data of one claim's entries."""
    steps = tuple(entry.step for entry in entries)
    devices = tuple(held for step in steps for held in _devices(step))
    claim = AllocatedClaim(entries[0].claim, (), ())
    return ClaimRecord(claim, "preparing", entries[0].boot_id, devices, steps)


def _devices(step: Step) -> list[HeldDevice]:
    match step:
        case RunMps(spec=spec):
            named = zip(spec.devices, spec.gpu_uuids, strict=True)
            return [HeldDevice(device, spec.kind, spec.uuid, gpu_uuid) for device, gpu_uuid in named]
        case CreateMig():
            return [HeldDevice(step.device, "mig", "", step.gpu_uuid, placement=step.placement)]
        case BindVfio():
            return [HeldDevice(step.device, "vfio", "", step.gpu_uuid)]
        case _:
            return []


def without(steps: Iterable[Step], kept: Collection[Thing]) -> tuple[Step, ...]:
    """Return the steps that set nothing in `kept`, so that the same thing is undone only once."""
    return tuple(step for step in steps if _things(step).isdisjoint(kept))


def things(steps: Iterable[Step]) -> frozenset[Thing]:
    """Return what the steps set."""
    return frozenset[Thing]().union(*map(_things, steps))


def gpus_of(step: Step) -> frozenset[str]:
    """Return the UUIDs of the GPUs that the step changes."""
    if isinstance(step, RunMps):
        return frozenset(step.spec.gpu_uuids)
    if isinstance(step, StartMaintenance):
        return frozenset(step.gpu_uuids)
    uuid = getattr(step, "gpu_uuid", "")
    return frozenset({uuid} if uuid else ())


def by_gpus(steps: Iterable[Step]) -> list[tuple[frozenset[str], list[Step]]]:
    """Group the steps by the GPUs that they change; a group keeps the order of its steps. Leaves out steps that
    only write files.

    No GPU is in two groups, so groups can run in parallel. An MPS daemon of several GPUs merges their groups.
    """
    changing = [(gpus_of(step), step) for step in steps if not writes_files(step)]
    groups: list[frozenset[str]] = []
    for gpus, _ in changing:
        joined = [group for group in groups if group & gpus or group == gpus]
        groups = [group for group in groups if group not in joined] + [gpus.union(*joined)]
    return [(group, [step for gpus, step in changing if gpus & group or gpus == group]) for group in groups]


def withholding(
    cleanups: Iterable[PendingCleanup], device: OfferedDevice, boot_id: str
) -> PendingCleanup | None:
    """Return the first pending cleanup that withholds a device; None if there is none."""
    return next(
        (
            cleanup
            for cleanup in cleanups
            if cleanup.withholds(boot_id) and any(_withholds(step, device) for step in cleanup.steps)
        ),
        None,
    )


def what(step: Step) -> str:
    """Return what must be done, such as `destroy MIG device gpu-1-mig-1g10gb-19-0`."""
    match step:
        case SetTimeSlice(gpu_uuid=uuid):
            return f"reset the time slice of GPU {uuid}"
        case RunMps(spec=spec):
            noun = "device" if len(spec.devices) == 1 else "devices"
            return f"stop the MPS daemon of {noun} {', '.join(spec.devices)}"
        case CreateMig(device=device):
            return f"destroy MIG device {device}"
        case BindVfio(gpu_uuid=uuid, pci_bus_id=bus_id):
            return f"return GPU {uuid} ({bus_id}) to the NVIDIA driver"
        case _:
            return type(step).__name__


def remedy(steps: Sequence[Step]) -> str:
    """Return what a person can do about the worst pending step."""
    kinds = {kind_of(step) for step in steps}
    if "mps" in kinds:
        host = "the MPS host (DaemonSet gpu-dra-driver-mps)"
        return f"gpu-dra-driver retries; check that {host} and nvidia-smi work on the node"
    if "vfio" in kinds:
        return "gpu-dra-driver retries"
    if "mig-device" in kinds:
        return "gpu-dra-driver retries when the GPU is free"
    return "gpu-dra-driver retries; check that nvidia-smi works on the node"


def _things(step: Step) -> frozenset[Thing]:
    """Return what a step sets; empty if unknown. A device has at most one MPS daemon, whatever other GPUs the daemon
    serves.
    """
    match step:
        case SetTimeSlice(gpu_uuid=uuid):
            return frozenset({("time-slice", uuid)})
        case RunMps(spec=spec):
            return frozenset(("mps", device) for device in spec.devices)
        case CreateMig(device=device):
            return frozenset({("mig-device", device)})
        case BindVfio(pci_bus_id=bus_id):
            return frozenset({("vfio", bus_id)})
        case _:
            return frozenset()


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
