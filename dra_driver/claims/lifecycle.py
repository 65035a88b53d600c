"""Creates the objects that prepare and unprepare claims."""

from __future__ import annotations

from collections.abc import Callable

from dra_driver.cdi.spec_step import ExtraDeviceFinder
from dra_driver.claims.calls import Admission, CallsUnderWay, ClaimFetch, ClaimService, Observer
from dra_driver.claims.gpu_processes import GpuProcesses
from dra_driver.claims.prepare import ClaimPlanner, Preparer
from dra_driver.claims.reconciler import Reconciler, Rhythm
from dra_driver.claims.rules.plan import Identity
from dra_driver.claims.specs_without_record import SpecsWithoutRecord
from dra_driver.claims.unprepare import Unpreparer
from dra_driver.claims.waiting import Waiter, WaitTimeouts
from dra_driver.inventory.discovery import Discovery
from dra_driver.journal.cleaner import Cleaner
from dra_driver.journal.executor import Executor
from dra_driver.journal.records import RecordStore
from dra_driver.kube.claims import ClaimClient
from dra_driver.mig.layouts import NodeLayouts
from dra_driver.model.record import ClaimRecord


class ClaimLifecycle:
    """`service` serves the kubelet; other parts of the daemon use the other fields. `Reconciler` (with
    `find_node` as `check_node`) and `ClaimPlanner` describe the parameters.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        discovery: Discovery,
        records: RecordStore,
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
        layouts: NodeLayouts | None,
        timeouts: WaitTimeouts | None = None,
    ) -> None:
        driver = identity.driver
        self.calls = CallsUnderWay()
        self.admission = Admission()
        self.unpreparer = Unpreparer(records, executor, self.calls, observer)
        self.reconciler = Reconciler(
            records,
            lookup,
            self.unpreparer,
            without_record,
            users,
            driver,
            observer,
            find_node,
            pods_run,
            Rhythm(),
        )
        check_soon = self.reconciler.check_soon
        self.waiter = Waiter(
            lookup, records, driver, users, self.calls, check_soon, timeouts or WaitTimeouts()
        )
        planner = ClaimPlanner(identity, discovery, records, without_record, extra_devices, setting_for_lost)
        self.preparer = Preparer(planner, records, executor, cleaner, self.waiter, layouts)
        fetch = ClaimFetch(lookup, records, driver)
        self.service = ClaimService(
            self.admission, fetch, self.preparer.prepare, self.unpreparer.unprepare, self.calls, observer
        )
