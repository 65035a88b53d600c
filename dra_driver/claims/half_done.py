"""Half-done prepares: a Prepare has done some steps, and waits until the NVIDIA driver can do the next one.

    (nothing) ──refused for now──▶ begun by this attempt ──a later attempt is refused too──▶ begun by the later one
        ▲                                   │
        ├── the claim was prepared, failed or was unprepared: nothing is left to take back
        └── the attempt gives up, or waits for another claim: it takes back what the record names

Meanwhile the claim's record says `preparing` and no lock is held. So a crash leaves the same as a crash during a step:
the next Prepare goes on with the record, and an Unprepare takes it back.
"""

from __future__ import annotations

from dra_driver.claims.attempt import PrepareAttempt
from dra_driver.errors import DraDriverError
from dra_driver.journal.claim_locks import ClaimLocks
from dra_driver.journal.executor import Executor, tell_incomplete
from dra_driver.journal.gpu_locks import GpuLocks
from dra_driver.journal.records import RecordStore

_GIVE_UP_S = 5.0


class HalfDonePrepares:
    """Which attempt must take back what was begun: the last one of the claim in this process that was refused.

    An attempt in the other instance of a rolling update may find the record gone between two tries; it then starts from
    the beginning.
    """

    def __init__(
        self, records: RecordStore, executor: Executor, claim_locks: ClaimLocks, gpu_locks: GpuLocks
    ) -> None:
        self._records = records
        self._executor = executor
        self._claim_locks = claim_locks
        self._gpu_locks = gpu_locks
        self._begun: dict[str, PrepareAttempt] = {}  # by claim UID; changed under the claim's lock

    def begin(self, attempt: PrepareAttempt) -> None:
        """The attempt was refused for now, and its record stays so that the next try goes on. The caller holds the
        claim's lock."""
        self._begun[attempt.ref.uid] = attempt

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
                with self._gpu_locks.hold(record.locked_gpus, _GIVE_UP_S):
                    self._executor.roll_back(record)
        except DraDriverError as error:
            tell_incomplete(uid, error)
