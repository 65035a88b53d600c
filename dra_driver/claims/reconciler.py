"""Takes back the devices of stale claims: claims that the kubelet will not unprepare any more.

The kubelet unprepares the claims that it remembers. It forgets claims when its own state is lost, when a node was cut
off, or when pods were removed while the plugin was down. So the reconciler compares the records with the API server:
soon after the start, every ten minutes, and when an attempt waits for a holder.

    kept ──stale in a look──▶ stale ──still stale after a grace time──▶ taken back, as by the kubelet's Unprepare
      ▲                         │  │
      └──not stale in a look────┘  └── the API server does not tell, or a process computes on a device: stays stale

| A crash … | leaves | and then |
|---|---|---|
| in a look, or while a claim is stale | the record | the grace time begins again |
| while it is taken back | the record, with some undos done | the same; an undo may run again |
| after that | nothing | nothing is to be done |

- Only memory holds which claims are stale. So a driver that crashes again and again never takes a claim back too early,
  and a single restart costs a minute.
- A claim is stale only if the API server says that it does not exist, has another UID, or is not allocated to anything
  that the record holds. If the API server gives any other answer for a claim (none, a refusal, a path that is not
  served), the look skips that claim and a later look asks again. After three claims in a row without an answer the look
  ends; what it knows by then counts, and the next look asks in another order. It takes nothing back if the API server
  does not know this node: then it is the API server of another cluster or has lost its data.
- The grace time is for the kubelet, which may still be ending the claim's containers. If an attempt waits for a stale
  claim's devices, and no process of the claim's pods runs on this node, there is nothing to wait for: the claim is
  taken back at once. That needs the host's process IDs, and pods in the record. The kubelet's pod-resources would add
  nothing: the kubelet lists the pods that the API server has. A pod that was deleted by force is missing there at once,
  while its containers may still run.
- A claim that is prepared in between keeps its devices. Right before the reconciler takes a claim back, it asks the API
  server again, because the other instance of a rolling update may have prepared the claim; `reclaim` checks under the
  claim's lock that this instance did not. The kubelet's own Unprepare may come before, during or after that.
- During a rolling update the old instance may write a record too late: the kubelet has cancelled its Prepare and has
  unprepared the claim by the new instance, and the old one learns of neither in time. The kubelet does not unprepare
  the claim again. Its devices stay with it until the claim is stale, which it is as soon as Kubernetes has removed its
  allocation. Then the reconciler takes it back like any other.
- While a process computes on a claim's devices (`claims.gpu_processes`), or NVML does not tell, no other claim gets
  them, however long that takes. The driver reports the process IDs once. It looks again every half minute, and when an
  attempt waits for the device.
- The kubelet calls Prepare once, for the first pod of a claim; other pods that share the claim come and go without a
  call. If a claim is reserved for other pods than its record says, the reconciler writes them into the record, under
  the claim's lock too. Pods are information for people, so for everything above it is still the same record. The plugin
  decides one thing by them: whether a stale claim that another one waits for needs the grace time.
- A CDI spec without a record is only reported: the API server finds claims by name, not by UID, and containers from
  before may still need the spec.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

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
from dra_driver.model.problems import NodeProblem
from dra_driver.model.record import ClaimRecord

_log = structlog.get_logger(__name__)
_jitter = random.Random()  # noqa: S311  spreads load; not a matter of security

_MAX_UNANSWERED_IN_A_ROW = 3
_LOCK_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Rhythm:
    """Times in seconds. `grace_s` is the least time between the look that first finds a claim stale and the look that
    takes it back. `retry_s` is the first pause after a failure; each further failure doubles it, up to `every_s`."""

    first_s: float = 30.0
    every_s: float = 600.0
    grace_s: float = 60.0
    retry_s: float = 30.0
    between_requests_s: float = 0.1
    request_s: float = 5.0


@dataclass(frozen=True, slots=True)
class _Stale:
    """A stale claim, and why it is that; `since` is the clock's time of the look that first found it stale."""

    record: ClaimRecord
    why: str
    since: float


