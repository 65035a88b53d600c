"""Stopping a daemon while no MPS host runs: the wish is written where the next host reads it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import structlog

from dra_driver.errors import RetryableError, StateError
from dra_driver.model.mps import MpsDaemonSpec, MpsKind
from dra_driver.mps import daemon_processes as processes
from dra_driver.mps.compute_mode import DEFAULT
from dra_driver.mps.layout import MpsLayout
from dra_driver.mps.records import DaemonRecord, DaemonRecords

_log = structlog.get_logger(__name__)

_POLL_S = 0.02


class HostRunsError(RetryableError):
    """Another process has the lock of the layout's host."""


@contextmanager
def held_lock(layout: MpsLayout, timeout_s: float = 0.0) -> Iterator[int]:
    """The right to be the host of the layout, as a descriptor. Raises: HostRunsError; OSError."""
    deadline = time.monotonic() + timeout_s
    descriptor = os.open(layout.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise HostRunsError(f"another MPS host serves {layout.root} already") from error
                time.sleep(_POLL_S)
        yield descriptor
    finally:
        os.close(descriptor)


def has_traces(layout: MpsLayout, records: DaemonRecords, device: str) -> bool:
    """Whether anything of a daemon is left. A compute mode alone does not count: an administrator may have set it."""
    return (
        layout.directory(device).exists()
        or records.has_any(device)
        or bool(processes.users_of(layout.directories(device).pipe))
    )


def leave_stop(layout: MpsLayout, device: str, gpu_uuid: str | None, kind: MpsKind | None) -> bool:
    """Have the next host stop the device's daemon; whether there is anything to stop.

    The record says so, which is written before a daemon is started: a crash before or after the write leaves the one
    or the other. Raises: HostRunsError if a host runs, though it may not listen yet; StateError.
    """
    records = DaemonRecords(layout)
    if not has_traces(layout, records, device):
        return False
    try:
        with held_lock(layout):
            record = records.read(device)
            if record is not None:
                records.write(replace(record, wanted="stopped"))
            elif gpu_uuid is not None and kind == "gpu":
                spec = MpsDaemonSpec(device, gpu_uuid, kind, gpu_uuid)
                boot_id = processes.boot_id()
                records.write(DaemonRecord(spec, "stopped", boot_id, compute_mode_before=DEFAULT))
            else:
                # Which GPU it is on is not known: the host of that device's next daemon takes over what is there.
                _log.error("mps_daemon_without_record", device=device)
    except OSError as error:
        raise StateError(f"cannot lock {layout.lock}: {error.strerror or error}") from error
    return True
