"""Decides which claims hold a device that another claim needs, and whether they are about to release it.

A holder is leaving, and its record is stale, if the API server has no claim with its name and UID, or that
claim has none of the record's devices any more. A holder is also leaving, but not stale, if its claim has
other devices of the record, is being deleted, or is reserved for no pod: the kubelet is about to unprepare
it.

The substitute for a lost record does not list allocated devices, and is never stale.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from dra_driver.errors import ClaimRefusedError
from dra_driver.model.claim import ClaimNow, HeldDevice
from dra_driver.model.dataclass import dataclass
from dra_driver.model.mps import usage_kind
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import StartMaintenance, Step
from dra_driver.model.units import counted, named
from dra_driver.power.rules.limits import DIFFERENT, limits_on
from dra_driver.sharing.rules.modes import incompatibility

_MAX_NAMED = 8
Wanted = tuple[str, HeldDevice]
"""A request's name, and the device that the claim would hold."""


@dataclass(frozen=True, slots=True)
class Conflict:
    holder: ClaimRecord
    held: HeldDevice
    text: str


class DeviceHeldError(ClaimRefusedError):
    """`enough` of the `conflicts`, at least one, must end: all, or fewer if they only fill an MPS daemon."""

    def __init__(self, conflicts: Sequence[Conflict], enough: int | None = None) -> None:
        super().__init__(conflicts[0].text)
        self.conflicts = tuple(conflicts)
        self.enough = len(conflicts) if enough is None else enough


def refuse_held(wanted: Sequence[Wanted], others: Iterable[ClaimRecord], limits: Sequence[Step] = ()) -> None:
    """Raise DeviceHeldError if another claim holds one of the devices, or shares it in another mode or with
    other `limits` of power and clocks.
    """
    gpus = {device.gpu_uuid for _, device in wanted}
    conflicts = [
        conflict
        for record in others
        for held in record.devices
        if held.gpu_uuid in gpus and not held.admin_access
        for conflict in _conflicts(wanted, record, held, limits)
    ]
    if conflicts:
        raise DeviceHeldError(conflicts)


def refuse_crowded(
    wanted: Sequence[Wanted], others: Iterable[ClaimRecord], max_clients: Mapping[str, int]
) -> None:
    """Raise DeviceHeldError if a device's MPS daemon has its maximum number of clients. A claim counts as
    one.
    """
    records = list(others)
    for request, device in wanted:
        most = max_clients.get(device.device)
        if most is None:
            continue
        users = [
            (record, held)
            for record in records
            if (held := next((held for held in record.devices if _is_client(held, device)), None)) is not None
        ]
        if len(users) >= most:
            users_of = counted(len(users), "claim uses", "claims use")
            text = (
                f"request {request}: {users_of} the MPS daemon of device {device.device}, and MPS serves at most "
                f"{counted(most, 'client')} with this GPU and driver; wait until all pods of one of these "
                "claims are gone"
            )
            raise DeviceHeldError([Conflict(*user, text) for user in users], enough=len(users) - most + 1)


def claims_to_wait_for(step: StartMaintenance, others: Iterable[ClaimRecord]) -> tuple[str, ...]:
    """Return the claims on the step's GPUs, except for other waiting maintenance claims. A claim with
    adminAccess counts too: its pod has the GPU open. Raises: ClaimRefusedError if there are claims and the
    policy is Refuse.
    """
    users = tuple(
        sorted(
            f"{record.ref.namespace}/{record.ref.name}"
            for record in others
            if (record.maintenance is None or record.phase == "prepared")
            and not record.gpu_uuids.isdisjoint(step.gpu_uuids)
        )
    )
    if users and step.policy == "Refuse":
        raise ClaimRefusedError(
            f"claims use the GPUs: {named(users, _MAX_NAMED)}; delete their pods first, or set policy: Wait in the "
            "MaintenanceConfig"
        )
    return users


def refuse_in_maintenance(wanted: Sequence[Wanted], others: Iterable[ClaimRecord]) -> None:
    conflicts = [
        Conflict(
            record,
            held,
            f"request {request}: the GPU of device {device.device} is in maintenance for claim {record.ref}; delete "
            "the pod so that it starts on another GPU, or wait until that claim is released",
        )
        for record in others
        if record.maintenance is not None
        for held in record.devices
        for request, device in wanted
        if held.gpu_uuid == device.gpu_uuid
    ]
    if conflicts:
        raise DeviceHeldError(conflicts)


def _is_client(held: HeldDevice, device: HeldDevice) -> bool:
    return held.device == device.device and usage_kind(held.usage) == usage_kind(device.usage)


def _conflicts(
    wanted: Sequence[Wanted], record: ClaimRecord, held: HeldDevice, limits: Sequence[Step]
) -> Iterator[Conflict]:
    for request, device in wanted:
        if not _same_silicon(held, device):
            continue
        if not _are_shares(held, device):
            text = (
                f"request {request}: device {device.device} is held by claim {record.ref} ({held.device}, "
                f"{record.phase}); the plugin releases the device when all pods of that claim are gone"
            )
        elif (reason := incompatibility(held.usage, device.usage)) is not None:
            text = (
                f"request {request}: claim {record.ref} already shares device {device.device}, and this claim's "
                f"sharing mode does not fit: {reason}"
            )
        elif limits_on(record.steps, held.gpu_uuid) != limits_on(limits, held.gpu_uuid):
            text = (
                f"request {request}: claim {record.ref} already shares device {device.device}, and {DIFFERENT}; change "
                "this claim's parameters, or request a device that is not shared"
            )
        else:
            continue
        yield Conflict(record, held, text)


def _same_silicon(held: HeldDevice, device: HeldDevice) -> bool:
    """Whether both use the same part of a GPU, and neither has adminAccess."""
    if held.admin_access or device.admin_access or held.gpu_uuid != device.gpu_uuid:
        return False
    if held.kind != "mig" or device.kind != "mig":
        return True
    if held.placement is not None and device.placement is not None:
        return held.placement.overlaps(device.placement)
    return held.device == device.device


def _are_shares(held: HeldDevice, device: HeldDevice) -> bool:
    is_same = held.device == device.device
    return is_same and held.share_id is not None and device.share_id not in (None, held.share_id)


def release_reason(record: ClaimRecord, now: ClaimNow | None, driver: str, device: str) -> str | None:
    """Return why the claim will soon release a device, as the end of a sentence that begins with the claim;
    None if it keeps it. `now` is None if the claim does not exist.
    """
    over = _over(record, now, driver, device)
    if over is not None or now is None:
        return over
    if now.is_deleting:
        return "is being deleted"
    if not now.is_reserved:
        return "is no longer used by a pod"
    return None


def staleness(record: ClaimRecord, now: ClaimNow | None, driver: str) -> str | None:
    """Return why none of the record's devices is still allocated; None if one is."""
    return _over(record, now, driver, None)


def _over(record: ClaimRecord, now: ClaimNow | None, driver: str, device: str | None) -> str | None:
    names = [(driver, result.pool, result.device) for result in record.claim.results]
    if not names:
        return None
    if now is None:
        return "was deleted"
    if now.uid != record.ref.uid:
        return "was deleted and created again"
    if now.allocated is None:
        return "is no longer allocated"
    if not any(name in now.allocated for name in names if device in (None, name[2])):
        return f"now has {'another device' if device else 'other devices'}"
    return None
