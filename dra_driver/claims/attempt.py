"""One call of the kubelet, one attempt to prepare a claim that it names, all calls under way in this process, and the
attempts that are half done.

A half-done prepare has done some steps, and waits until the NVIDIA driver can do the next one.

    (nothing) ──refused for now──▶ begun by this attempt ──a later attempt is refused too──▶ begun by the later one
        ▲                                   │
        ├── the claim was prepared, failed or was unprepared: nothing is left to take back
        └── the attempt gives up, or waits for another claim: it takes back what the record names

Meanwhile the claim's record says `preparing` and no lock is held. So a crash leaves the same as a crash during a step:
the next Prepare goes on with the record, and an Unprepare takes it back.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from dra_driver.errors import DraDriverError, RetryableError
from dra_driver.journal.claim_locks import ClaimLocks
from dra_driver.journal.executor import Executor, tell_incomplete
from dra_driver.journal.gpu_locks import GpuLocks
from dra_driver.journal.records import RecordStore
from dra_driver.model.claim import AllocatedClaim, ClaimRef
from dra_driver.model.record import HeldDevice

CLAIMS_AT_ONCE = 16
"""How many claims of one call are worked on at the same time."""
KUBELET_DEADLINE_S = 45.0
_ANSWER_BEFORE_S = 2.0
"""The kubelet drops an answer that comes after its deadline, and with it the reason."""
_KNOWN_CLAIMS_API_S = 3.0
_GIVE_UP_S = 5.0


@dataclass(frozen=True, slots=True)
class KubeletCall:
    """A call of the kubelet. It began at `began_ns` (time.monotonic_ns()); an answer after `deadline`
    (time.monotonic()) comes too late. `has_left` answers whether the kubelet has cancelled the call; None if nobody
    can."""

    began_ns: int
    deadline: float
    has_left: Callable[[], bool] | None = None

    @classmethod
    def begin(cls, deadline_s: float | None, has_left: Callable[[], bool] | None = None) -> KubeletCall:
        """A call that begins now; the caller waits `deadline_s` seconds for the answer; None, and more than the
        kubelet ever waits, mean the kubelet's time."""
        seconds = KUBELET_DEADLINE_S if deadline_s is None else min(deadline_s, KUBELET_DEADLINE_S)
        return cls(time.monotonic_ns(), time.monotonic() + seconds - _ANSWER_BEFORE_S, has_left)

    def left(self) -> float:
        """Seconds until an answer comes too late. Raises: RetryableError if it is too late now, or the kubelet
        cancelled the call."""
        if self.has_left is not None and self.has_left():
            raise RetryableError(
                "the kubelet cancelled this call; it calls again if a pod still needs the claim"
            )
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise RetryableError("the kubelet's deadline is over; the kubelet calls again")
        return left

    def left_for_known(self) -> float:
        """Seconds that the API server may take for claims that can be served without it, because a record has them. All
        such claims of the call share this time."""
        spent = (time.monotonic_ns() - self.began_ns) / 1e9
        return max(0.05, min(self.left(), _KNOWN_CLAIMS_API_S - spent))


@dataclass(slots=True, eq=False)
class PrepareAttempt:
    """One attempt to prepare one claim. Every part of Prepare gets this object, from the fetch to the answer.

    `claim` is our part of the claim.

    The other fields belong to the waiting line. `number` is the attempt's number in the line, None before it joins.
    `wanted` has the devices that the claim wants. `waits_since`, `busy_since` and `refused_since` are times of the
    line's clock. `leaving` has, by the UID of a holder, why it lets go of its devices, and until when this answer of
    the API server is good. `users` tells which processes computed on the first holder's devices at the last look.
    """

    ref: ClaimRef
    call: KubeletCall
    claim: AllocatedClaim
    number: int | None = None
    wanted: tuple[HeldDevice, ...] = ()
    waits_since: float | None = None
    busy_since: float | None = None
    refused_since: float | None = None
    refusals: int = 0
    withdrawn: bool = False
    leaving: dict[str, tuple[str, float]] = field(default_factory=dict)
    users: str | None = None


class CallsUnderWay:
    """What Prepare, Unprepare, the waiting line and the reconciler know of each other. For many threads.

    `changed` guards all of it. It is notified whenever a waiting attempt may be able to go on; `changes` counts these
    notifications.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.changes = 0
        self.line: list[PrepareAttempt] = []
        self._unpreparing: Counter[str] = Counter()
        self._preparing: Counter[str] = Counter()
        self._trying: Counter[str] = Counter()
        self._unfinished: dict[str, int] = {}

    def notify(self) -> None:
        """Wake every attempt that waits. The caller holds `changed`."""
        self.changes += 1
        self.changed.notify_all()

    @contextmanager
    def unpreparing(self, uid: str) -> Iterator[None]:
        """Within it the claim is being unprepared. Attempts that wait for its devices go on waiting; the end wakes
        them."""
        try:
            with self._counted(self._unpreparing, uid):
                yield
        finally:
            with self.changed:
                for attempt in self.line:
                    attempt.withdrawn |= attempt.ref.uid == uid
                self.notify()

    def is_unpreparing(self, uid: str) -> bool:
        """Whether an Unprepare of the claim is under way."""
        with self.changed:
            return self._unpreparing[uid] > 0

    @contextmanager
    def preparing(self, uid: str) -> Iterator[None]:
        """Within it the claim is being prepared, or waits for that."""
        with self._counted(self._preparing, uid):
            yield

    def is_preparing(self, uid: str) -> bool:
        """Whether a Prepare of the claim is under way, its fetch included."""
        with self.changed:
            return self._preparing[uid] > 0

    @contextmanager
    def trying(self, uid: str) -> Iterator[None]:
        """Within it an attempt, which has fetched the claim, tries to get its devices."""
        with self._counted(self._trying, uid):
            yield

    def is_trying(self, uid: str) -> bool:
        """Whether an attempt for the claim's devices is under way."""
        with self.changed:
            return self._trying[uid] > 0

    def note_unprepared(self, uid: str, unfinished_since_ns: int | None = None) -> None:
        """The kubelet's Unprepare of a claim ended. If it could not be finished, `unfinished_since_ns`
        (time.monotonic_ns()) is when it began: an attempt that waits for the claim's devices may then finish it."""
        with self.changed:
            self._unfinished.pop(uid, None)
            if unfinished_since_ns is not None:
                self._unfinished[uid] = unfinished_since_ns

    def note_prepared(self, uid: str) -> None:
        """The kubelet's Prepare of a claim succeeded: nobody may finish an earlier Unprepare of it any more."""
        with self.changed:
            self._unfinished.pop(uid, None)

    def unfinished(self, uid: str) -> int | None:
        """When the claim's unfinished Unprepare began (time.monotonic_ns()); None if there is none."""
        with self.changed:
            return self._unfinished.get(uid)

    @contextmanager
    def _counted(self, under_way: Counter[str], uid: str) -> Iterator[None]:
        with self.changed:
            under_way[uid] += 1
        try:
            yield
        finally:
            with self.changed:
                under_way[uid] -= 1
                if not under_way[uid]:
                    del under_way[uid]


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
