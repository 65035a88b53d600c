"""The parts of a claim's life, put together: fetch, waiting line, prepare, unprepare, reconciler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dra_driver.cdi.companions import CompanionFinder
from dra_driver.claims.attempt import CallsUnderWay, HalfDonePrepares
from dra_driver.claims.consumers import RecordedPods
from dra_driver.claims.device_users import DeviceUsers
from dra_driver.claims.fetch import ClaimFetch, ClaimLookup
from dra_driver.claims.outcomes import Observer
from dra_driver.claims.prepare import Identity, Preparer
from dra_driver.claims.reconciler import Reconciler, Rhythm
from dra_driver.claims.specs_without_record import SpecsWithoutRecord
from dra_driver.claims.unprepare import Unpreparer
from dra_driver.claims.waiting_line import WaitingLine, WaitTimeouts
from dra_driver.inventory.discovery import Discovery
from dra_driver.journal.claim_locks import ClaimLocks
from dra_driver.journal.debts import DebtKeeper
from dra_driver.journal.executor import Executor
from dra_driver.journal.gpu_locks import GpuLocks
from dra_driver.journal.records import RecordStore
from dra_driver.model.record import ClaimRecord


@dataclass(frozen=True, slots=True)
class ClaimParts:
    """`preparer` serves the kubelet; other parts of the daemon that look at claims use the other fields."""

    preparer: Preparer
    unpreparer: Unpreparer
    reconciler: Reconciler
    line: WaitingLine
    under_way: CallsUnderWay


def claim_parts(
    identity: Identity,
    *,
    lookup: ClaimLookup,
    discovery: Discovery,
    records: RecordStore,
    without_record: SpecsWithoutRecord,
    claim_locks: ClaimLocks,
    gpu_locks: GpuLocks,
    executor: Executor,
    keeper: DebtKeeper,
    users: DeviceUsers,
    observer: Observer,
    make_sure: Callable[[], object],
    pods_run: Callable[[ClaimRecord], bool | None],
    setting_for_lost: Callable[[], str | None],
    companions: CompanionFinder,
    timeouts: WaitTimeouts,
    rhythm: Rhythm,
) -> ClaimParts:
    """Make the parts; none runs yet. `make_sure` raises a DraDriverError unless the API server knows this node.
    `pods_run` answers whether a process of a claim's pods runs here, None if that is not known. `setting_for_lost`
    answers what to set so that new pods stay away from lost GPUs, None if they do."""
    under_way = CallsUnderWay()
    half_done = HalfDonePrepares(records, executor, claim_locks, gpu_locks)
    unpreparer = Unpreparer(records, claim_locks, gpu_locks, executor, half_done, under_way, observer)
    reconciler = Reconciler(
        records,
        lookup,
        unpreparer,
        without_record,
        users,
        RecordedPods(records, claim_locks),
        identity.driver,
        observer,
        make_sure,
        pods_run,
        rhythm,
    )
    line = WaitingLine(under_way, lookup, records, identity.driver, reconciler, users, timeouts)
    preparer = Preparer(
        identity,
        ClaimFetch(lookup, records, identity.driver),
        discovery,
        records,
        without_record,
        claim_locks,
        gpu_locks,
        executor,
        keeper,
        half_done,
        under_way,
        line,
        unpreparer,
        observer,
        setting_for_lost,
        companions,
    )
    return ClaimParts(preparer, unpreparer, reconciler, line, under_way)
