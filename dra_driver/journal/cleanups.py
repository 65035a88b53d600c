"""Pending cleanups on disk, and the loop that brings them to an end.

Unprepare needs only files. A step whose undo needs a tool, a daemon or the silicon keeps no claim from ending:

    record ──files removed, moved───▶ pending cleanup ──every step undone, in the lanes──▶ (nothing)
                                          │ ▲
                an undo failed: it stays ─┘ └─ the loop tries again, until it is done, or a newer claim or a reboot
                                               made it void

The claim's record becomes the pending cleanup by a move, from `claims/<uid>.json` to `debts/<uid>.json`. So a full disk
is no obstacle. The move comes before the undos: of two claims that share a device and end at the same time, each would
else take the other one for a user of the device. The move needs no lane: a hung step of another claim cannot hold the
Unprepare up.

| A crash … | leaves | and then |
|---|---|---|
| before the move | the record | the kubelet calls Unprepare again |
| within the move | record and pending cleanup | the same; the claim then has two, and both are worked off |
| after the move, or in an undo | the pending cleanup | the next Unprepare succeeds at once; the loop goes on |
| before the file of a finished one is removed | the pending cleanup | an undo may run again |

An undo runs in the lane of its GPU and reads the records anew, so it never takes back what a newer claim has set. A
claim that is prepared and unprepared again may have two: the second one gets a number in its name.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Protocol

import structlog

from dra_driver.concurrency.backoff import Backoff
from dra_driver.concurrency.deadline import at_most, time_left
from dra_driver.concurrency.worker import BackgroundWorker
from dra_driver.errors import DraDriverError, RetryableError, StateError
from dra_driver.files.atomic import make_directory
from dra_driver.files.json_store import JsonStore, UnreadableFile, open_directory
from dra_driver.journal.lanes import GpuUnresponsiveError, Lanes, Operation
from dra_driver.journal.record_codec import decode
from dra_driver.journal.records import RecordStore
from dra_driver.journal.rules.cleanups import (
    PendingCleanup,
    by_gpus,
    gpus_of,
    still_pending,
    what,
    withholding,
    without,
)
from dra_driver.model.inventory import OfferedDevice
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import RunMps, SetTimeSlice, Step

_log = structlog.get_logger(__name__)

UNDO_S = 5.0
"""How long one undo may take: its failure keeps no claim from ending."""
CLEAN_BEFORE_S = 8.0
"""How long a Prepare waits until what is pending on its GPUs is undone."""
_OTHER_INSTANCE_S = 3.0
"""How long an undo waits until the other instance of a rolling update has done with the GPU."""
_CLEAN_AGAIN_S = 0.5
"""The pause before a Prepare tries an undo again that has failed."""
_PASS_S = 30.0
"""How long the loop waits for one pass."""
_LOOK_EVERY_S = 5.0
"""How often the loop looks for what the other instance of a rolling update left."""
_PASS_EVERY_S = 60.0
"""How often a pass is made though nothing is known to be left."""
_TOOLS_EVERY_S = 1.0
_RETRY_FIRST_S = 0.5
_RETRY_MOST_S = 30.0
_NOT_IN_TIME = "it has not ended in time"


class StepRunner(Protocol):
    """Does and undoes steps of one type. Both converge: many calls have the same result as one."""

    def do(self, step: Step, plan: Plan) -> None:
        """Do what the step describes, whatever part of it is done already."""

    def undo(self, step: Step, record: ClaimRecord) -> None:
        """Take back what the step may have done; the record must be enough for that."""

    def in_place(self, step: Step, record: ClaimRecord) -> bool:
        """Whether what the step made is still there, as far as that shows without the GPU driver."""


class CleanupObserver(Protocol):
    """Hears of pending cleanups; reporting does. Must not block or raise."""

    def cleanup_pending(self, cleanup: PendingCleanup) -> None:
        """A claim has ended, and something could not be undone."""

    def cleanup_done(self, cleanup: PendingCleanup) -> None:
        """Nothing of it is pending any more."""


class LeftOver(Protocol):
    """What else the loop puts right, beside pending cleanups. Both may raise a DraDriverError: then it is left."""

    def is_left(self) -> bool:
        """Whether something is known to be left."""

    def work_off(self) -> None:
        """Put right what can be put right now, whether anything was known to be left or not."""


@dataclass(eq=False)
class PendingCleanups:
    """The pending cleanups of a node: one file for each, shared by both instances of a rolling update. For many
    threads.

    `changed` is called after one came, went or has less to undo. A `reader` only looks, as in `RecordStore`;
    with `boot_id` None it takes each for one of this boot.
    """

    directory: Path
    records: RecordStore
    boot_id: str | None
    observer: CleanupObserver | None = None
    changed: Callable[[], None] = lambda: None
    reader: Callable[[UnreadableFile], None] | None = None

    def __post_init__(self) -> None:
        self._store = JsonStore(
            self.directory,
            "pending cleanup",
            lambda _name, content: decode(content),
            self.reader or _tell,
            is_name=lambda name: not name.startswith("."),
            only_reads=self.reader is not None,
        )
        self._left: dict[str, tuple[tuple[Step, ...], str | None]] = {}
        """By name: what this process knows to be left, and why."""
        self._new: set[str] = set()
        """Names of those whose first undos are under way in this process: nobody is told of them yet."""
        self.shown: frozenset[str] = frozenset()
        """Names of those that counted when `withheld` was asked last, for what is published."""
        self._guard = threading.Lock()

    def open(self) -> None:
        """Create the directory: on a full disk it could not be made. Raises: StateError."""
        open_directory(
            self.directory, self.boot_id or "", lambda name: _log.info("debt_torn", debt=name), durable=True
        )

    def begin(self, record: ClaimRecord, steps: Sequence[Step]) -> PendingCleanup:
        """Make a record on disk the pending cleanup of these of its steps; its claim has ended then. Raises:
        StateError; then the record stays. `Cleaner.finish` has to follow."""
        make_directory(self.directory, 0o700)
        uid = record.ref.uid
        names = chain([uid], (f"{uid}.{number}" for number in count(2)))
        name = next(name for name in names if not self._store.path(name).exists())
        left = still_pending(steps, record, self.boot_id or record.boot_id)
        with self._guard:
            self._new.add(name)
            self._left[name] = (left, None)
        try:
            self.records.move(record.ref.uid, self._store.path(name))
        except BaseException:
            with self._guard:
                self._new.discard(name)
                self._left.pop(name, None)
            raise
        return PendingCleanup(name, record, left, int(time.time()))

    def tell_new(self, name: str) -> None:
        """Whoever began it waits no longer. What is left is told from now on. Raises: StateError."""
        with self._guard:
            is_new = name in self._new
            self._new.discard(name)
            if name in self._left:
                steps, cause = self._left[name]
                self._left[name] = (steps, cause or _NOT_IN_TIME)
            known = [step for other, (left, _) in self._left.items() if other != name for step in left]
        cleanup = self.get(name) if is_new else None
        if cleanup is None or not cleanup.steps:
            return
        ref = cleanup.record.ref
        _log.warning("claim_owes", claim=str(ref), claim_uid=ref.uid, debt=name, reason=cleanup.text)
        if self.observer is not None and without(cleanup.steps, known):
            self.observer.cleanup_pending(cleanup)
        self.changed()

    def all(self) -> list[PendingCleanup]:
        """Every one that can be read, by name; those with no steps are void. Raises: StateError."""
        found = self._store.all()
        with self._guard:
            self._left = {
                name: known for name, known in self._left.items() if name in found or name in self._new
            }
        return [one for name, record in found.items() if (one := self._made(name, record)) is not None]

    def ended(self) -> list[ClaimRecord]:
        """The records of claims that have ended and of which something is still being undone. Raises: StateError."""
        return list(self._store.all().values())

    def left(self) -> list[PendingCleanup]:
        """Those whose first undos are not under way in this process. Raises: StateError."""
        with self._guard:
            new = self._new.copy()
        return [one for one in self.all() if one.name not in new]

    def outstanding(self) -> list[PendingCleanup]:
        """Those that are left and not void. Raises: StateError."""
        return self.not_set_again(self.left())

    def not_set_again(self, cleanups: Sequence[PendingCleanup]) -> list[PendingCleanup]:
        """These with what no claim that is prepared now has set again. Raises: StateError."""
        newer = self.set_again() if cleanups else []
        without_newer = [replace(one, steps=without(one.steps, newer)) for one in cleanups]
        return [one for one in without_newer if one.steps]

    def set_again(self) -> list[Step]:
        """The steps of all claims that are prepared now. A claim that is only being prepared may have done nothing yet,
        and then undoes nothing. Raises: StateError."""
        return [
            step
            for record in self.records.all().values()
            if record.phase == "prepared"
            for step in record.steps
        ]

    def withheld(self) -> Callable[[OfferedDevice], PendingCleanup | None]:
        """Which one keeps a device from being given out, as of now. If they cannot be listed, none does."""
        found: list[PendingCleanup] = []
        with suppress(StateError):
            found = self.outstanding()
        self.shown = frozenset(one.name for one in found)
        return lambda device: withholding(found, device, self.boot_id or "")

    def get(self, name: str) -> PendingCleanup | None:
        """One as it is now. Raises: StateError."""
        return next((one for one in self.all() if one.name == name), None)

    def note_undone(self, cleanup: PendingCleanup, gone: Collection[Step], cause: str | None) -> None:
        """These steps are undone or void; the last try of the others failed for this cause, None if it did not fail.
        With nothing left, it is done. Raises: StateError."""
        name = cleanup.name
        with self._guard:
            before, known = self._left.get(name, (cleanup.steps, None))
            left = tuple(step for step in before if step not in gone)
            self._left[name] = (left, cause or known)
            is_new = name in self._new
        if not left:
            self._end(cleanup, is_new=is_new)
        if left != before and not is_new:
            self.changed()

    def _end(self, cleanup: PendingCleanup, *, is_new: bool) -> None:
        # Not synced: one that came back after a power cut is void, since the boot has ended.
        self._store.remove(cleanup.name, durable=False)
        with self._guard:
            self._left.pop(cleanup.name, None)
        if not is_new:
            ref = cleanup.record.ref
            _log.info("debt_paid", claim=str(ref), claim_uid=ref.uid, debt=cleanup.name)
            if self.observer is not None:
                self.observer.cleanup_done(cleanup)

    def _made(self, name: str, record: ClaimRecord) -> PendingCleanup | None:
        with self._guard:
            steps, cause = self._left.get(name, (record.steps, None))
        try:
            since = int(self._store.path(name).stat().st_ctime)
        except OSError:  # the other instance has just removed it
            return None
        boot_id = record.boot_id if self.boot_id is None else self.boot_id
        return PendingCleanup(name, record, still_pending(steps, record, boot_id), since, cause)


@dataclass(eq=False)
class Cleaner(BackgroundWorker):
    """Undoes what is pending, in the lanes: for an Unprepare, before a Prepare that wants a GPU concerned, and again
    and again in a thread of its own while `leads` says yes.

    The thread makes a pass when somebody asks, as soon as `tools` answers another value than before (a program, the MPS
    host or the NVIDIA driver came back), and else after pauses that grow. Each pass works off the `others` too, whoever
    leads.
    """

    cleanups: PendingCleanups
    lanes: Lanes
    runner: StepRunner
    boot_id: str
    leads: Callable[[], bool] = lambda: True
    tools: Callable[[], Hashable] = lambda: None
    others: Sequence[LeftOver] = ()
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._seen: tuple[Hashable, ...] = (None, False, frozenset(), frozenset())
        self._backoff = Backoff(_RETRY_FIRST_S, _RETRY_MOST_S)
        self._due = 0.0
        self._is_asked = threading.Event()
        super().__init__(
            "cleanup", self._turn, crash_event="debt_keeper_failed", on_crash=lambda _error: _LOOK_EVERY_S
        )

    def look_soon(self) -> None:
        """Some have come, or something has changed on the node."""
        self._is_asked.set()
        self.wake()

    def finish(self, cleanup: PendingCleanup, wait_s: float) -> None:
        """Undo what has just become pending, as `clean`; what is left is told from then on. Raises: StateError."""
        try:
            self.clean([cleanup], wait_s)
        finally:
            self.cleanups.tell_new(cleanup.name)

    def clean(self, cleanups: Sequence[PendingCleanup], wait_s: float) -> None:
        """Try to undo all that is pending of these, side by side; wait that many seconds at most. What is not undone by
        then stays pending, and is undone as soon as its lane is idle. Raises: StateError."""
        asked = [
            (one, future)
            for number, one in enumerate(cleanups)
            for future in self._ask(one, cleanups[:number])
        ]
        done, _ = wait([future for _, future in asked], wait_s)
        for one, future in asked:
            if future in done and (error := future.exception()) is not None:
                if not isinstance(error, RetryableError) or isinstance(error, StateError):
                    raise error
                self.cleanups.note_undone(one, (), str(error))

    def clean_all(self) -> list[PendingCleanup]:
        """Try to undo everything now; what is left. Raises: StateError."""
        self.clean(self.cleanups.left(), _PASS_S)
        return self.cleanups.outstanding()

    def pending_before(
        self, gpu_uuids: Collection[str], wanted: Sequence[Step] = (), besides: Collection[str] = ()
    ) -> list[PendingCleanup]:
        """What is to be undone on these GPUs before a claim with these steps gets a device there: all but time slices,
        for which nobody waits, MPS daemons that the claim itself wants, and the cleanups named `besides`. Raises:
        StateError."""
        own = [step for step in wanted if isinstance(step, RunMps)]
        found = [
            replace(
                one,
                steps=tuple(
                    step
                    for step in without(one.steps, own)
                    if not isinstance(step, SetTimeSlice) and not gpus_of(step).isdisjoint(gpu_uuids)
                ),
            )
            for one in self.cleanups.all()
            if one.name not in besides
        ]
        return self.cleanups.not_set_again([one for one in found if one.steps])

    def clean_before(self, pending: Sequence[PendingCleanup], devices: Sequence[OfferedDevice]) -> None:
        """Have undone what `pending_before` found, before a claim gets these devices. What fails is tried again for a
        few seconds: the MPS host may just start.

        Raises: RetryableError that tells what is pending, if that keeps one of the devices from being used; StateError.
        """
        end = time.monotonic() + time_left(CLEAN_BEFORE_S)
        while True:
            self.clean(pending, max(0.0, end - time.monotonic()))
            try:
                self._refuse_withheld(pending, devices)
            except GpuUnresponsiveError:
                raise
            except RetryableError:
                left = end - time.monotonic()
                if left <= 0:
                    raise
                time.sleep(min(_CLEAN_AGAIN_S, left))
            else:
                return

    def _refuse_withheld(self, pending: Sequence[PendingCleanup], devices: Sequence[OfferedDevice]) -> None:
        """Raises: RetryableError, as `clean_before`."""
        now = {one.name: one for one in self.cleanups.all()}
        left = [
            replace(now[one.name], steps=tuple(step for step in one.steps if step in now[one.name].steps))
            for one in pending
            if one.name in now
        ]
        for device in devices:
            if (one := withholding(left, device, self.boot_id)) is not None:
                gpus = frozenset[str]().union(*map(gpus_of, one.steps))
                self.lanes.refuse_unresponsive(gpus)
                raise RetryableError(f"the device cannot be used yet. {now[one.name].text}")

    def _ask(self, cleanup: PendingCleanup, before: Sequence[PendingCleanup]) -> list[Future[None]]:
        """Ask the lanes for the undos of one, once for each group of GPUs: what waits there already is not asked for
        again. What one of those `before` still has pending on these GPUs is that one's alone: a Prepare that fails
        again and again would else leave one each time."""
        if not cleanup.steps:
            self.cleanups.note_undone(cleanup, cleanup.steps, None)
            return []
        names = frozenset(one.name for one in before)
        return [
            self.lanes.ask(
                gpus,
                f"the cleanup of {what(steps[-1])}",
                partial(self._undo, cleanup.name, gpus, names),
                _OTHER_INSTANCE_S,
                once=("cleanup", cleanup.name),
            )
            for gpus, steps in by_gpus(cleanup.steps)
        ]

    def _undo(self, name: str, gpus: frozenset[str], before: Collection[str], _operation: Operation) -> None:
        """Undo what is pending of one on these GPUs; their lanes run it."""
        now = self.cleanups.get(name)
        if now is None:
            return
        here = [step for step in now.steps if gpus_of(step) <= gpus]
        others = [
            step
            for one in self.cleanups.all()
            if one.name in before and one.record.boot_id == now.record.boot_id
            for step in one.steps
        ]
        due = without(here, [*self.cleanups.set_again(), *others])
        gone = [step for step in here if step not in due]
        causes: list[str] = []
        for step in reversed(due):
            try:
                with at_most(UNDO_S):
                    self.runner.undo(step, now.record)
            except Exception as error:  # noqa: BLE001  a bug in one undo must not keep the others from being tried
                if not isinstance(error, DraDriverError):
                    _log.exception("undo_crashed", claim_uid=now.record.ref.uid)
                # The reboot ended a daemon of an older boot; a directory may be left.
                if not (isinstance(step, RunMps) and now.record.boot_id != self.boot_id):
                    causes.append(str(error))
                    continue
            gone.append(step)
        self.cleanups.note_undone(now, gone, "; ".join(dict.fromkeys(causes)) or None)

    def _turn(self) -> float:
        """A pass, if it is time for one. What failed is tried again."""
        is_asked = self._is_asked.is_set()
        self._is_asked.clear()
        try:
            if not (is_asked or self._is_news()) and self.clock() < self._due:
                return min(_TOOLS_EVERY_S if self._is_left() else _LOOK_EVERY_S, self._due - self.clock())
            if is_asked:
                self._backoff.reset()
            if self.leads():
                self.clean(self.cleanups.left(), _PASS_S)
            for other in self.others:
                other.work_off()
            if not self._is_left():
                self._backoff.reset()
                self._due = self.clock() + _PASS_EVERY_S
                return _LOOK_EVERY_S
        except DraDriverError as error:
            _log.warning("debts_not_paid", reason=str(error))
        self._due = self.clock() + self._backoff.next()
        return _TOOLS_EVERY_S

    def _is_news(self) -> bool:
        """Whether a tool is another than at the last turn, something has come to be left, or pending cleanups have come
        or gone. What is not shown of these is told: the other instance of a rolling update makes and ends some too.
        Once for each difference, since an instance that does not publish never shows what it is told.

        Raises: StateError.
        """
        before, is_left, names, shown = self._seen, self._is_left(), self._names(), self.cleanups.shown
        self._seen = self.tools() if is_left else before[0], is_left, names, shown
        is_news = before != self._seen
        if is_news and names != shown:
            self.cleanups.changed()
        if is_news:
            self._backoff.reset()
        return is_news

    def _is_left(self) -> bool:
        """Whether there is something to be worked off by this instance. Raises: StateError."""
        return (self.leads() and bool(self._names())) or any(other.is_left() for other in self.others)

    def _names(self) -> frozenset[str]:
        return frozenset(one.name for one in self.cleanups.outstanding())


def _tell(found: UnreadableFile) -> None:
    _log.error(
        "debt_unreadable",
        debt=found.name,
        reason=found.reason,
        kept_as=str(found.kept_as),
        remedy="look at the file, then remove it; a reboot of the node takes back whatever it spoke of",
    )
