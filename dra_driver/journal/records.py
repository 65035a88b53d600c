"""The claim records, one JSON file for each claim, and the locks on claims, between threads.

A claim's lock remembers the last Prepare and Unprepare. When a pod is deleted, the kubelet cancels its
Prepare and calls Unprepare while the Prepare still runs. Such a late Prepare must not write a record that no
Unprepare would ever remove; an Unprepare that a newer Prepare has overtaken must keep what that Prepare did;
and the reconciler must not unprepare a claim because of an answer that is older than its Prepare.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import structlog

from dra_driver.base.fields import (
    NUMBER,
    Codec,
    FileFormat,
    Kind,
    Tagged,
    list_of,
    omittable,
    one_of,
    required,
)
from dra_driver.base.file_lock import LockBusyError
from dra_driver.base.json_store import JsonStore, UnreadableFile, log_unreadable, open_directory
from dra_driver.errors import StateError
from dra_driver.model.claim import AllocatedClaim, HeldDevice
from dra_driver.model.dataclass import dataclass, field
from dra_driver.model.host import ImexChannels
from dra_driver.model.ids import is_uid
from dra_driver.model.mps import MpsShared, SharingMode, TimeSliced
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import STEPS, Step

_log = structlog.get_logger(__name__)

_REMEMBERED = 1024
"""Far more claims than a node processes during one call."""
_CHECK_S = 0.1


def _imex(name: str, value: Any) -> ImexChannels:
    if isinstance(value, str):
        every: ImexChannels = one_of("IMEX channel", "all").read(name, value)
        return every
    return int(NUMBER.read(name, value))


STEP: Tagged[Step] = Tagged(
    "step",
    **{step.tag: Codec(step) for step in STEPS},
)
_USAGE: Tagged[SharingMode] = Tagged("sharing mode", time_sliced=Codec(TimeSliced), mps=Codec(MpsShared))
_HELD = Codec(HeldDevice, usage=omittable(_USAGE.kind), imex=omittable(Kind(_imex), name="imexChannel"))
_RECORD = Codec(
    ClaimRecord,
    claim=required(Codec(AllocatedClaim, reported=None).kind),
    devices=required(list_of(_HELD.kind)),
    steps=required(list_of(STEP.kind)),
)
RECORD_FILE = FileFormat("claim record", _RECORD.decode, _RECORD.encode)


@contextmanager
def _in_time(
    lock: threading.Lock, timeout_s: float, busy: str, is_cancelled: Callable[[], bool] | None
) -> Iterator[None]:
    """Raise LockBusyError after `timeout_s` seconds, or if `is_cancelled` returns True."""
    deadline = time.monotonic() + timeout_s
    step = math.inf if is_cancelled is None else _CHECK_S
    while not lock.acquire(timeout=max(0.0, min(deadline - time.monotonic(), step))):
        if time.monotonic() >= deadline or (is_cancelled is not None and is_cancelled()):
            raise LockBusyError(busy)
    try:
        yield
    finally:
        lock.release()


class PlanningLock:
    """Held from reading all records until a claim's own is written, so that two claims never get the same
    device.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def hold(
        self, timeout_s: float, is_cancelled: Callable[[], bool] | None = None
    ) -> AbstractContextManager[None]:
        busy = (
            "the planning of another claim has not finished; the disk may be slow; this call will be retried"
        )
        return _in_time(self._lock, timeout_s, busy, is_cancelled)


