"""Taking back what claims hold that nobody will unprepare any more.

The kubelet unprepares what it remembers. It forgets claims when its own state is lost, when a node was cut off, or when
pods were removed while the driver was away. So records are compared with the API server: soon after the start, every
ten minutes, and when somebody waits for a holder.

    kept ──stale in a look──▶ stale ──still, a grace time later──▶ taken back, as by the kubelet's Unprepare
      ▲                         │  │
      └──not stale in a look────┘  └── the API server is not sure, a process computes on a device: stays

| A crash … | leaves | and then |
|---|---|---|
| in a look, or while a claim is stale | the record | the grace time begins anew |
| while it is taken back | the record, with some undos done | the same; the undos find their work done |
| after that | nothing | nothing is to be done |

- What is stale is remembered in memory only: a driver that crashes again and again never acts in haste, and otherwise a
  restart costs a minute.
- Sure is only a claim that the API server says is not there, has another UID, or has no allocation to what the record
  holds. One answer of any other kind (silence, a refusal, a path that is not served) ends the look and nothing is
  taken back in it; nor is it if the API server does not know this node, for then it is not the one of this cluster or
  has lost its data.
- A claim that is prepared meanwhile, here or by the other instance of a rolling update, is left alone: `reclaim` looks
  at that under the claim's lock. The kubelet's own Unprepare before, after or meanwhile does no harm.
- What still computes on a claim's devices (`services.deviceusers`) keeps them from the next one, however long: it is
  told with its process IDs, once, and looked at again each half minute, and when somebody waits for the device. While
  NVML cannot tell, the same.
- Records with steps of a newer release are told and not touched: only that release can undo them.
- The pods that a claim is reserved for are written into its record where they are others by now (`services.claimpods`),
  under the claim's lock too. It is the same record all the same: nothing above begins anew by that.
- A CDI spec without a record is removed likewise if the claim's name is known, from a record that was there
  before; else it is told, because the API server cannot be asked by UID. Containers of a former driver may stand on it.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import structlog

from dra_driver.core.staleness import Departure, staleness
from dra_driver.errors import ApiUnavailableError, DraDriverError
from dra_driver.model.claim import ClaimNow, ClaimRef, Pods
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import UnknownStep
from dra_driver.services.deviceusers import InUse

_log = structlog.get_logger(__name__)
_jitter = random.Random()  # noqa: S311  spreads load; not a matter of security

_GONE = Departure("was deleted", is_final=True)


class Claims(Protocol):
    """The claims in the API server."""

    def look(self, ref: ClaimRef, timeout_s: float) -> ClaimNow | None:
        """The claim that bears the name now, None if there is none. Raises: DraDriverError if that is not sure."""


class Records(Protocol):
    """The claim records."""

    def all(self) -> Mapping[str, ClaimRecord]:
        """Every record by claim UID."""


class Taker(Protocol):
    """Unprepares claims."""

    def reclaim(self, ref: ClaimRef, expected: ClaimRecord | None, looked_ns: int) -> bool:
        """Unprepare the claim unless it has another record, or was prepared after `looked_ns`; whether it was."""


class Observer(Protocol):
    """Told of what was taken back. Must not raise, nor wait for anybody."""

    def recovered(self, ref: ClaimRef, why: str) -> None:
        """A claim was unprepared that nobody would have unprepared."""

    def still_in_use(self, ref: ClaimRef, text: str) -> None:
        """A stale claim keeps its devices; `text` goes on after the claim: why it is stale, what computes on them, and
        what to do."""


@dataclass(frozen=True, slots=True)
class Rhythm:
    """Times in seconds. `grace_s` lies between the look in which a claim is found stale first and the one in which it
    is taken back; `retry_s` is the first pause after a failure and is doubled up to `every_s`."""

    first_s: float = 30.0
    every_s: float = 600.0
    grace_s: float = 60.0
    retry_s: float = 30.0
    between_requests_s: float = 0.1
    request_s: float = 5.0


@dataclass(frozen=True, slots=True)
class _Subject:
    """A claim to look at; its record is None where only a CDI spec is left."""

    ref: ClaimRef
    record: ClaimRecord | None


@dataclass(frozen=True, slots=True)
class _Stale:
    """Since when (the clock's time) which record is stale."""

    subject: _Subject
    since: float


@dataclass(frozen=True, slots=True)
class _Verdict:
    """Why a claim is stale, None if it is not; the API server was asked at `looked_ns` (time.monotonic_ns())."""

    why: Departure | None
    looked_ns: int


class _UnsureError(Exception):
    """The API server cannot be relied on now; the cause says why."""


def _no_specs(_records: Mapping[str, ClaimRecord]) -> Collection[str]:
    return ()


def _not_in_use(_record: ClaimRecord) -> None:
    pass


def _unkept(_record: ClaimRecord, _pods: Pods, _looked_ns: int) -> None:
    pass


def _sure() -> None:
    pass


class Reconciler:
    """Looks in a thread of its own. `start` it when the driver serves the kubelet."""

    def __init__(
        self,
        records: Records,
        claims: Claims,
        taker: Taker,
        driver: str,
        observer: Observer,
        *,
        unrecorded: Callable[[Mapping[str, ClaimRecord]], Collection[str]] = _no_specs,
        in_use: Callable[[ClaimRecord], InUse | None] = _not_in_use,
        make_sure: Callable[[], object] = _sure,
        keep_pods: Callable[[ClaimRecord, Pods, int], None] = _unkept,
        rhythm: Rhythm = Rhythm(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`unrecorded` answers the UIDs of claims that have a CDI spec but neither a record nor one that was set aside;
        `in_use` says what computes on a claim's devices, None if nothing is known to, and raises a DraDriverError if
        that cannot be told now; `make_sure` raises one unless the API server knows this node; `keep_pods` is told of
        each claim that is as its record says for which pods it is reserved, and when that was asked."""
        self._records = records
        self._claims = claims
        self._taker = taker
        self._driver = driver
        self._observer = observer
        self._unrecorded = unrecorded
        self._in_use = in_use
        self._make_sure = make_sure
        self._keep_pods = keep_pods
        self._rhythm = rhythm
        self._clock = clock
        self._names: dict[str, ClaimRef] = {}
        self._stale: dict[str, _Stale] = {}
        self._kept: set[str] = set()
        self._told: set[tuple[str, str]] = set()
        self._failures = 0
        self._asked: set[str] = set()
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reconciler", daemon=True)

    def start(self) -> None:
        """Begin; the first look is after a grace time, in which the kubelet may unprepare what it knows of."""
        self._thread.start()

    def stop(self) -> None:
        """Stop looking; a claim that is being taken back is finished within seconds, or by the next run."""
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout=5)

    def look_soon(self, ref: ClaimRef) -> None:
        """Somebody waits for what the claim holds."""
        with self._changed:
            if ref.uid not in self._stale or ref.uid in self._kept:
                self._asked.add(ref.uid)
                self._changed.notify_all()

    def stale(self) -> list[ClaimRef]:
        """The claims that were stale in the last look and still hold something."""
        return [entry.subject.ref for entry in self._stale.copy().values()]

    # --- when ----------------------------------------------------------------------------------

    def _run(self) -> None:
        every = self._rhythm.every_s
        next_full = self._clock() + self._rhythm.first_s * _jitter.uniform(1.0, 1.2)
        again = math.inf
        while True:
            asked = self._wait_until(min(self._due(next_full), again))
            if self._stopping.is_set():
                return
            is_full = self._clock() >= next_full
            try:
                pause = self.look(None if is_full else {*asked, *self._stale})
                is_unsure = self._failures > 0
            except Exception:  # noqa: BLE001  a surprise must not end the thread
                _log.exception("reconciler_failed")
                pause, is_unsure = self._rhythm.retry_s, True
            if is_full:
                next_full = self._clock() + every * _jitter.uniform(0.8, 1.2)
            # What could only not be taken back is tried again alone, as a process may never end.
            again = math.inf if pause is None else self._clock() + pause * _jitter.uniform(1.0, 1.2)
            if is_unsure:
                next_full = min(next_full, again)

    def _due(self, next_full: float) -> float:
        """When the next look is, but for the stale claims that could not be taken back."""
        grace = self._rhythm.grace_s
        soon = [entry.since + grace for entry in self._stale.values() if entry.since + grace > self._clock()]
        return min([next_full, *soon])

    def _wait_until(self, due: float) -> set[str]:
        """Wait for the moment, or until somebody asks for certain claims: their UIDs."""
        with self._changed:
            while not (self._stopping.is_set() or self._asked) and (left := due - self._clock()) > 0:
                self._changed.wait(left)
            asked, self._asked = self._asked, set()
        return asked

    # --- what ----------------------------------------------------------------------------------

    def look(self, only: Collection[str] | None = None) -> float | None:
        """Compare all claims of this node with the API server, or those with the UIDs in `only`, and take back what
        has been stale for the grace time. Answers after how many seconds to try again what failed, None if nothing
        did."""
        try:
            failed = self._take_back(self._judged(only))
        except (_UnsureError, DraDriverError) as error:
            return self._later(error)
        self._failures = 0
        return self._rhythm.retry_s if failed else None

    def _later(self, error: Exception) -> float:
        cause = error.__cause__ or error
        if not self._failures:
            _log.warning("reconcile_delayed", reason=str(cause))
        asked = (cause.retry_after_s or 0.0) if isinstance(cause, ApiUnavailableError) else 0.0
        pause = min(self._rhythm.retry_s * 2.0 ** min(self._failures, 16), self._rhythm.every_s)
        self._failures += 1
        return max(pause, asked)

    def _subjects(self) -> Iterator[_Subject]:
        """The claims that hold something on this node."""
        records = self._records.all()
        specs = set(self._unrecorded(records))
        names = {uid: record.ref for uid, record in records.items()}
        self._names = names | {uid: ref for uid, ref in self._names.items() if uid in specs}
        self._told = {(uid, text) for uid, text in self._told if uid in records or uid in specs}
        for uid, record in records.items():
            newer = [step.kind for step in record.steps if isinstance(step, UnknownStep)]
            if newer:
                self._tell_once(uid, f"its steps {', '.join(newer)} are of a newer release; it is left alone")
            else:
                yield _Subject(record.ref, record)
        for uid in sorted(specs - records.keys()):
            if uid in self._names:
                yield _Subject(self._names[uid], None)
            else:
                self._tell_once(
                    uid, "its CDI spec has no record and nobody knows its name; remove it if no pod uses it"
                )

    def _judged(self, only: Collection[str] | None) -> dict[str, _Verdict]:
        """The stale claims of this look by UID. Raises: _UnsureError; what was stale before stays so."""
        subjects = {subject.ref.uid: subject for subject in self._subjects()}
        verdicts: dict[str, _Verdict] = {}
        for uid in [uid for uid in subjects if only is None or uid in only]:
            if verdicts and self._stopping.wait(self._rhythm.between_requests_s):
                break
            verdicts[uid] = self._judge(subjects[uid])
        for uid in self._stale.keys() - subjects.keys():
            del self._stale[uid]  # the kubelet unprepared it
        now = self._clock()
        for uid, verdict in verdicts.items():
            before = self._stale.get(uid)
            if verdict.why is None:
                self._stale.pop(uid, None)
            elif before is None or before.subject != subjects[uid]:
                self._stale[uid] = _Stale(subjects[uid], now)
                _log.info("claim_stale", claim=str(subjects[uid].ref), reason=verdict.why.why)
        self._kept &= self._stale.keys()
        return {uid: verdict for uid, verdict in verdicts.items() if verdict.why is not None}

    def _judge(self, subject: _Subject) -> _Verdict:
        looked_ns = time.monotonic_ns()
        try:
            now = self._claims.look(subject.ref, self._rhythm.request_s)
        except DraDriverError as error:
            raise _UnsureError from error
        if subject.record is not None:
            why = staleness(subject.record, now, self._driver)
            if why is None and now is not None and now.uid == subject.ref.uid:
                self._keep_pods(subject.record, now.pods, looked_ns)
            return _Verdict(why, looked_ns)
        is_there = now is not None and now.uid == subject.ref.uid
        return _Verdict(None if is_there else _GONE, looked_ns)

    def _take_back(self, stale: Mapping[str, _Verdict]) -> bool:
        """Take back what has been stale for long enough; whether something could not be. Raises: DraDriverError if
        the API server does not know this node."""
        now = self._clock()
        due = [uid for uid in stale if now - self._stale[uid].since >= self._rhythm.grace_s]
        if due:
            self._make_sure()
        failed = False
        for uid in due:
            if self._stopping.is_set():
                return failed
            failed |= not self._taken_back(self._stale[uid].subject, stale[uid])
        return failed

    def _taken_back(self, subject: _Subject, verdict: _Verdict) -> bool:
        """Whether the claim is no matter any more."""
        ref, why = subject.ref, verdict.why.why if verdict.why else ""
        if subject.record is not None and self._is_kept(subject.record, why):
            self._kept.add(ref.uid)
            return False
        self._kept.discard(ref.uid)
        try:
            done = self._taker.reclaim(ref, subject.record, verdict.looked_ns)
        except Exception as error:  # noqa: BLE001  one claim's failure must not keep the others
            tell = _log.warning if isinstance(error, DraDriverError) else _log.exception
            tell("claim_not_recovered", claim=str(ref), claim_uid=ref.uid, reason=str(error))
            return False
        self._stale.pop(ref.uid, None)
        if done:
            _log.warning("claim_recovered", claim=str(ref), claim_uid=ref.uid, reason=why)
            self._observer.recovered(ref, why)
        return True

    def _is_kept(self, record: ClaimRecord, why: str) -> bool:
        """Whether something computes on the claim's devices, or that cannot be told now."""
        ref = record.ref
        try:
            use = self._in_use(record)
        except DraDriverError as error:
            self._tell_once(
                ref.uid, f"it {why}; whether its devices are still in use cannot be told: {error}"
            )
            return True
        if use is None:
            return False
        news = {(ref.uid, f"process {pid}") for pid in use.pids} - self._told
        if news:
            self._told |= news
            text = (
                f"{why}, but {use.text}; end that on the node (kill -9), or if it does not end, reset the GPU or "
                "reboot the node; then the claim's devices are taken back"
            )
            _log.warning("claim_still_in_use", claim=str(ref), claim_uid=ref.uid, reason=f"it {text}")
            self._observer.still_in_use(ref, text)
        return True

    def _tell_once(self, uid: str, text: str) -> None:
        if (uid, text) not in self._told:
            self._told.add((uid, text))
            _log.warning("claim_not_reconciled", claim_uid=uid, reason=text)
