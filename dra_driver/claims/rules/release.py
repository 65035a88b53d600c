"""Whether a claim lets go of its devices on this node, from what the API server says of the claim. No I/O.

| The claim in the API server | Its holder is | Its record is |
|---|---|---|
| is gone, or its name has another UID | leaving for good | stale |
| has no allocation | leaving | stale |
| is allocated to other devices than the record's | leaving | stale |
| is allocated to other devices, but not to the one in question | leaving | kept |
| is being deleted, or reserved for nobody | leaving | kept: the kubelet is about to unprepare it |
| is allocated and reserved | staying | kept |

A record that does not say what was allocated to its claim (because the real one was lost) is never stale.
"""

from __future__ import annotations

from dataclasses import dataclass

from dra_driver.model.claim import ClaimNow
from dra_driver.model.record import ClaimRecord


@dataclass(frozen=True, slots=True)
class ReleaseReason:
    """Why a claim lets go of a device, as the end of a sentence that begins with the claim. `is_final` says that this
    cannot change any more."""

    why: str
    is_final: bool = False


def release_reason(
    record: ClaimRecord, now: ClaimNow | None, driver: str, device: str
) -> ReleaseReason | None:
    """Why the claim of a record is about to let go of one of its devices; None if it keeps the device.

    `now` is the claim as the API server has it now, None if it does not exist.
    """
    over = _over(record, now, driver, device)
    if over is not None or now is None:
        return over
    if now.is_deleting:
        return ReleaseReason("is being deleted")
    if not now.is_reserved:
        return ReleaseReason("is used by no pod any more")
    return None


def staleness(record: ClaimRecord, now: ClaimNow | None, driver: str) -> ReleaseReason | None:
    """Why nothing that the record holds is allocated to its claim any more; None if something is."""
    return _over(record, now, driver, None)


def _over(record: ClaimRecord, now: ClaimNow | None, driver: str, device: str | None) -> ReleaseReason | None:
    """Why the device, or with None each device of the record, is not allocated to the claim any more; None if it is."""
    names = [(driver, result.pool, result.device) for result in record.claim.results]
    if not names:
        return None
    if now is None:
        return ReleaseReason("was deleted", is_final=True)
    if now.uid != record.ref.uid:
        return ReleaseReason("was deleted and made anew", is_final=True)
    if now.allocated is None:
        return ReleaseReason("is not allocated any more")
    if not any(name in now.allocated for name in names if device in (None, name[2])):
        return ReleaseReason(f"is allocated to {'another device' if device else 'other devices'} now")
    return None
