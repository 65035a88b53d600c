"""Serves the kubelet's calls, each claim of a call independently, and creates the objects that do the work."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import structlog
from structlog.contextvars import bound_contextvars

from dra_driver.base.deadline import until
from dra_driver.base.threads import run_in_parallel
from dra_driver.cdi.spec_step import ExtraDeviceFinder
from dra_driver.claims.calls import (
    CLAIMS_AT_ONCE,
    CallsUnderWay,
    ClaimFetch,
    KubeletCall,
    Observer,
    failed,
)
from dra_driver.claims.gpu_processes import GpuProcesses
from dra_driver.claims.prepare import ClaimPlanner, Identity, Preparer
from dra_driver.claims.reconciler import Reconciler, Rhythm
from dra_driver.claims.specs_without_record import SpecsWithoutRecord
from dra_driver.claims.unprepare import Unpreparer
from dra_driver.claims.waiting import PrepareAttempt, Waiter, WaitTimeouts
from dra_driver.inventory.discovery import Discovery
from dra_driver.journal.cleaner import Cleaner
from dra_driver.journal.executor import Executor
from dra_driver.journal.locks import ClaimLocks, PlanningLock
from dra_driver.journal.records import RecordStore
from dra_driver.kube.claims import ClaimClient
from dra_driver.mig.layouts import NodeLayouts
from dra_driver.model.claim import ClaimRef, PrepareOutcome, UnprepareOutcome
from dra_driver.model.record import ClaimRecord

_log = structlog.get_logger(__name__)

T = TypeVar("T")


@dataclass(eq=False)
class ClaimService:
    """Serves the kubelet. The claims of a call are processed in parallel: a claim that fails or waits does not affect
    the others.
    """

    fetch: ClaimFetch
    preparer: Preparer
    unpreparer: Unpreparer
    waiter: Waiter
    calls: CallsUnderWay
    observer: Observer

    def prepare(
        self,
        claims: Sequence[ClaimRef],
        deadline_s: float | None,
        is_cancelled: Callable[[], bool] | None = None,
    ) -> Mapping[str, PrepareOutcome]:
        """Return an outcome for each claim, by UID."""
        call = KubeletCall.begin(deadline_s, is_cancelled)
        with self.observer.in_flight("prepare", claims), ExitStack() as under_way:
            for ref in claims:
                under_way.enter_context(self.calls.calling("prepare", ref.uid))
            return _each(self._prepare_one, claims, call)

    def unprepare(
        self,
        claims: Sequence[ClaimRef],
        deadline_s: float | None,
        is_cancelled: Callable[[], bool] | None = None,
    ) -> Mapping[str, UnprepareOutcome]:
        """Return the outcome of `Unpreparer.unprepare` for each claim, by UID."""
        with self.observer.in_flight("unprepare", claims):
            return _each(self.unpreparer.unprepare, claims, KubeletCall.begin(deadline_s, is_cancelled))

    def _prepare_one(self, ref: ClaimRef, call: KubeletCall) -> PrepareOutcome:
        started = time.monotonic()
        try:
            attempt = PrepareAttempt(ref, call, self.fetch.allocated(ref, call))
            try:
                prepared, record = self.preparer.prepare(attempt)
            finally:
                if attempt.waits_since is not None:
                    self.observer.waited(ref, self.waiter.waited_s(attempt))
        except Exception as error:  # noqa: BLE001  a bug in one claim must not fail the others
            return failed(self.observer, "prepare", ref, time.monotonic() - started, error)
        duration = time.monotonic() - started
        # The record may be older than the claim that was just read.
        self.observer.prepared(ref, duration, record and replace(record, claim=attempt.claim))
        _log.info(
            "claim_prepared",
            claim=f"{ref.namespace}/{ref.name}",
            claim_uid=ref.uid,
            devices=[device.device for device in prepared.devices],
            duration_s=round(duration, 4),
        )
        return prepared


def _each(
    work: Callable[[ClaimRef, KubeletCall], T], claims: Sequence[ClaimRef], call: KubeletCall
) -> dict[str, T]:
    """Run `work` for each claim in parallel; returns the results by UID."""

    def one(ref: ClaimRef) -> T:
        with bound_contextvars(claim_uid=ref.uid):
            return work(ref, call)

    with until(call.deadline):
        outcomes = run_in_parallel([partial(one, ref) for ref in claims], CLAIMS_AT_ONCE)
    return {ref.uid: outcome.result() for ref, outcome in zip(claims, outcomes, strict=True)}


class ClaimLifecycle:
    """`service` serves the kubelet; other parts of the daemon use the other fields.

    `pods_run` returns whether a process of a claim's pods runs on this node; None if unknown. `find_node`
    raises a DraDriverError unless the API server knows this node. `setting_for_lost` returns the setting that
    would keep new pods away from lost GPUs; None if they already stay away. `layouts` is None on a node without
    MIG layouts.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        discovery: Discovery,
        records: RecordStore,
        locks: ClaimLocks,
        planning: PlanningLock,
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
        """Create the parts without starting them."""
        driver = identity.driver
        self.calls = CallsUnderWay()
        self.waiter = Waiter(lookup, records, driver, users, self.calls, timeouts or WaitTimeouts())
        self.unpreparer = Unpreparer(records, locks, executor, self.calls, observer)
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
        self.waiter.on_leaving(self.reconciler.check_soon)
        planner = ClaimPlanner(identity, discovery, records, without_record, extra_devices, setting_for_lost)
        self.preparer = Preparer(planner, records, locks, planning, executor, cleaner, self.waiter, layouts)
        fetch = ClaimFetch(lookup, records, driver)
        self.service = ClaimService(fetch, self.preparer, self.unpreparer, self.waiter, self.calls, observer)
