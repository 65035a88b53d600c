"""Which claims hold what another claim wants. No I/O.

This is the last line of defence against double allocation: schedulers have allocated one device twice. Shares of one
device are not a double allocation, but all claims that share a device must use it in the same mode.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dra_driver.errors import ClaimRefusedError
from dra_driver.model.record import ClaimRecord, HeldDevice
from dra_driver.model.sharing_mode import usage_kind
from dra_driver.model.units import counted
from dra_driver.sharing.rules.modes import incompatibility

Wanted = tuple[str, HeldDevice]
"""The name of a claim's request, and the device that the claim would then hold."""


@dataclass(frozen=True, slots=True)
class Conflict:
    """A claim that keeps another claim from a device; `text` says so in a sentence."""

    holder: ClaimRecord
    held: HeldDevice
    text: str


class DeviceHeldError(ClaimRefusedError):
    """Other claims hold what this claim wants. `conflicts` has at least one entry; the text is that of the first.

    `enough` says how many of the conflicts must end: all of them, or fewer where a device is only full.
    """

    def __init__(
        self, conflicts: Sequence[Conflict], wanted: Sequence[HeldDevice], enough: int | None = None
    ) -> None:
        super().__init__(conflicts[0].text)
        self.conflicts = tuple(conflicts)
        self.wanted = tuple(wanted)
        self.enough = len(conflicts) if enough is None else enough


def refuse_held(wanted: Sequence[Wanted], others: Iterable[ClaimRecord]) -> None:
    """Raises: DeviceHeldError if another claim holds one of the devices, or shares it in another mode."""
    gpus = {device.gpu_uuid for _, device in wanted}
    conflicts = [
        conflict
        for record in others
        if any(held.gpu_uuid in gpus and not held.admin_access for held in record.devices)
        for conflict in _conflicts(wanted, record)
    ]
    if conflicts:
        raise DeviceHeldError(conflicts, [device for _, device in wanted])


def refuse_crowded(
    wanted: Sequence[Wanted], others: Iterable[ClaimRecord], most_clients: Mapping[str, int]
) -> None:
    """Raises: DeviceHeldError if as many claims as the MPS daemon of a device serves clients use it already. It is
    enough then that one of them ends, or as many as are too many.

    `most_clients` says how many that are, of each device with MPS. A claim counts as one client, though its pods may
    have more.
    """
    records = list(others)
    for request, device in wanted:
        most = most_clients.get(device.device)
        if most is None:
            continue
        users: dict[str, tuple[ClaimRecord, HeldDevice]] = {}
        for record in records:
            for held in record.devices:
                if _is_client(held, device):  # once, though a claim in line may have a record too
                    users.setdefault(record.ref.uid, (record, held))
        if len(users) >= most:
            users_of = counted(len(users), "claim uses", "claims use")
            text = (
                f"request {request}: {users_of} the MPS daemon of device {device.device}, and MPS serves "
                f"at most {counted(most, 'client')} with this GPU and driver; wait until one of them is gone"
            )
            raise DeviceHeldError(
                [Conflict(record, held, text) for record, held in users.values()],
                [device for _, device in wanted],
                enough=len(users) - most + 1,
            )


def _is_client(held: HeldDevice, device: HeldDevice) -> bool:
    return held.device == device.device and usage_kind(held.usage) == usage_kind(device.usage)


def _conflicts(wanted: Sequence[Wanted], record: ClaimRecord) -> Iterator[Conflict]:
    for held in record.devices:
        for request, device in wanted:
            if not _same_silicon(held, device):
                continue
            if not _are_shares(held, device):
                yield Conflict(
                    record,
                    held,
                    f"request {request}: device {device.device} is held by claim {record.ref} ({held.device}, "
                    f"{record.phase}); it becomes free when that claim's pod is gone",
                )
                continue
            reason = incompatibility(held.usage, device.usage)
            if reason is not None:
                yield Conflict(
                    record,
                    held,
                    f"request {request}: device {device.device} is shared with claim {record.ref}, and this claim "
                    f"cannot share it in its own mode: {reason}",
                )


def _same_silicon(held: HeldDevice, device: HeldDevice) -> bool:
    """Whether both use the same silicon and neither has admin access."""
    if held.admin_access or device.admin_access or held.gpu_uuid != device.gpu_uuid:
        return False
    if held.kind != "mig" or device.kind != "mig":
        return True
    if held.placement is not None and device.placement is not None:
        return held.placement.overlaps(device.placement)
    return held.device == device.device


def _are_shares(held: HeldDevice, device: HeldDevice) -> bool:
    """Whether both are shares of the same device."""
    is_same = held.device == device.device
    return is_same and held.share_id is not None and device.share_id not in (None, held.share_id)
