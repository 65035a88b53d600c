"""Unprepares stale claims: claims that the kubelet will not unprepare.

The kubelet forgets claims if it loses its state, if the node was cut off, or if pods were removed while the
plugin was down. So the reconciler compares the records with the API server: soon after the start, every ten
minutes, and when an attempt waits for a holder. It unprepares a claim that stays stale for the grace time.

- A claim is stale only if the API server says that it does not exist, has another UID, or has none of the
  record's devices any more. After any other answer, a later check tries again. An API server that does not
  know this node belongs to another cluster or has lost its data, so nothing is unprepared.
- The list of stale claims is only in memory, so after a crash the grace time starts again.
- A claim that an attempt waits for is unprepared at once if no process of its pods runs on this node, which
  the plugin knows if it sees the host's process IDs and the record names the pods. The kubelet's
  pod-resources API would not help: a force-deleted pod is missing there while its containers may still run.
- Right before an Unprepare the reconciler queries the API server again, and `reclaim` checks under the
  claim's lock that no call has prepared the claim since. The kubelet's own Unprepare may come before, during
  or after.
- While a process computes on a claim's devices, or NVML does not answer (`claims.gpu_processes`), no other
  claim gets them.
- The kubelet calls Prepare only for the first pod of a claim, so the reconciler keeps the pods in the record
  current.
- A CDI spec without a record is only reported: the API server finds claims by name, not by UID, and running
  containers may need the spec.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

import structlog

from dra_driver.base.backoff import Backoff
from dra_driver.base.threads import BackgroundWorker
from dra_driver.claims.calls import Observer
from dra_driver.claims.gpu_processes import GpuProcesses
from dra_driver.claims.rules.holders import staleness
from dra_driver.claims.specs_without_record import SpecsWithoutRecord
from dra_driver.claims.unprepare import Unpreparer
from dra_driver.errors import ApiUnavailableError, DraDriverError
from dra_driver.journal.records import RecordStore
from dra_driver.kube.claims import ClaimClient
from dra_driver.model.claim import ClaimRef, Pods
from dra_driver.model.dataclass import dataclass, replace
from dra_driver.model.problems import NodeProblem
from dra_driver.model.record import ClaimRecord

_log = structlog.get_logger(__name__)
_jitter = random.Random()  # noqa: S311  for spreading load, not for security

_MAX_UNANSWERED_IN_A_ROW = 3
_LOCK_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Rhythm:
    """`grace_s` is the least time from finding a claim stale to unpreparing it, unless an attempt waits for
    it. `retry_s` doubles with each failure in a row, up to `every_s`.
    """

    first_s: float = 30.0
    every_s: float = 600.0
    grace_s: float = 60.0
    retry_s: float = 30.0
    between_requests_s: float = 0.1
    request_s: float = 5.0


@dataclass(frozen=True, slots=True)
class _Stale:
    """`since` is when the claim was first found stale (`Reconciler.clock`)."""

    record: ClaimRecord
    why: str
    since: float


@dataclass(eq=False)
class Reconciler(BackgroundWorker):
    """Has its own thread. Call `start` once the plugin serves the kubelet.

    `check_node` raises a DraDriverError unless the API server knows this node. `pods_run` returns whether a
    process of the claim's pods runs on this node; None if unknown.
    """

    records: RecordStore
    lookup: ClaimClient
    unpreparer: Unpreparer
    without_record: SpecsWithoutRecord
    users: GpuProcesses
    driver: str
    observer: Observer
    check_node: Callable[[], object]
    pods_run: Callable[[ClaimRecord], bool | None] = lambda _record: None
    rhythm: Rhythm = Rhythm()
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._stale: dict[str, _Stale] = {}
        self._logged: set[tuple[str, str]] = set()
        self._kept: dict[str, NodeProblem] = {}  # by the UID of the stale claim
        self._is_failing = False
        self._backoff = Backoff(self.rhythm.retry_s, self.rhythm.every_s)
        self._unanswered = 0
        self._asked: set[str] = set()
        self._awaited: set[str] = set()
        self._guard = threading.Lock()
        self._next_full = math.inf
        super().__init__("reconciler", self._turn, lambda _: self.rhythm.retry_s)

    def start(self) -> None:
        """Delay the first check, so that the kubelet first unprepares the claims that it remembers."""
        self._next_full = self.clock() + self.rhythm.first_s * _jitter.uniform(1.0, 1.2)
        super().start()

    def problems(self) -> Sequence[NodeProblem]:
        return [problem for uid, problem in self._kept.copy().items() if uid in self._stale]

    def check_soon(self, ref: ClaimRef) -> None:
        """Check a claim soon, because an attempt waits for its devices."""
        with self._guard:
            self._asked.add(ref.uid)
        self.wake()

    def _turn(self) -> float:
        with self._guard:
            asked, self._asked = self._asked, set()
        self._awaited |= asked
        is_full = self.clock() >= self._next_full
        only = {*self._awaited, *self._stale}
        pause = self.check(None if is_full else only) if is_full or only else None
        if is_full:
            every_s = pause if pause is not None and self._is_failing else self.rhythm.every_s
            self._next_full = self.clock() + every_s * _jitter.uniform(0.8, 1.2)
        if pause is None and self._stale:
            pause = min(self.rhythm.grace_s, self.rhythm.retry_s)
        until_full = self._next_full - self.clock()
        return until_full if pause is None else min(until_full, pause * _jitter.uniform(1.0, 1.2))

    def check(self, only: Collection[str] | None = None) -> float | None:
        """Compare the claims, or those with the UIDs in `only`, with the API server, and unprepare what is
        due.

        Return the seconds after which to retry; None if nothing failed.
        """
        try:
            failed = self._reclaim_due(self._found_stale(only))
        except DraDriverError as error:
            if not self._is_failing:
                _log.warning("reconcile_delayed", reason=str(error))
            self._is_failing = True
            asked = (error.retry_after_s or 0.0) if isinstance(error, ApiUnavailableError) else 0.0
            return max(self._backoff.step(), asked)
        self._is_failing = False
        self._backoff.reset()
        return self.rhythm.retry_s if failed or self._unanswered else None

    def _checked_records(self) -> Mapping[str, ClaimRecord]:
        records = self.records.all()
        specs = set(self.without_record.unrecorded(records))
        lost = self.without_record.lost(records)
        self._logged = {(uid, text) for uid, text in self._logged if uid in {*records, *specs, *lost}}
        newer = self.records.newer()
        for uid in lost:
            self._log_once(
                uid,
                f"the claim's devices stay reserved until the kubelet unprepares the claim: {newer[uid].newer}"
                if uid in newer
                else "the claim's record cannot be read, so its name is unknown; its devices stay reserved until the "
                "kubelet unprepares the claim; if no pod uses the claim, remove its CDI spec",
            )
        for uid in sorted(specs):
            self._log_once(
                uid,
                "the claim has a CDI spec but no record, so its name is unknown; remove the CDI spec if no pod uses it",
            )
        return records

    def _found_stale(self, only: Collection[str] | None) -> list[_Stale]:
        """Raise DraDriverError if every query of the API server failed; claims that were stale stay stale."""
        subjects = self._checked_records()
        verdicts: dict[str, _Stale | None] = {}
        unanswered: dict[str, DraDriverError] = {}
        in_a_row = 0
        asked = [uid for uid in subjects if only is None or uid in only]
        _jitter.shuffle(asked)  # if the check ends early, the next one should reach other claims
        for number, uid in enumerate(asked):
            if number and self.pause(self.rhythm.between_requests_s):
                break
            try:
                verdicts[uid] = self._check_claim(subjects[uid])
                in_a_row = 0
            except DraDriverError as error:
                unanswered[uid] = error
                in_a_row = in_a_row + 1 if isinstance(error, ApiUnavailableError) else 0
                if in_a_row >= _MAX_UNANSWERED_IN_A_ROW:
                    break
        if unanswered and not verdicts:
            raise next(iter(unanswered.values()))
        for uid, unsure in unanswered.items():
            self._log_once(uid, f"the API server did not return the claim; the plugin retries: {unsure}")
        self._unanswered = len(unanswered)
        for uid in self._stale.keys() - subjects.keys():
            del self._stale[uid]  # the kubelet unprepared it
        for uid, found in verdicts.items():
            before = self._stale.get(uid)
            if found is None:
                self._stale.pop(uid, None)
            elif before is not None and before.record == found.record:
                self._stale[uid] = replace(found, since=before.since)
            else:
                self._stale[uid] = found
                _log.info("claim_stale", claim=str(found.record.ref), reason=found.why)
        for uid in self._kept.keys() - self._stale.keys():
            del self._kept[uid]
        # A claim without an answer is still awaited.
        self._awaited &= {*self._stale, *(subjects.keys() - verdicts.keys())}
        return [self._stale[uid] for uid in verdicts if uid in self._stale]

    def _check_claim(self, record: ClaimRecord) -> _Stale | None:
        now = self.lookup.current(record.ref, self.rhythm.request_s)
        found = staleness(record, now, self.driver)
        if found is not None:
            return _Stale(record, found, self.clock())
        if now is not None and now.uid == record.ref.uid:
            self._update_pods(record, now.pods)
            if now.reported is not None:
                self.observer.seen(record.ref, now.reported)
        return None

    def _update_pods(self, seen: ClaimRecord, pods: Pods) -> None:
        """Write the current pods, unless another call has changed them since the record was `seen`."""
        if pods is None or seen.claim.pods == pods:
            return
        # If this write fails, the next check retries it.
        with suppress(DraDriverError), self.records.locks.hold(seen.ref.uid, _LOCK_WAIT_S):
            record = self.records.get(seen.ref.uid)
            if record is None or record.claim.pods != seen.claim.pods:
                return
            # Not durable: a power cut may restore the previous version, which has the same steps.
            self.records.save(replace(record, claim=replace(record.claim, pods=pods)), durable=False)

    def _reclaim_due(self, stale: Sequence[_Stale]) -> bool:
        """Return whether an Unprepare failed. Raises: DraDriverError if the API server does not know this
        node.
        """
        due = [one for one in stale if self._is_due(one)]
        if due:
            self.check_node()
        failed = False
        for one in due:
            if self.is_stopping:
                return failed
            failed |= not self._reclaim(one)
        return failed

    def _is_due(self, entry: _Stale) -> bool:
        if self.clock() - entry.since >= self.rhythm.grace_s:
            return True
        return entry.record.ref.uid in self._awaited and self.pods_run(entry.record) is False

    def _reclaim(self, stale: _Stale) -> bool:
        """Return False if the reconciler must retry."""
        ref, why = stale.record.ref, stale.why
        if self._is_in_use(stale.record, why):
            return False
        try:
            checked_ns = time.monotonic_ns()
            is_still_stale = self._check_claim(stale.record) is not None  # the check may be a minute old
            done = is_still_stale and self.unpreparer.reclaim(ref, stale.record, checked_ns)
        except Exception as error:  # noqa: BLE001  one claim's failure must not affect the others
            log = _log.warning if isinstance(error, DraDriverError) else _log.exception
            log("claim_not_recovered", claim=str(ref), claim_uid=ref.uid, reason=str(error))
            return False
        self._stale.pop(ref.uid, None)
        if done:
            _log.warning("claim_recovered", claim=str(ref), claim_uid=ref.uid, reason=why)
            self.observer.recovered(ref, why)
        return True

    def _is_in_use(self, record: ClaimRecord, why: str) -> bool:
        """Return True also if the use is unknown."""
        ref = record.ref
        try:
            use = self.users.of(record)
        except DraDriverError as error:
            self._log_once(
                ref.uid,
                f"the claim {why}; gpu-dra-driver cannot find out whether its devices are still in use: {error}",
            )
            return True
        if use is None:
            self._kept.pop(ref.uid, None)
            return False
        pids = " ".join(map(str, sorted(use.pids)))
        text = (
            f"{why}, but {use.text}; run `kill -9 {pids}` on the node, or if that does not help, drain and reboot "
            "the node"
        )
        subject = f"{ref.namespace}/{ref.name}"
        self._kept[ref.uid] = NodeProblem("claim-in-use", f"Claim {subject} {text}", subject)
        news = {(ref.uid, f"process {pid}") for pid in use.pids} - self._logged
        if news:
            self._logged |= news
            _log.warning("claim_still_in_use", claim=str(ref), claim_uid=ref.uid, reason=f"the claim {text}")
            self.observer.still_in_use(ref, text)
        return True

    def _log_once(self, uid: str, text: str) -> None:
        if (uid, text) not in self._logged:
            self._logged.add((uid, text))
            _log.warning("claim_not_reconciled", claim_uid=uid, reason=text)
