"""The parts of a claim's life, put together: fetch, waiter, prepare, unprepare, reconciler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from dra_driver.cdi.extra_devices import ExtraDeviceFinder
from dra_driver.claims.fetch import ClaimFetch, RecordedPods
from dra_driver.claims.gpu_processes import GpuProcesses
from dra_driver.claims.planner import ClaimPlanner, Identity
from dra_driver.claims.prepare import Preparer
from dra_driver.claims.reconciler import Reconciler, Rhythm
from dra_driver.claims.service import ClaimService
from dra_driver.claims.specs_without_record import SpecsWithoutRecord
from dra_driver.claims.unprepare import Unpreparer
from dra_driver.claims.waiting import Waiter, WaitTimeouts
from dra_driver.journal.executor import Executor
from dra_driver.kube.claims import ClaimClient
from dra_driver.kube.cluster import node_uid
from dra_driver.model.health import LOST
from dra_driver.model.record import ClaimRecord

if TYPE_CHECKING:
    from dra_driver.app.daemon import Driver


@dataclass(frozen=True, slots=True)
class ClaimParts:
    """`service` serves the kubelet; other parts of the daemon that look at claims use the other fields."""

    service: ClaimService
    preparer: Preparer
    unpreparer: Unpreparer
    reconciler: Reconciler
    waiter: Waiter


def claim_parts(
    driver: Driver,
    identity: Identity,
    *,
    lookup: ClaimClient,
    without_record: SpecsWithoutRecord,
    executor: Executor,
    users: GpuProcesses,
    pods_run: Callable[[ClaimRecord], bool | None],
    extra_devices: ExtraDeviceFinder,
    timeouts: WaitTimeouts | None = None,
) -> ClaimParts:
    """Make the parts; none runs yet. `pods_run` returns whether a process of a claim's pods runs here, None if that is
    not known."""
    records, locks, observer = driver.records, driver.claim_locks, driver.reporting.reporter
    waiter = Waiter(lookup, records, identity.driver, users, timeouts or WaitTimeouts())
    unpreparer = Unpreparer(records, locks, executor, waiter, observer)
    reconciler = Reconciler(
        records,
        lookup,
        unpreparer,
        without_record,
        users,
        RecordedPods(records, locks),
        identity.driver,
        observer,
        partial(node_uid, driver.client, driver.settings.node_name),
        pods_run,
        Rhythm(),
    )
    waiter.tell_leaving(reconciler.look_soon)
    planner = ClaimPlanner(
        identity,
        driver.discovery,
        records,
        without_record,
        extra_devices,
        lambda: driver.publishing.missing_setting(LOST),
    )
    preparer = Preparer(
        planner,
        records,
        locks,
        driver.planning,
        executor,
        driver.cleaner,
        waiter,
        driver.mig.refuse_changing(),
    )
    service = ClaimService(
        ClaimFetch(lookup, records, identity.driver), preparer, unpreparer, waiter, observer
    )
    return ClaimParts(service, preparer, unpreparer, reconciler, waiter)
