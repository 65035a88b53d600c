"""The steps of an attempt: begun, carried out, taken back, and left half done until the NVIDIA driver can do the next.

    (nothing) ──its record is written──▶ begun by this attempt ──a later attempt goes on──▶ begun by the later one
        ▲                                   │
        ├── the claim was prepared or unprepared: nothing is left to take back
        └── the attempt fails, gives up, or waits for another claim: it takes back what it has begun

Meanwhile the claim's record says `preparing` and no lock is held. So a crash leaves the same as a crash during a step:
the next Prepare goes on with the record, and an Unprepare takes it back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from dra_driver.claims.kubelet_call import KubeletCall
from dra_driver.claims.waiting_line import PrepareAttempt
from dra_driver.errors import DraDriverError, RetryableError
from dra_driver.journal.claim_locks import ClaimGuard, ClaimLocks
from dra_driver.journal.cleanups import Cleaner
from dra_driver.journal.executor import Executor, tell_incomplete
from dra_driver.journal.records import RecordStore
from dra_driver.journal.rules.cleanups import PendingCleanup
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord

_LOCK_S = 5.0
_PREPARED_WAIT_S = 5.0
"""How long a claim that was prepared before waits for the lanes: its pod has what it needs."""


class AttemptSteps:
    """Carries out the plans of attempts. It knows which attempt must take back what was begun: the last one of the
    claim in this process that wrote the record.

    An attempt in the other instance of a rolling update may find the record gone between two tries; it then starts from
    the beginning.
    """

    def __init__(
        self, records: RecordStore, executor: Executor, claim_locks: ClaimLocks, cleaner: Cleaner
    ) -> None:
        self._records = records
        self._executor = executor
        self._claim_locks = claim_locks
        self._cleaner = cleaner
        self._begun: dict[str, PrepareAttempt] = {}  # by claim UID; changed under the claim's lock

    def pending_before(self, plan: Plan, besides: Collection[str]) -> Sequence[PendingCleanup]:
        """What ended claims left that is to be undone before the plan's steps, but for those named `besides`. Raises:
        StateError."""
        return self._cleaner.pending_before(plan.locked_gpus, plan.steps, besides)

    def settle(self, pending: Sequence[PendingCleanup], plan: Plan) -> None:
        """Have that undone. The caller holds no lock. Raises: RetryableError if what is left keeps one of the plan's
        devices from being used; StateError."""
        self._cleaner.settle(pending, plan.used_devices())

    def begin(self, attempt: PrepareAttempt, plan: Plan, known: ClaimRecord | None) -> ClaimRecord | None:
        """Write the claim's record before its steps; None for a claim without devices. `known` is the record before.
        The caller holds the claim's lock. Raises: StateError."""
        if not plan.devices:
            return None
        record = self._executor.intend(plan, known)
        if record.phase != "prepared":
            if known is None:
                attempt.begun = []
            elif self._begun.get(attempt.ref.uid) is not attempt:
                attempt.begun = None
            self._begun[attempt.ref.uid] = attempt
        return record

    def carry_out(self, attempt: PrepareAttempt, plan: Plan, record: ClaimRecord) -> ClaimRecord:
        """Do the plan's steps; returns the claim's record at the end. The caller holds no lock, and calls `give_up`
        unless it tries again. Raises: what a step raised; RetryableError if the claim was unprepared or changed
        meanwhile."""
        begun = [] if attempt.begun is None else attempt.begun
        left = attempt.call.left()
        self._executor.change(
            plan, record, begun, min(left, _PREPARED_WAIT_S) if record.phase == "prepared" else left
        )
        uid = attempt.ref.uid
        with self._claim_locks.hold(uid, _LOCK_S) as guard:
            refuse_unprepared(guard, attempt.call)
            done = self._executor.finish(plan, record, begun)
            self.end(uid)
            guard.note_prepared(attempt.call.began_ns)
            return done

    def leave(self, record: ClaimRecord) -> Sequence[PendingCleanup]:
        """End what an earlier allocation of the claim had; what is to be undone, for `clean`. The caller holds the
        claim's lock. Raises: StateError."""
        cleanup = self._executor.leave(record)
        return () if cleanup is None else (cleanup,)

    def clean(self, cleanup: PendingCleanup) -> None:
        """Undo it, and wait for that a moment. The caller holds no lock. Raises: StateError."""
        self._executor.clean(cleanup)

    def stands(self, record: ClaimRecord) -> bool:
        """Whether the claim is prepared and everything that its steps made is there."""
        return self._executor.in_place(record)

    def end(self, uid: str) -> None:
        """Nothing is begun any more, or the caller goes on with it. The caller holds the claim's lock."""
        self._begun.pop(uid, None)

    def give_up(self, attempt: PrepareAttempt) -> None:
        """Take back what the attempt has begun, unless the claim is prepared or a later attempt goes on with it.

        Never raises a DraDriverError: the next Prepare or Unprepare takes back what cannot be taken back now.
        """
        uid = attempt.ref.uid
        if self._begun.get(uid) is not attempt:
            return
        try:
            with self._claim_locks.hold(uid, _LOCK_S) as guard:
                if self._begun.get(uid) is not attempt:
                    return
                self.end(uid)
                record = self._records.get(uid)
                if (
                    record is None
                    or record.phase == "prepared"
                    or guard.was_unprepared_since(attempt.call.began_ns)
                ):
                    return
                cleanup = self._executor.leave(record, attempt.begun)
            self._executor.clean(cleanup)
        except DraDriverError as error:
            tell_incomplete(uid, error)


def refuse_unprepared(guard: ClaimGuard, call: KubeletCall) -> None:
    """Raises: RetryableError if the claim was unprepared since the call began. If a pod still needs the claim, the
    kubelet has then begun another call."""
    if guard.was_unprepared_since(call.began_ns):
        raise RetryableError(
            "the claim was unprepared while this call was under way; the kubelet calls again if a pod still needs it"
        )