@dataclass(eq=False)
class Reconciler(BackgroundWorker):
    """Looks in its own thread. Call `start` when the plugin serves the kubelet.

    `make_sure` raises a DraDriverError unless the API server knows this node. `pods_run` answers whether a
    process of the claim's pods runs on this node, None if that is not known.
    """

    records: RecordStore
    lookup: ClaimClient
    unpreparer: Unpreparer
    without_record: SpecsWithoutRecord
    users: GpuProcesses
    driver: str
    observer: Observer
    make_sure: Callable[[], object]
    pods_run: Callable[[ClaimRecord], bool | None] = lambda _record: None
    rhythm: Rhythm = Rhythm()
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._stale: dict[str, _Stale] = {}
        self._told: set[tuple[str, str]] = set()
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
        """Start looking. The first look comes after a while, in which the kubelet may unprepare the claims that it
        knows."""
        self._next_full = self.clock() + self.rhythm.first_s * _jitter.uniform(1.0, 1.2)
        super().start()

    def problems(self) -> Sequence[NodeProblem]:
        """One for each stale claim whose devices are still in use."""
        return [problem for uid, problem in self._kept.copy().items() if uid in self._stale]

    def look_soon(self, ref: ClaimRef) -> None:
        """Look at the claim soon: an attempt waits for what it holds."""
        with self._guard:
            self._asked.add(ref.uid)
        self.wake()

    def _turn(self) -> float:
        """Look at all claims if it is time, else at those that are waited for or stale. Returns the seconds until
        the next look."""
        with self._guard:
            asked, self._asked = self._asked, set()
        self._awaited |= asked
        is_full = self.clock() >= self._next_full
        only = {*self._awaited, *self._stale}
        pause = self.look(None if is_full else only) if is_full or only else None
        if is_full:
            every_s = pause if pause is not None and self._is_failing else self.rhythm.every_s
            self._next_full = self.clock() + every_s * _jitter.uniform(0.8, 1.2)
        if pause is None and self._stale:
            pause = min(self.rhythm.grace_s, self.rhythm.retry_s)
        until_full = self._next_full - self.clock()
        return until_full if pause is None else min(until_full, pause * _jitter.uniform(1.0, 1.2))

    def look(self, only: Collection[str] | None = None) -> float | None:
        """Compare all claims of this node, or those with the UIDs in `only`, with the API server, and take back those
        that have been stale for the grace time. Returns the seconds after which to try again, None if nothing
        failed."""
        try:
            failed = self._take_back(self._found_stale(only))
        except DraDriverError as error:
            if not self._is_failing:
                _log.warning("reconcile_delayed", reason=str(error))
            self._is_failing = True
            asked = (error.retry_after_s or 0.0) if isinstance(error, ApiUnavailableError) else 0.0
            return max(self._backoff.step(), asked)
        self._is_failing = False
        self._backoff.reset()
        return self.rhythm.retry_s if failed or self._unanswered else None

    def _subjects(self) -> Mapping[str, ClaimRecord]:
        """The records of this node by UID. Claims of which only a CDI spec is left are told."""
        records = self.records.all()
        specs = set(self.without_record.unrecorded(records))
        lost = self.without_record.lost(records)
        self._told = {(uid, text) for uid, text in self._told if uid in {*records, *specs, *lost}}
        for uid in lost:
            self._tell_once(
                uid,
                "its record cannot be read, so its name is not known, and its devices are kept for it; the kubelet's "
                "Unprepare ends it; if no pod uses it, remove its CDI spec",
            )
        for uid in sorted(specs):
            self._tell_once(
                uid,
                "its CDI spec has no record, so its name is not known; remove the CDI spec if no pod uses it",
            )
        return records

    def _found_stale(self, only: Collection[str] | None) -> list[_Stale]:
        """The stale claims of this look. Raises: DraDriverError if the API server does not tell of any claim; claims
        that were stale before stay stale."""
        subjects = self._subjects()
        verdicts: dict[str, _Stale | None] = {}
        unanswered: dict[str, DraDriverError] = {}
        in_a_row = 0
        asked = [uid for uid in subjects if only is None or uid in only]
        _jitter.shuffle(asked)  # what ends this look must not keep the next one from the same claims
        for number, uid in enumerate(asked):
            if number and self.pause(self.rhythm.between_requests_s):
                break
            try:
                verdicts[uid] = self._judged(subjects[uid])
                in_a_row = 0
            except DraDriverError as error:
                unanswered[uid] = error
                in_a_row = in_a_row + 1 if isinstance(error, ApiUnavailableError) else 0
                if in_a_row >= _MAX_UNANSWERED_IN_A_ROW:
                    break
        if unanswered and not verdicts:
            raise next(iter(unanswered.values()))
        for uid, unsure in unanswered.items():
            self._tell_once(uid, f"the API server does not answer for it, and is asked again: {unsure}")
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
        # One without an answer is still waited for.
        self._awaited &= {*self._stale, *(subjects.keys() - verdicts.keys())}
        return [self._stale[uid] for uid in verdicts if uid in self._stale]

    def _judged(self, record: ClaimRecord) -> _Stale | None:
        """None if the claim is not stale."""
        now = self.lookup.look(record.ref, self.rhythm.request_s)
        found = staleness(record, now, self.driver)
        if found is not None:
            return _Stale(record, found, self.clock())
        if now is not None and now.uid == record.ref.uid:
            self._keep_pods(record, now.pods)
            if now.reported is not None:
                self.observer.seen(record.ref, now.reported)
        return None

    def _keep_pods(self, seen: ClaimRecord, pods: Pods) -> None:
        """Write the pods into the claim's record, which was `seen` before the API server was asked. Nothing is written
        if the pods are not known, or if another call has removed the record or written other pods since."""
        if pods is None or seen.claim.pods == pods:
            return
        # If this write fails, the next look tries again.
        with suppress(DraDriverError), self.unpreparer.claim_locks.hold(seen.ref.uid, _LOCK_WAIT_S):
            record = self.records.get(seen.ref.uid)
            if record is None or record.claim.pods != seen.claim.pods:
                return
            # Not durable: a power cut may bring back the version before this one, which names the same steps.
            self.records.save(replace(record, claim=replace(record.claim, pods=pods)), durable=False)

    def _take_back(self, stale: Sequence[_Stale]) -> bool:
        """Take back the claims that have been stale for the grace time; whether one could not be taken back. Raises:
        DraDriverError if the API server does not know this node."""
        due = [one for one in stale if self._is_due(one)]
        if due:
            self.make_sure()
        failed = False
        for one in due:
            if self.is_stopping:
                return failed
            failed |= not self._taken_back(one)
        return failed

    def _is_due(self, entry: _Stale) -> bool:
        if self.clock() - entry.since >= self.rhythm.grace_s:
            return True
        return entry.record.ref.uid in self._awaited and self.pods_run(entry.record) is False

    def _taken_back(self, stale: _Stale) -> bool:
        """Take the claim back; False if the reconciler must try again."""
        ref, why = stale.record.ref, stale.why
        if self._is_kept(stale.record, why):
            return False
        try:
            looked_ns = time.monotonic_ns()
            is_still_stale = self._judged(stale.record) is not None  # the look may be a minute old
            done = is_still_stale and self.unpreparer.reclaim(ref, stale.record, looked_ns)
        except Exception as error:  # noqa: BLE001  one claim's failure must not keep the others
            tell = _log.warning if isinstance(error, DraDriverError) else _log.exception
            tell("claim_not_recovered", claim=str(ref), claim_uid=ref.uid, reason=str(error))
            return False
        self._stale.pop(ref.uid, None)
        if done:
            _log.warning("claim_recovered", claim=str(ref), claim_uid=ref.uid, reason=why)
            self.observer.recovered(ref, why)
        return True

    def _is_kept(self, record: ClaimRecord, why: str) -> bool:
        """Whether a process computes on the claim's devices, or whether that is not known now."""
        ref = record.ref
        try:
            use = self.users.of(record)
        except DraDriverError as error:
            self._tell_once(ref.uid, f"it {why}; whether its devices are still in use is not known: {error}")
            return True
        if use is None:
            self._kept.pop(ref.uid, None)
            return False
        text = (
            f"{why}, but {use.text}; end that on the node (kill -9), or if it does not end, reset the GPU or "
            "reboot the node"
        )
        subject = f"{ref.namespace}/{ref.name}"
        self._kept[ref.uid] = NodeProblem("claim-in-use", f"Claim {subject} {text}", subject)
        news = {(ref.uid, f"process {pid}") for pid in use.pids} - self._told
        if news:
            self._told |= news
            _log.warning("claim_still_in_use", claim=str(ref), claim_uid=ref.uid, reason=f"it {text}")
            self.observer.still_in_use(ref, text)
        return True

    def _tell_once(self, uid: str, text: str) -> None:
        if (uid, text) not in self._told:
            self._told.add((uid, text))
            _log.warning("claim_not_reconciled", claim_uid=uid, reason=text)
