"""Makes what is set on the GPUs equal to what claims need: undoes in the lanes what the ledgers have of ended claims.

    ended ──its lane is idle──▶ every step undone, in reverse order ──▶ (nothing)
      ▲                              │
      └── an undo failed: again after a pause, as soon as a tool is back, or before a Prepare that wants the GPU

Each GPU is cleaned in its lane and after pauses of its own, and the loop waits for no lane. So a GPU or tool that hangs
holds up no other GPU. An undo reads ledger and records again, so it undoes nothing that another claim has set too.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
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
    Thing,
    by_gpus,
    gpus_of,
    record_of,
    things,
    what,
    withholding,
    without,
)
from dra_driver.model.inventory import OfferedDevice
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord, RunMps, Step

_log = structlog.get_logger(__name__)

UNDO_S = 5.0
"""How long one undo may take: its failure keeps no claim from ending."""
CLEAN_BEFORE_S = 8.0
"""How long a Prepare waits until what is pending on its GPUs is undone."""
_OTHER_INSTANCE_S = 3.0
"""How long an undo waits until the other instance of a rolling update has done with the GPU."""
_CLEAN_AGAIN_S = 0.5
"""The pause before a Prepare tries an undo again that has failed."""
_ALL_S = 30.0
_LOOK_EVERY_S = 5.0
"""How often the loop looks for what the other instance of a rolling update left."""
_TOOLS_EVERY_S = 1.0
"""How often it looks while something is left."""
_CLEAR_EVERY_S = 30.0
_RETRY_FIRST_S = 0.5
_RETRY_MOST_S = 30.0


S_contra = TypeVar("S_contra", contravariant=True)


class StepRunner(Protocol[S_contra]):
    """Does and undoes steps of one type. Both converge: many calls have the same result as one."""

    def do(self, step: S_contra, plan: Plan) -> None:
        """Do what the step describes, whatever part of it is done already."""

    def undo(self, step: S_contra, record: ClaimRecord) -> None:
        """Take back what the step may have done; no other claim has set the same. Of an ended claim the record has
        only its name and what the ledgers say."""

    def in_place(self, step: S_contra, record: ClaimRecord) -> bool:
        """Whether what the step made is still there, as far as that shows without the GPU driver."""


class CleanupObserver(Protocol):
    """Hears of pending cleanups; reporting does. Must not block or raise."""

    def cleanup_pending(self, cleanup: PendingCleanup) -> None:
        """A claim has ended, and something could not be undone."""

    def cleanup_done(self, cleanup: PendingCleanup) -> None:
        """Nothing of it is pending any more."""


class Keeper(Protocol):
    """What else is put right on GPUs, beside the ledgers; `what` says so for people."""

    @property
    def what(self) -> str:
        """Such as `the setting of the time slice after a reload of the NVIDIA driver`."""

    def gpus(self) -> Collection[str]:
        """The UUIDs of the GPUs on which something is left. Raises: StateError."""

    def restore(self, gpu_uuid: str) -> None:
        """Put right what can be put right now on a GPU; its lane runs it. Raises: DraDriverError; then it is left."""


@dataclass(eq=False)
class Cleaner(BackgroundWorker):
    """Undoes what is pending: for an Unprepare, before a Prepare that wants a GPU concerned, and again and again in a
    thread of its own while `leads` says yes.

    The thread asks the lanes when somebody calls, as soon as `tools` answers another value than before (a program, the
    MPS host or the NVIDIA driver came back), and else after pauses that grow, for each GPU by itself. The `keepers` put
    right in the same lanes what is theirs, in both instances. `changed` is called after what is pending has changed.
    Twice a minute the thread removes `temporary` files of writers that were killed, given as directory and pattern.
    """

    ledger: Ledger
    lanes: Lanes
    runner: StepRunner[Step]
    observer: CleanupObserver | None = None
    changed: Callable[[], None] = lambda: None
    leads: Callable[[], bool] = lambda: True
    tools: Callable[[], Hashable] = lambda: None
    keepers: Sequence[Keeper] = ()
    temporary: Sequence[tuple[Path, str]] = ()
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._guard, self._telling = threading.Lock(), threading.Lock()
        self._ending: set[str] = set()
        """UIDs of claims whose first undos are under way in this process; they are not reported yet."""
        self._told: dict[str, PendingCleanup] = {}
        self._tools: Hashable = None
        self._pauses: dict[str, tuple[Backoff, float]] = {}  # by GPU, with when it is due
        self._problem: str | None = None
        self._cleared_at = -math.inf
        self._is_asked = threading.Event()
        super().__init__("cleanup", self._turn)

    def look_soon(self) -> None:
        """Some have come, or something has changed on the node."""
        self._is_asked.set()
        self.wake()

    # --- what is pending -----------------------------------------------------------------------

    def outstanding(self) -> list[PendingCleanup]:
        """What is pending, but for the claims that are just ending in this process. Raises: StateError."""
        found = self._pending()
        with self._guard:
            return [one for one in found if one.name not in self._ending]

    def _pending(self) -> list[PendingCleanup]:
        """What is pending, each with why it is not undone: the last try failed, or its GPU is busy. Raises:
        StateError."""
        found = self.ledger.pending()
        uses = self.lanes.uses() if any(one.cause is None for one in found) else {}
        return [
            replace(
                one,
                cause=one.cause or next((uses[gpu].text for gpu in sorted(_gpus(one) & uses.keys())), None),
            )
            for one in found
        ]

    def withheld(self) -> Callable[[OfferedDevice], PendingCleanup | None]:
        """Which one keeps a device from being given out, as of now; as of the last look if they cannot be listed."""
        found: Collection[PendingCleanup] = self._told.values()
        with suppress(StateError):
            found = self.outstanding()
        return lambda device: withholding(found, device, self.ledger.boot_id or "")

    # --- for calls of the kubelet --------------------------------------------------------------

    @contextmanager
    def ending(self, uid: str) -> Iterator[None]:
        """The claim's record goes within. `finish` has to follow, unless that fails."""
        with self._guard:
            self._ending.add(uid)
        try:
            yield
        except BaseException:
            with self._guard:
                self._ending.discard(uid)
            raise

    def finish(self, uid: str, wait_s: float) -> None:
        """Undo what a claim that has just ended has set; wait that many seconds at most. What is left is reported from
        then on. Raises: StateError."""
        mine: list[LedgerEntry] = []
        try:
            mine = [entry for entry in self.ledger.left() if entry.claim.uid == uid]
            self.clean(mine, wait_s)
        finally:
            with self._guard:
                self._ending.discard(uid)
            if mine:
                self._tell()

    def clean_before(self, pending: Sequence[PendingCleanup], devices: Sequence[OfferedDevice]) -> None:
        """Have undone what `Ledger.pending_before` found, before a claim gets these devices. What fails is tried again
        for a few seconds: the MPS host may just start.

        Raises: RetryableError that names what is pending, if that keeps one of the devices from being used; StateError.
        """
        end = time.monotonic() + time_left(CLEAN_BEFORE_S)
        wanted = {(one.name, step) for one in pending for step in one.steps}
        while True:
            entries = [entry for entry in self.ledger.left() if entry.key in wanted]
            self.clean(entries, max(0.0, end - time.monotonic()))
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
        self, wanted: Collection[tuple[str, Step]], devices: Sequence[OfferedDevice]
    ) -> None:
        """Raises: RetryableError, as `clean_before`."""
        now = self._pending()
        left = [
            replace(one, steps=tuple(step for step in one.steps if (one.name, step) in wanted)) for one in now
        ]
        for device in devices:
            if (found := withholding(left, device, self.ledger.boot_id or "")) is not None:
                self.lanes.refuse_unresponsive(_gpus(found))
                whole = next(one for one in now if one.name == found.name)
                raise RetryableError(f"the device cannot be used yet. {whole.text}")

    # --- in the lanes --------------------------------------------------------------------------

    def clean(self, entries: Iterable[LedgerEntry], wait_s: float) -> None:
        """Have the GPUs of these entries cleaned, side by side; wait that many seconds at most. What is not undone by
        then is undone as soon as its lane is idle. Raises: StateError."""
        self._clean(_works(entries), wait_s)

    def clean_all(self, wait_s: float | None = None) -> list[PendingCleanup]:
        """Try to put everything right now; what is left. Raises: StateError."""
        self._clean([*self._to_do(), *self._of_keepers()], _ALL_S if wait_s is None else wait_s)
        return self.outstanding()

    def _clean(self, works: Iterable[tuple[frozenset[str], str]], wait_s: float) -> None:
        """Raises: StateError."""
        for future in wait([self._ask(gpus, text) for gpus, text in works], wait_s).done:
            error = future.exception()
            if error is not None and (not isinstance(error, RetryableError) or isinstance(error, StateError)):
                raise error

    def _ask(self, gpus: frozenset[str], what: str) -> Future[None]:
        """Have the lanes of these GPUs clean them. What waits there already is not asked for again; what is under way
        there may have read the ledgers before."""
        work = partial(self._converge, gpus)
        return self.lanes.ask(gpus, what, work, _OTHER_INSTANCE_S, once=("cleanup", gpus))

    def _of_keepers(self) -> list[tuple[frozenset[str], str]]:
        """Raises: StateError."""
        return [(frozenset({gpu}), keeper.what) for keeper in self.keepers for gpu in keeper.gpus()]

    def _converge(self, gpus: frozenset[str], operation: Operation) -> None:
        """Put right what is left on these GPUs; their lanes run it. Raises: StateError if what is left cannot be
        listed."""
        is_clean = False
        try:
            is_clean = self._undo_all(gpus)
            for keeper in self.keepers:
                for gpu in sorted(gpus):
                    is_clean &= self._put_right(keeper, gpu, operation)
        finally:
            self._note(gpus, is_clean=is_clean)
        self._tell()

    def _put_right(self, keeper: Keeper, gpu: str, operation: Operation) -> bool:
        """Have a keeper put right what is left on a GPU; whether nothing is left."""
        try:
            if gpu not in keeper.gpus():
                return True
            operation.turn_to(keeper.what)
            keeper.restore(gpu)
            return gpu not in keeper.gpus()
        except DraDriverError:  # the keeper logs why
            return False
        except Exception:  # noqa: BLE001  a bug of a keeper must not keep a claim from ending
            _log.exception("put_right_crashed", gpu_uuid=gpu, what=keeper.what)
            return False

    def _undo_all(self, gpus: frozenset[str]) -> bool:
        """Undo what ended claims have in the ledgers of these GPUs; whether nothing is left, also to be written. What
        another claim has set too stays, and two of one thing are undone once. Raises: StateError if ledgers or records
        cannot be listed."""
        left, needed = self.ledger.look(gpus)
        left, missing = (
            [entry for entry in found if gpus_of(entry.step) <= gpus]
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
            # The disk is full, which is a problem of the node, or a newer release wrote the ledger.
            return False
        return not failed

    def _undo(self, entry: LedgerEntry) -> str | None:
        """Undo one; why that failed."""
        try:
            with within(UNDO_S):
                self.runner.undo(entry.step, record_of([entry]))
        except Exception as error:  # noqa: BLE001  a bug in one undo must not keep the others from being tried
            if not isinstance(error, DraDriverError):
                _log.exception("undo_crashed", claim_uid=entry.claim.uid)
            # The reboot ended a daemon of an older boot; a directory may be left.
            if not (isinstance(entry.step, RunMps) and entry.boot_id != self.ledger.boot_id):
                return str(error)
        return None

    # --- the loop ------------------------------------------------------------------------------

    def _turn(self) -> float:
        """Ask the lanes of the GPUs that are due and idle."""
        is_asked = self._is_asked.is_set()
        self._is_asked.clear()
        self.clear_temporary()
        try:
            self._tell()
            works = [*(self._to_do() if self.leads() else ()), *self._of_keepers()]
            # The tools are checked only while cleanup is pending.
            before, self._tools = self._tools, self.tools() if works else None
            if is_asked or before != self._tools:
                with self._guard:
                    self._pauses.clear()
            busy = self.lanes.under_way().keys()
            for gpus, text in works:
                if self._is_due(gpus, busy):
                    self._ask(gpus, text)
        except DraDriverError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                _log.warning("cleanup_not_tried", reason=self._problem)
            return _LOOK_EVERY_S
        self._problem = None
        return _TOOLS_EVERY_S if works else _LOOK_EVERY_S

    def clear_temporary(self) -> None:
        """Remove what killed writers left, unless that was done in the last half minute."""
        if self.clock() - self._cleared_at >= _CLEAR_EVERY_S:
            self._cleared_at = self.clock()
            for directory, pattern in self.temporary:
                clear_abandoned(directory, pattern)

    def _to_do(self) -> list[tuple[frozenset[str], str]]:
        works = _works([*self.ledger.left(), *self.ledger.missing()])
        known = frozenset[str]().union(*(gpus for gpus, _ in works))
        return [
            *works,
            *((frozenset({gpu}), "the cleanup of a ledger") for gpu in self.ledger.void() - known),
        ]

    def _is_due(self, gpus: frozenset[str], busy: Collection[str]) -> bool:
        with self._guard:
            due = all(self.clock() >= self._pauses[gpu][1] for gpu in gpus & self._pauses.keys())
        return due and gpus.isdisjoint(busy)

    def _note(self, gpus: frozenset[str], *, is_clean: bool) -> None:
        """A try on these GPUs has ended."""
        with self._guard:
            for gpu in gpus:
                backoff = self._pauses.pop(gpu, (Backoff(_RETRY_FIRST_S, _RETRY_MOST_S), 0.0))[0]
                if not is_clean:
                    self._pauses[gpu] = backoff, self.clock() + backoff.next()

    def _tell(self) -> None:
        """Note what has come and gone since the last time. The instance that leads reports it, whichever of
        the two ended the claim. Raises: StateError."""
        with self._telling:
            now, leads = {one.name: one for one in self.outstanding()}, self.leads()
            before, self._told = self._told, now
            known = things(step for one in before.values() for step in one.steps)
            for name in sorted(now.keys() - before.keys() if leads else ()):
                self._tell_pending(now[name], known)
                known |= things(now[name].steps)
            for name in sorted(before.keys() - now.keys() if leads else ()):
                self._tell_done(before[name])
            is_changed = {name: one.steps for name, one in before.items()} != {
                name: one.steps for name, one in now.items()
            }
        if is_changed:
            self.changed()

    def _tell_pending(self, cleanup: PendingCleanup, known: Collection[Thing]) -> None:
        ref = cleanup.record.ref
        _log.warning("cleanup_pending", claim=str(ref), claim_uid=ref.uid, reason=cleanup.text)
        # One event for one thing, also where a Prepare fails again and again.
        if self.observer is not None and without(cleanup.steps, known):
            self.observer.cleanup_pending(cleanup)

    def _tell_done(self, cleanup: PendingCleanup) -> None:
        ref = cleanup.record.ref
        _log.info("cleanup_done", claim=str(ref), claim_uid=ref.uid)
        if self.observer is not None:
            self.observer.cleanup_done(cleanup)


def _gpus(cleanup: PendingCleanup) -> frozenset[str]:
    return frozenset[str]().union(*map(gpus_of, cleanup.steps))


def _works(entries: Iterable[LedgerEntry]) -> list[tuple[frozenset[str], str]]:
    """The GPUs that are cleaned together, and what that is."""
    groups = by_gpus(entry.step for entry in entries)
    return [(gpus, f"the cleanup of {what(steps[-1])}") for gpus, steps in groups]
