"""Cleans up after ended claims: undoes their ledger entries, each in the lane of its GPU.

Each GPU has its own retry delay, and the loop does not wait for the lanes, so a GPU or tool that hangs does
not delay other GPUs. An undo reads the ledger and the records again, so it never undoes what another claim
also needs.

Methods that read the ledgers raise StateError.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import structlog

from dra_driver.base.atomic import clear_abandoned
from dra_driver.base.backoff import Backoff
from dra_driver.base.deadline import time_left, within
from dra_driver.base.threads import BackgroundWorker
from dra_driver.errors import DraDriverError, RetryableError, StateError
from dra_driver.journal.lanes import GpuUnresponsiveError, Lanes, Operation
from dra_driver.journal.ledger import Ledger
from dra_driver.journal.rules.cleanups import (
    LedgerEntry,
    PendingCleanup,
    Withholding,
    by_gpus,
    things,
    withholding,
    without,
)
from dra_driver.model.claim import ClaimRef
from dra_driver.model.dataclass import dataclass, replace
from dra_driver.model.inventory import OfferedDevice
from dra_driver.model.plan import Plan
from dra_driver.model.problems import NodeProblem
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import LedgerStep

_log = structlog.get_logger(__name__)

UNDO_S = 5.0
"""A failed undo does not keep the claim from ending."""
CLEAN_BEFORE_S = 8.0
"""For the cleanups before a Prepare."""
_CLEAN_AGAIN_S = 0.5
_ALL_S = 30.0
RETRY_FILE = "cleanup-now"
"""A command writes this file below the plugin's directory; the plugin then retries all pending cleanup."""
_CHECK_EVERY_S = 5.0
"""If nothing wakes the loop."""
_TOOLS_EVERY_S = 1.0
"""While cleanups are pending."""
_CLEAR_EVERY_S = 30.0
_RETRY_FIRST_S = 0.5
_RETRY_MAX_S = 30.0


S_contra = TypeVar("S_contra", contravariant=True)


class StepRunner(Protocol[S_contra]):
    """Does and undoes steps of one type. Both are idempotent."""

    def do(self, step: S_contra, plan: Plan) -> None:
        """Do the step, even if parts are already done."""

    def undo(self, step: S_contra, ref: ClaimRef) -> None:
        """Undo what the step may have done. No other claim needs it."""

    def in_place(self, step: S_contra, record: ClaimRecord) -> bool:
        """Whether the result still exists, as far as that is visible without the GPU driver."""


class Restorer(Protocol):
    """Restores GPU settings that are not in the ledgers."""

    @property
    def what(self) -> str:
        """Such as `restoring the time slice after a reload of the NVIDIA driver`."""

    def gpus(self) -> Collection[str]:
        """Return the GPUs with settings to restore. Raises: StateError."""

    def restore(self, gpu_uuid: str) -> None:
        """Restore a GPU's settings in its lane. Raises: DraDriverError if some could not be restored."""