@dataclass(slots=True, eq=False)
class ClaimGuard:
    """It remembers when the last successful Prepare ended, and when each last successful call began
    (time.monotonic_ns(); -1 for none). `wanted` counts the calls that hold the lock or wait for it.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    wanted: int = 0
    prepared_ns: int = -1
    prepare_began_ns: int = -1
    unprepare_began_ns: int = -1

    def was_unprepared_since(self, moment_ns: int) -> bool:
        """Whether an Unprepare that began at `moment_ns` or later has ended."""
        return moment_ns <= self.unprepare_began_ns

    def was_prepared_since(self, moment_ns: int) -> bool:
        return moment_ns <= self.prepared_ns

    def was_prepared_by_call_after(self, moment_ns: int) -> bool:
        return moment_ns < self.prepare_began_ns

    def note_unprepared(self, began_ns: int) -> None:
        self.unprepare_began_ns = max(self.unprepare_began_ns, began_ns)

    def note_prepared(self, began_ns: int) -> None:
        self.prepared_ns = time.monotonic_ns()
        self.prepare_began_ns = max(self.prepare_began_ns, began_ns)


class ClaimLocks:
    """By UID. A claim's lock is always taken before the planning lock. `hold` of both raises LockBusyError
    after `timeout_s` seconds, or if the kubelet cancels the call.
    """

    def __init__(self) -> None:
        self._guards: dict[str, ClaimGuard] = {}  # by claim UID, least recently used first
        self._lock = threading.Lock()

    @contextmanager
    def hold(
        self, uid: str, timeout_s: float, is_cancelled: Callable[[], bool] | None = None
    ) -> Iterator[ClaimGuard]:
        with self._lock:
            guard = self._guards[uid] = self._guards.pop(uid) if uid in self._guards else ClaimGuard()
            guard.wanted += 1
            too_many = max(0, len(self._guards) - _REMEMBERED)
            idle = (uid for uid, guard in self._guards.items() if not guard.wanted)
            for oldest in [*islice(idle, too_many)]:
                del self._guards[oldest]
        try:
            busy = f"an earlier call still prepares or unprepares claim {uid}; this call will be retried"
            with _in_time(guard.lock, timeout_s, busy, is_cancelled):
                yield guard
        finally:
            with self._lock:
                guard.wanted -= 1


class RecordStore(JsonStore[ClaimRecord]):
    """Records by claim UID, each as of this boot (`ClaimRecord.as_of`). Their keys are GPU UUIDs. A record
    changes under the claim's lock.
    """

    def __init__(
        self,
        directory: Path,
        boot_id: str | None = None,
        reader: Callable[[UnreadableFile], None] | None = None,
    ) -> None:
        """Give unreadable files to `reader` instead of the log. Until the boot is known, records are returned
        as they were written.
        """
        self._boot_id = boot_id
        self.locks, self.planning = ClaimLocks(), PlanningLock()
        super().__init__(
            directory,
            RECORD_FILE.what,
            self._decode,
            RECORD_FILE.write,
            reader
            or log_unreadable(
                unreadable_event="record_unreadable",
                name="claim_uid",
                remedy="the claim can still be prepared and unprepared; inspect the file, then remove it",
                newer="the claim keeps its devices until it is unprepared; to prepare it again, install the newer "
                "release again",
            ),
            is_name=is_uid,
            keys=lambda record: record.gpu_uuids,
        )

    def open(self, boot_id: str) -> None:
        """Remove unsynced records that a power cut damaged, and load the others. Raises: StateError."""
        self._boot_id = boot_id
        open_directory(self.directory, boot_id, lambda uid: _log.info("record_torn", claim_uid=uid))
        self.load()

    def prepared_kinds(self) -> Iterator[str]:
        for record in self.all().values():
            if record.phase == "prepared":
                yield from (held.kind for held in record.devices)

    def save(self, record: ClaimRecord, *, durable: bool = True, whole: bool = True) -> None:
        """Write the record. With `durable` it survives a power cut. With `whole`, a power cut leaves this
        version or the previous one. With neither, it may leave a damaged file, which the first `open` of the
        next boot removes. Raises: StateError.
        """
        self.write(record.ref.uid, record, durable=durable, whole=whole)

    def delete(self, uid: str) -> bool:
        """Return whether the record existed. Raises: StateError."""
        # Synced: a record that reappeared after a power cut would hold its devices forever.
        return self.remove(uid, durable=True)

    def _decode(self, uid: str, content: bytes) -> ClaimRecord:
        record = RECORD_FILE.read(content)
        if record.ref.uid != uid:
            raise StateError(f"the file contains the record of claim UID {record.ref.uid}")
        return record if self._boot_id is None else record.as_of(self._boot_id)
