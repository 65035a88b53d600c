"""What those ask of the node who work off pending cleanups, and who publish."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path

from dra_driver.errors import StateError
from dra_driver.files.atomic import stamp_or_none
from dra_driver.host.fingerprint import driver_fingerprint
from dra_driver.journal.cleanups import PendingCleanups
from dra_driver.model.driver_programs import SMI_PROGRAM, FindPrograms
from dra_driver.model.inventory import OfferedDevice


def tools_seen(
    programs: FindPrograms, mps_lock: Path, proc: str, detached: Callable[[], str | None]
) -> Hashable:
    """A value that changes when nvidia-smi, the MPS host or the NVIDIA driver comes, goes or is replaced, and when NVML
    may be opened again."""
    try:
        found = programs().paths.get(SMI_PROGRAM)
    except StateError:
        found = None
    program = None if found is None else stamp_or_none(found)
    return (program, stamp_or_none(mps_lock), driver_fingerprint(proc), detached() is None)


def is_owing(cleanups: PendingCleanups) -> Callable[[OfferedDevice], bool]:
    """Whether a pending cleanup keeps a device from being given out, as of now."""
    owing = cleanups.withheld()
    return lambda device: owing(device) is not None
