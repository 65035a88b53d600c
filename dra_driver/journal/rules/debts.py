"""Debts: what a claim that has ended still owes to the node. No I/O.

| Owed | The device meanwhile | Is void |
|---|---|---|
| a time slice | is offered; the next Prepare tries to reset it, and goes on if that fails | after a reboot |
| an MPS daemon, with its compute mode | is withheld; a Prepare that wants it fails for now | after a reboot |
| a MIG device, while the GPU is busy | is withheld; a Prepare that gets the GPU destroys it | after a reboot |

A MIG device that cannot be destroyed for another reason is an orphan in the ledger of `mig`, and no debt. A step is
also void if a newer claim is prepared that has set the same thing again: then that claim's Unprepare takes it back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from dra_driver.model.inventory import OfferedDevice
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import CreateMig, RunMps, SetTimeSlice, Step

DebtKind = Literal["time-slice", "mps", "mig-device"]
DEBT_KINDS: tuple[DebtKind, ...] = ("time-slice", "mps", "mig-device")


@dataclass(frozen=True, slots=True)
class Debt:
    """What one ended claim owes. `name` is the name of its file without suffix. `record` is the claim's last record,
    and `steps` are those of its steps whose undo is owed. `since` is in seconds since 1970. `cause` says why the last
    try failed, None if this process has not tried."""

    name: str
    record: ClaimRecord
    steps: tuple[Step, ...]
    since: int
    cause: str | None = None

    @property
    def gpu_uuids(self) -> frozenset[str]:
        """The GPUs whose locks a payment needs."""
        return frozenset(uuid for step in self.steps for uuid in gpus_of(step, self.record))

    @property
    def kinds(self) -> tuple[DebtKind, ...]:
        """What is owed, each kind once."""
        return tuple(dict.fromkeys(map(kind_of, self.steps)))

    @property
    def text(self) -> str:
        """One sentence: what is owed for which claim, why, and what to do."""
        owed = ", ".join(what(step) for step in self.steps)
        cause = f": {self.cause}" if self.cause else ""
        return f"claim {self.record.ref} has ended but owes {owed}{cause}; {remedy(self.steps)}"


def can_be_owed(step: Step) -> bool:
    """Whether the claim may end although the step could not be undone."""
    return isinstance(step, SetTimeSlice | RunMps | CreateMig)


def kind_of(step: Step) -> DebtKind:
    """The kind of a step that can be owed."""
    match step:
        case RunMps():
            return "mps"
        case CreateMig():
            return "mig-device"
        case _:
            return "time-slice"


def still_owed(steps: Iterable[Step], record: ClaimRecord, boot_id: str) -> tuple[Step, ...]:
    """Those of an ended claim's steps that can be owed and that no reboot has made void."""
    return tuple(
        step
        for step in steps
        if can_be_owed(step) and (isinstance(step, RunMps) or record.boot_id == boot_id)
    )


def without(steps: Iterable[Step], others: Iterable[Step]) -> tuple[Step, ...]:
    """The steps that set something which none of the others sets: two of one thing are undone once."""
    things = {_thing(step) for step in others} - {None}
    return tuple(step for step in steps if _thing(step) not in things)


def gpus_of(step: Step, record: ClaimRecord) -> frozenset[str]:
    """UUIDs of the GPUs that the step has changed; of a step that is never owed, all that the claim held."""
    match step:
        case SetTimeSlice(gpu_uuid=uuid):
            return frozenset({uuid})
        case RunMps(spec=spec):
            return frozenset(spec.gpu_uuids)
        case CreateMig(gpu_uuid=uuid):
            return frozenset({uuid})
        case _:
            return record.locked_gpus


def withholding(debts: Iterable[Debt], device: OfferedDevice, boot_id: str) -> Debt | None:
    """The first debt that keeps a device from being given out, if there is one."""
    return next(
        (debt for debt in debts if any(_withholds(step, debt, device, boot_id) for step in debt.steps)), None
    )


def what(step: Step) -> str:
    """What is owed, as the object of a sentence."""
    match step:
        case SetTimeSlice(gpu_uuid=uuid):
            return f"the default time slice of GPU {uuid}"
        case RunMps(spec=spec):
            return f"the end of the MPS daemon of device {', '.join(spec.devices)}"
        case CreateMig(device=device):
            return f"the end of MIG device {device}"
        case _:
            return type(step).__name__


def remedy(steps: Sequence[Step]) -> str:
    """What a person can do about the worst of what is owed."""
    kinds = {kind_of(step) for step in steps}
    if "mps" in kinds:
        return "the driver tries again; see that the MPS host (DaemonSet gpu-dra-driver-mps) and nvidia-smi work there"
    if "mig-device" in kinds:
        return "the driver tries again as soon as nobody else works on the GPU"
    return "the driver tries again; see that nvidia-smi works on the node"


def _thing(step: Step) -> tuple[str, str] | None:
    """What a step sets; None if that is not known."""
    match step:
        case SetTimeSlice(gpu_uuid=uuid):
            return ("time-slice", uuid)
        case RunMps(spec=spec):
            return ("mps", ",".join(spec.devices))
        case CreateMig(device=device):
            return ("mig-device", device)
        case _:
            return None


def _withholds(step: Step, debt: Debt, device: OfferedDevice, boot_id: str) -> bool:
    if debt.record.boot_id != boot_id:
        return False
    match step:
        case RunMps(spec=spec) if spec.kind == "mig":
            return device.name == spec.device
        case CreateMig(device=name):
            return device.name == name
        case RunMps(spec=spec):
            return device.gpu.uuid in spec.gpu_uuids
        case _:
            return False
