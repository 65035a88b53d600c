"""The steps of an attempt: carried out, taken back, and left half done until the NVIDIA driver can do the next one.

    (nothing) ──refused for now──▶ begun by this attempt ──a later attempt is refused too──▶ begun by the later one
        ▲                                   │
        ├── the claim was prepared, failed or was unprepared: nothing is left to take back
        └── the attempt gives up, or waits for another claim: it takes back what the record names

Meanwhile the claim's record says `preparing` and no lock is held. So a crash leaves the same as a crash during a step:
the next Prepare goes on with the record, and an Unprepare takes it back.
"""

from __future__ import annotations

from dra_driver.claims.waiting_line import PrepareAttempt
from dra_driver.errors import DraDriverError, NvmlTransientError
from dra_driver.journal.claim_locks import ClaimLocks
from dra_driver.journal.debts import DebtKeeper
from dra_driver.journal.executor import Executor, tell_incomplete
from dra_driver.journal.gpu_locks import GpuLocks, HeldGpus
from dra_driver.journal.records import RecordStore
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord

_GIVE_UP_S = 5.0


class AttemptSteps:
    """Carries out the plans of attempts. It knows which attempt must take back what was begun: the last one of the
    claim in this process that was refused.

    An attempt in the other instance of a rolling update may find the record gone between two tries; it then starts from
    the beginning.
    """

    def __init__(
        self,
        records: RecordStore,
        executor: Executor,
        claim_locks: ClaimLocks,
        gpu_locks: GpuLocks,
        keeper: DebtKeeper,
    ) -> None:
        self._records = records
        self._executor = executor
        self._claim_locks = claim_locks
        self._gpu_locks = gpu_locks
        self._keeper = keeper
        self._begun: dict[str, PrepareAttempt] = {}  # by claim UID; changed under the claim's lock

    def carry_out(
        self, attempt: PrepareAttempt, plan: Plan, known: ClaimRecord | None, held: HeldGpus
    ) -> ClaimRecord | None:
        """Do the plan's steps; returns the claim's record, None for a claim without devices. `known` is the record
        before. If the NVIDIA driver refuses for now, what was done stays for the next try. The caller holds the claim's
        lock; `held` are those of the plan's GPUs. Raises: what a step raised."""
        self.end(attempt.ref.uid)
        if known is not None and known.devices != plan.held_devices():
            self._executor.take_back(known, held)
            self.settle(plan, held)  # of what could not be taken back
            known = None
        try:
            return self._executor.carry_out(plan, known, held, tries_again=True) if plan.devices else None
        except NvmlTransientError:
            self._begun[attempt.ref.uid] = attempt
            raise

    def settle(self, plan: Plan, held: HeldGpus) -> None:
        """Have what ended claims owe on the plan's devices paid. `held` are the locks of the GPUs."""
        used = [device.offered for device in plan.devices if not device.result.admin_access]
        self._keeper.settle(used, plan.steps, held)

    def stands(self, record: ClaimRecord) -> bool:
        """Whether the claim is prepared and everything that its steps made is there."""
        return self._executor.in_place(record)

    def give_back(self, known: ClaimRecord, allocated: frozenset[str], held: HeldGpus) -> None:
        """A waiting claim keeps no devices of an earlier allocation: two claims that swap devices would wait for each
        other for ever. `allocated` are the names of its devices now. `held` are the locks of the GPUs."""
        if any(device.device not in allocated for device in known.devices):
            self._executor.take_back(known, held)

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
            with self._claim_locks.hold(uid, _GIVE_UP_S) as guard:
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
                with self._gpu_locks.hold(record.locked_gpus, _GIVE_UP_S) as held:
                    self._executor.roll_back(record, held)
        except DraDriverError as error:
            tell_incomplete(uid, error)
