"""The parts of a claim's life, put together: fetch, waiting line, prepare, unprepare, reconciler."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from dra_driver.cdi.extra_devices import ExtraDeviceFinder
from dra_driver.claims.fetch import ClaimFetch, RecordedPods
from dra_driver.claims.gpu_processes import GpuProcesses
from dra_driver.claims.kubelet_call import Observer
from dra_driver.claims.planner import ClaimPlanner, Identity
from dra_driver.claims.prepare import Preparer
from dra_driver.claims.reconciler import Reconciler, Rhythm
from dra_driver.claims.service import ClaimService
from dra_driver.claims.specs_without_record import SpecsWithoutRecord
from dra_driver.claims.unprepare import Unpreparer
from dra_driver.claims.waiting_line import WaitingLine, WaitTimeouts
from dra_driver.inventory.discovery import Discovery
from dra_driver.journal.cleanups import Cleaner
from dra_driver.journal.executor import Executor
from dra_driver.journal.locks import ClaimLocks, GpuLocks
from dra_driver.journal.records import RecordStore
from dra_driver.kube.claims import ClaimClient
from dra_driver.model.record import ClaimRecord


@dataclass(frozen=True, slots=True)
class ClaimParts:
    """`service` serves the kubelet; other parts of the daemon that look at claims use the other fields."""

    service: ClaimService
    preparer: Preparer
    unpreparer: Unpreparer
    reconciler: Reconciler
    line: WaitingLine


def claim_parts(
    identity: Identity,
    *,
    lookup: ClaimClient,
    discovery: Discovery,
    records: RecordStore,
    without_record: SpecsWithoutRecord,
    claim_locks: ClaimLocks,
    planning: GpuLocks,
    executor: Executor,
    cleaner: Cleaner,
    users: GpuProcesses,
    observer: Observer,
    make_sure: Callable[[], object],
    pods_run: Callable[[ClaimRecord], bool | None],
    setting_for_lost: Callable[[], str | None],
    extra_devices: ExtraDeviceFinder,
    timeouts: WaitTimeouts,
    rhythm: Rhythm,
    refuse_changing: Callable[[Collection[str]], None] | None = None,
) -> ClaimParts:
    """Make the parts; none runs yet. `planning` are locks on GPUs that are held for files only. `make_sure` raises a
    DraDriverError unless the API server knows this node. `pods_run` returns whether a process of a claim's pods runs
    here, None if that is not known. `setting_for_lost` returns what to set so that new pods stay away from lost GPUs,
    None if they do. `refuse_changing` is the `Preparer`'s."""
    line = WaitingLine(lookup, records, identity.driver, users, timeouts)
    unpreparer = Unpreparer(records, claim_locks, executor, line, observer)
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
    line.tell_leaving(reconciler.look_soon)
    planner = ClaimPlanner(identity, discovery, records, without_record, extra_devices, setting_for_lost)
    preparer = Preparer(planner, records, claim_locks, planning, executor, cleaner, line, refuse_changing)
    service = ClaimService(ClaimFetch(lookup, records, identity.driver), preparer, unpreparer, line, observer)
    return ClaimParts(service, preparer, unpreparer, reconciler, line)
