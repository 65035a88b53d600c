"""Claims on which a Prepare has begun and waits for the NVIDIA driver to go on.

    (nothing) ──refused for now──▶ begun by this Prepare ──another one of the claim is refused too──▶ begun by that one
        ▲                                   │
        ├── prepared, failed or unprepared: whoever did that leaves nothing to take back
        └── its call gives up, or waits for something else: what the record says is taken back

While a claim is begun, its record is in `preparing` and no lock is held, so a crash leaves what one within a try
leaves: the next Prepare goes on with the record, an Unprepare takes it back.
"""

from __future__ import annotations

from dra_driver.errors import DraDriverError
from dra_driver.services.claimcalls import Records
from dra_driver.services.executor import Executor, tell_incomplete
from dra_driver.services.places import Place
from dra_driver.services.preparingports import ClaimLocks, Locks

_GIVE_UP_S = 5.0


class BegunClaims:
    """Whose it is to take back what was begun: of several Prepares of a claim in this process the last to try.

    A Prepare in the other instance of a rolling update may find its record gone between two tries, and begins anew.
    """

    def __init__(
        self, records: Records, executor: Executor, claim_locks: ClaimLocks, gpu_locks: Locks
    ) -> None:
        self._records = records
        self._executor = executor
        self._claim_locks = claim_locks
        self._gpu_locks = gpu_locks
        self._begun: dict[str, Place] = {}  # by claim UID; changed under the claim's lock

    def begin(self, place: Place) -> None:
        """A Prepare left a record to go on with. The caller holds the claim's lock."""
        self._begun[place.claim.ref.uid] = place

    def end(self, uid: str) -> None:
        """What was begun is done, or taken back. The caller holds the claim's lock."""
        self._begun.pop(uid, None)

    def give_up(self, place: Place, began_ns: int) -> None:
        """Take back what a Prepare, whose call began at `began_ns`, has begun, unless it is done or is another one's by
        now. Never raises a DraDriverError: what cannot be taken back is left for the next Prepare or Unprepare."""
        uid = place.claim.ref.uid
        if self._begun.get(uid) is not place:
            return
        try:
            with self._claim_locks.hold(uid, _GIVE_UP_S) as turn:
                if self._begun.get(uid) is not place:
                    return
                self.end(uid)
                record = self._records.get(uid)
                if record is None or record.phase == "prepared" or turn.was_unprepared_since(began_ns):
                    return
                with self._gpu_locks.hold(record.gpu_uuids, _GIVE_UP_S):
                    self._executor.roll_back(record)
        except DraDriverError as error:
            tell_incomplete(uid, error)