@dataclass(eq=False)
class Cleaner(BackgroundWorker):
    """Runs pending cleanups: for an Unprepare, before a Prepare that needs the GPU, and in its own thread.

    The thread submits work on request, and when `tools` returns a new value: a program, the MPS host or the
    NVIDIA driver is back. Otherwise it retries after growing pauses. Twice a minute it removes the files of
    killed writers that match `temporary` (directory, pattern).
    """

    ledger: Ledger
    lanes: Lanes
    runner: StepRunner[LedgerStep]
    changed: Callable[[], None] = lambda: None
    tools: Callable[[], Hashable] = lambda: None
    restorers: Sequence[Restorer] = ()
    temporary: Sequence[tuple[Path, str]] = ()
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._guard, self._reporting = threading.Lock(), threading.Lock()
        self._ending: set[str] = set()
        """Claims whose first undos are running. Their cleanups are not reported yet."""
        self._reported: dict[str, PendingCleanup] = {}
        self._tools: Hashable = None
        self._pauses: dict[str, tuple[Backoff, float]] = {}  # by GPU, with the time of the next try
        self._problem: str | None = None
        self._cleared_at = -math.inf
        self._retry_requested = threading.Event()
        super().__init__("cleanup", self._turn)

    def retry_now(self) -> None:
        self._retry_requested.set()
        self.wake()

    # --- what is pending -----------------------------------------------------------------------

    def outstanding(self) -> list[PendingCleanup]:
        """Return the pending cleanups, without those of claims whose first undos are running."""
        found = self._pending()
        with self._guard:
            return [one for one in found if one.name not in self._ending]

    def problems(self) -> Sequence[NodeProblem]:
        """Name a problem by its steps: a Prepare that fails repeatedly leaves the same ones for each claim."""
        return [
            NodeProblem(
                "cleanup-pending", one.text, ", ".join(step.undoing for step in one.steps), since=one.since
            )
            for one in self.outstanding()
        ]

    def _pending(self) -> list[PendingCleanup]:
        """If no try has failed, `cause` is the operation that keeps the GPU busy."""
        found = self.ledger.pending()
        running = self.lanes.under_way()
        return [
            replace(
                one,
                cause=one.cause
                or next((running[gpu].text(gpu) for gpu in sorted(_gpus(one) & running.keys())), None),
            )
            for one in found
        ]

    def withheld(self) -> Callable[[OfferedDevice], Withholding | None]:
        """Return a function that returns what withholds a device, by the last known cleanups if the ledgers
        cannot be read.
        """
        found: Collection[PendingCleanup] = self._reported.values()
        with suppress(StateError):
            found = self.outstanding()
        newer, boot_id = self.ledger.newer(), self.ledger.boot_id or ""
        return lambda device: newer.get(device.gpu.uuid) or withholding(found, device, boot_id)

    # --- for calls of the kubelet --------------------------------------------------------------

    @contextmanager
    def removing(self, uid: str) -> Iterator[None]:
        """Mark the claim as ending while its record is removed. Call `undo_rest` afterwards."""
        with self._guard:
            self._ending.add(uid)
        try:
            yield
        except BaseException:
            with self._guard:
                self._ending.discard(uid)
            raise

    def undo_rest(self, uid: str, wait_s: float) -> None:
        """Undo the steps of a claim whose record was just removed. After `wait_s` seconds, the rest is
        reported as pending.
        """
        mine: list[LedgerEntry] = []
        try:
            mine = [entry for entry in self.ledger.left() if entry.claim.uid == uid]
            self._clean(_works(mine), wait_s)
        finally:
            with self._guard:
                self._ending.discard(uid)
            if mine:
                self._report_changes()

    def clean_before(self, pending: Sequence[PendingCleanup], devices: Sequence[OfferedDevice]) -> None:
        """Run the cleanups of `Ledger.pending_before`, before a claim gets these devices.

        A failed undo is retried for a few seconds, because the MPS host may be starting. Raises:
        RetryableError if a cleanup withholds one of the devices.
        """
        end = time.monotonic() + time_left(CLEAN_BEFORE_S)
        wanted = {(one.name, step) for one in pending for step in one.steps}
        while True:
            entries = [entry for entry in self.ledger.left() if entry.key in wanted]
            self._clean(_works(entries), max(0.0, end - time.monotonic()))
            try:
                self._refuse_withheld(wanted, devices)
            except GpuUnresponsiveError:
                raise
            except RetryableError:
                left = end - time.monotonic()
                if left <= 0:
                    raise
                time.sleep(min(_CLEAN_AGAIN_S, left))
            else:
                return

    def _refuse_withheld(
        self, wanted: Collection[tuple[str, LedgerStep]], devices: Sequence[OfferedDevice]
    ) -> None:
        now = self._pending()
        left = [
            replace(one, steps=tuple(step for step in one.steps if (one.name, step) in wanted)) for one in now
        ]
        for device in devices:
            if (found := withholding(left, device, self.ledger.boot_id or "")) is not None:
                self.lanes.refuse_unresponsive(_gpus(found))
                whole = next(one for one in now if one.name == found.name)
                raise RetryableError(f"device {device.name} cannot be used yet. {whole.text}")

    # --- in the lanes --------------------------------------------------------------------------

    def clean_all(self, wait_s: float | None = None) -> list[PendingCleanup]:
        """Clean and restore everything now; return what is still pending."""
        self._clean([*self._to_do(), *self._to_restore()], _ALL_S if wait_s is None else wait_s)
        return self.outstanding()

    def _clean(self, works: Iterable[tuple[frozenset[str], str]], wait_s: float) -> None:
        """Wait at most `wait_s` seconds. The lanes continue with the rest."""
        for future in wait([self._submit(gpus, text) for gpus, text in works], wait_s).done:
            error = future.exception()
            if error is not None and (not isinstance(error, RetryableError) or isinstance(error, StateError)):
                raise error

    def _submit(self, gpus: frozenset[str], what: str) -> Future[None]:
        """Skip a cleanup that already waits. One that runs may have read the ledgers too early."""
        work = partial(self._converge, gpus)
        return self.lanes.submit(gpus, what, work, once=("cleanup", gpus))

    def _to_restore(self) -> list[tuple[frozenset[str], str]]:
        return [(frozenset({gpu}), restorer.what) for restorer in self.restorers for gpu in restorer.gpus()]

    def _converge(self, gpus: frozenset[str], operation: Operation) -> None:
        is_clean = False
        try:
            is_clean = self._undo_all(gpus)
            for restorer in self.restorers:
                for gpu in sorted(gpus):
                    is_clean &= self._restore(restorer, gpu, operation)
        finally:
            self._schedule(gpus, is_clean=is_clean)
        self._report_changes()

    def _restore(self, restorer: Restorer, gpu: str, operation: Operation) -> bool:
        try:
            if gpu not in restorer.gpus():
                return True
            operation.what = restorer.what
            restorer.restore(gpu)
            return gpu not in restorer.gpus()
        except DraDriverError:  # the restorer logs the cause
            return False
        except Exception:  # noqa: BLE001  a bug of a restorer must not keep a claim from ending
            _log.exception("restore_failed", gpu_uuid=gpu, what=restorer.what)
            return False

    def _undo_all(self, gpus: frozenset[str]) -> bool:
        """Return whether nothing is left to undo or to write. Keep what another claim also needs, and undo
        duplicate entries once.
        """
        left, needed = self.ledger.split(gpus)
        left, missing = (
            [entry for entry in found if entry.step.gpus <= gpus]
            for found in (left, self.ledger.missing(gpus))
        )
        kept = things(entry.step for entry in (*needed, *missing))
        due, gone, failed = list[LedgerEntry](), list[LedgerEntry](), list[LedgerEntry]()
        for entry in left:
            (due if without([entry.step], kept) else gone).append(entry)
            kept |= things([entry.step])
        for entry in reversed(due):
            cause = self._undo(entry)
            if cause is None:
                gone.append(entry)
            else:
                failed.append(replace(entry, ended=entry.ended or int(time.time()), cause=cause))
        try:
            self.ledger.change([*missing, *failed], gone, self.ledger.void() & gpus)
        except StateError:
            # The disk is full (which is reported as a node problem), or a newer release wrote the ledger.
            return False
        return not failed

    def _undo(self, entry: LedgerEntry) -> str | None:
        """Return the cause of a failure."""
        try:
            with within(UNDO_S):
                self.runner.undo(entry.step, entry.claim)
        except Exception as error:  # noqa: BLE001  a bug in one undo must not keep the others from being tried
            if not isinstance(error, DraDriverError):
                _log.exception("undo_crashed", claim_uid=entry.claim.uid)
            # A reboot has ended an MPS daemon of an older boot. Only its directory may be left.
            if not (entry.step.outlives_reboot and entry.boot_id != self.ledger.boot_id):
                return str(error)
        return None

    # --- the loop ------------------------------------------------------------------------------

    def _turn(self) -> float:
        is_requested = self._retry_requested.is_set()
        self._retry_requested.clear()
        self.clear_temporary()
        try:
            self._report_changes()
            works = [*self._to_do(), *self._to_restore()]
            # The tools are checked only while cleanup is pending.
            before, self._tools = self._tools, self.tools() if works else None
            if is_requested or before != self._tools:
                with self._guard:
                    self._pauses.clear()
            busy = self.lanes.under_way().keys()
            for gpus, text in works:
                if self._is_due(gpus, busy):
                    self._submit(gpus, text)
        except DraDriverError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                _log.warning("cleanup_not_started", reason=self._problem)
            return _CHECK_EVERY_S
        self._problem = None
        return _TOOLS_EVERY_S if works else _CHECK_EVERY_S

    def clear_temporary(self) -> None:
        if self.clock() - self._cleared_at >= _CLEAR_EVERY_S:
            self._cleared_at = self.clock()
            for directory, pattern in self.temporary:
                clear_abandoned(directory, pattern)

    def _to_do(self) -> list[tuple[frozenset[str], str]]:
        works = _works([*self.ledger.left(), *self.ledger.missing()])
        known = frozenset[str]().union(*(gpus for gpus, _ in works))
        return [
            *works,
            *((frozenset({gpu}), "ledger cleanup") for gpu in self.ledger.void() - known),
        ]

    def _is_due(self, gpus: frozenset[str], busy: Collection[str]) -> bool:
        with self._guard:
            due = all(self.clock() >= self._pauses[gpu][1] for gpu in gpus & self._pauses.keys())
        return due and gpus.isdisjoint(busy)

    def _schedule(self, gpus: frozenset[str], *, is_clean: bool) -> None:
        with self._guard:
            for gpu in gpus:
                backoff = self._pauses.pop(gpu, (Backoff(_RETRY_FIRST_S, _RETRY_MAX_S), 0.0))[0]
                if not is_clean:
                    self._pauses[gpu] = backoff, self.clock() + backoff.next()

    def _report_changes(self) -> None:
        with self._reporting:
            now = {one.name: one for one in self.outstanding()}
            before, self._reported = self._reported, now
            for name in sorted(now.keys() - before.keys()):
                one = now[name]
                _log.warning(
                    "cleanup_pending", claim=str(one.record.ref), claim_uid=one.name, reason=one.text
                )
            for name in sorted(before.keys() - now.keys()):
                ref = before[name].record.ref
                _log.info("cleanup_done", claim=str(ref), claim_uid=ref.uid)
            is_changed = {name: one.steps for name, one in before.items()} != {
                name: one.steps for name, one in now.items()
            }
        if is_changed:
            self.changed()


def _gpus(cleanup: PendingCleanup) -> frozenset[str]:
    return frozenset[str]().union(*(step.gpus for step in cleanup.steps))


def _works(entries: Iterable[LedgerEntry]) -> list[tuple[frozenset[str], str]]:
    groups = by_gpus(entry.step for entry in entries)
    return [(gpus, f"cleanup ({steps[-1].undoing})") for gpus, steps in groups]
