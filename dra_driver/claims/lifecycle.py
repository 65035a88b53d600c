"""The parts of a claim's life: fetch, plan, wait, prepare, unprepare, reconcile."""

from __future__ import annotations

from collections.abc import Callable, Collection

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
from dra_driver.claims.waiting import Waiter, WaitTimeouts
from dra_driver.inventory.discovery import Discovery
from dra_driver.journal.cleaner import Cleaner
from dra_driver.journal.executor import Executor
from dra_driver.journal.locks import ClaimLocks, GpuLocks
from dra_driver.journal.records import RecordStore
from dra_driver.kube.claims import ClaimClient
from dra_driver.model.record import ClaimRecord


class ClaimLifecycle:
    """`service` serves the kubelet; other parts of the daemon that look at claims use the other fields.

    `pods_run` returns whether a process of a claim's pods runs here, None if that is not known. `find_node` raises a
    DraDriverError unless the API server knows this node. `setting_for_lost` returns what to set so that new pods stay
    away from lost GPUs, None if they do. `refuse_changing` raises NvmlTransientError while the MIG layout changes one
    of the GPUs with these UUIDs; None on a node without layouts.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        discovery: Discovery,
        records: RecordStore,
        locks: ClaimLocks,
        planning: GpuLocks,
        without_record: SpecsWithoutRecord,
        executor: Executor,
        cleaner: Cleaner,
        lookup: ClaimClient,
        users: GpuProcesses,
        extra_devices: ExtraDeviceFinder,
        observer: Observer,
        pods_run: Callable[[ClaimRecord], bool | None],
        find_node: Callable[[], object],
        setting_for_lost: Callable[[], str | None],
        refuse_changing: Callable[[Collection[str]], None] | None,
        timeouts: WaitTimeouts | None = None,
    ) -> None:
        """Make the parts; none runs yet."""
        driver = identity.driver
        self.waiter = Waiter(lookup, records, driver, users, timeouts or WaitTimeouts())
        self.unpreparer = Unpreparer(records, locks, executor, self.waiter, observer)
        pods = RecordedPods(records, locks)
        self.reconciler = Reconciler(
            records,
            lookup,
            self.unpreparer,
            without_record,
            users,
            pods,
            driver,
            observer,
            find_node,
            pods_run,
            Rhythm(),
        )
        self.waiter.tell_leaving(self.reconciler.look_soon)
        planner = ClaimPlanner(identity, discovery, records, without_record, extra_devices, setting_for_lost)
        self.preparer = Preparer(
            planner, records, locks, planning, executor, cleaner, self.waiter, refuse_changing
        )
        fetch = ClaimFetch(lookup, records, driver)
        self.service = ClaimService(fetch, self.preparer, self.unpreparer, self.waiter, observer)
