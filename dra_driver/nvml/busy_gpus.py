"""Which processes keep a GPU or a MIG device from being changed, in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress

from dra_driver.errors import DeviceBusyError, DraDriverError
from dra_driver.model.units import named
from dra_driver.nvml.failures import Handle
from dra_driver.nvml.processes import PROCESS_LISTS, listed, process_name, process_text

_MOST_NAMED = 8


def holders_of(handles: Iterable[Handle]) -> list[str]:
    """The processes that NVML shows on GPUs or MIG devices, as `process 4711 (python3)` in the order of their
    IDs; those that it cannot tell are missing."""
    pids: set[int] = set()
    for handle in handles:
        for versions in PROCESS_LISTS:
            with suppress(DraDriverError):
                pids |= {int(process.pid) for process in listed(handle, "the device", versions)}
    return [process_text(pid, process_name(pid)) for pid in sorted(pids)]


def busy_error(action: str, holders: Sequence[str], subject: str, look_at: str) -> DeviceBusyError:
    """The error of an action that failed because `subject` is in use by `holders`; where none is known,
    `look_at` is how to find out on the node."""
    if not holders:
        return DeviceBusyError(
            f"{action}: {subject} is in use, but NVML shows no process on it; it may be a monitor such as DCGM "
            f"or a process that has the device file open: look with {look_at}"
        )
    return DeviceBusyError(
        f"{action}: {subject} is in use by {named(holders, _MOST_NAMED)}; stop the process, or wait "
        "until it ends"
    )
