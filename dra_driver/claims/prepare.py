"""Prepares one claim: plans, runs the steps, and answers the kubelet. While a device is in use, it waits and
retries.

A failed attempt removes the record that it wrote, unless the claim has been prepared or unprepared since, a
later attempt continues with the record, or a maintenance claim may still succeed. During an attempt the
record says `preparing`, so after a crash the next Prepare continues, and an Unprepare removes the record.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import structlog

from dra_driver.cdi.spec_step import ExtraDeviceFinder
from dra_driver.claims.calls import KubeletCall, PrepareAttempt
from dra_driver.claims.rules.holders import DeviceHeldError
from dra_driver.claims.rules.imex_channels import gets_channels
from dra_driver.claims.rules.plan import Identity, answer, lost_claim, plan_claim
from dra_driver.claims.specs_without_record import SpecsWithoutRecord
from dra_driver.claims.waiting import NOT_NOW, Waiter
from dra_driver.errors import (
    ClaimRefusedError,
    DeviceLostError,
    DraDriverError,
    NvmlTransientError,
    NvmlUnavailableError,
    RetryableError,
)
from dra_driver.inventory.discovery import Discovery
from dra_driver.journal.cleaner import Cleaner
from dra_driver.journal.executor import Executor
from dra_driver.journal.records import ClaimGuard, RecordStore
from dra_driver.journal.rules.cleanups import PendingCleanup
from dra_driver.mig.layouts import NodeLayouts
from dra_driver.model.claim import AllocatedClaim, ClaimRef, DeviceResult, Prepared
from dra_driver.model.dataclass import dataclass
from dra_driver.model.inventory import Inventory, OfferedDevice
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord

_log = structlog.get_logger(__name__)

_SCAN_WAIT_S = 10.0
_CHECK_S = 1.0
_LOCK_S = 5.0
_PREPARED_WAIT_S = 5.0
"""How long a Prepare of a prepared claim, whose pod has its devices, waits for the lanes."""


@dataclass(eq=False)
class ClaimPlanner:
    """Takes no lock and changes nothing.

    `setting_for_lost` returns the setting that would keep new pods away from lost GPUs; None if they already
    stay away.
    """

    identity: Identity
    discovery: Discovery
    records: RecordStore
    without_record: SpecsWithoutRecord
    extra_devices: ExtraDeviceFinder
    setting_for_lost: Callable[[], str | None]

    def find_devices(self, claim: AllocatedClaim, call: KubeletCall) -> None:
        """Scan again unless the last scan found all devices. A MIG device may be new, or the NVIDIA driver
        just loaded.
        """
        known = self.discovery.inventory
        is_known = known is not None and all(result.device in known.by_name for result in claim.results)
        if self.discovery.unavailable() is not None or not is_known:
            self.rescan(call)

    def plan(self, claim: AllocatedClaim, known: ClaimRecord | None) -> Plan:
        """Return the plan of a claim whose record is `known`.

        Raises: like `plan_claim`; NvmlUnavailableError; RetryableError if the NVIDIA driver has no IMEX
        channels.
        """
        inventory = self._inventory()
        plan = plan_claim(
            claim,
            inventory,
            self.identity,
            self._others(claim, inventory),
            known,
            self.setting_for_lost() if inventory.lost_uuids else None,
        )
        if plan.has_extra_devices:
            self.extra_devices.check(plan)
        return plan

    def refuse_unready_imex(
        self, claim: AllocatedClaim, known: ClaimRecord | None, call: KubeletCall
    ) -> None:
        """Check IMEX, if the claim gets a channel and is not prepared. Hold no lock, because nvidia-imex may
        be slow.

        Raises: RetryableError if the fabric or nvidia-imex is not ready.
        """
        is_prepared = known is not None and known.phase == "prepared" and known.claim == claim
        if self.identity.extra_devices.imex is None or is_prepared:
            return
        if any(device.gpu.unready_fabric is not None for _, device in self._used(claim)):
            self.rescan(call)
        if any([gets_channels(*pair) for pair in self._used(claim)]):
            self.extra_devices.refuse_unready_imex(call.left())

    def rescan(self, call: KubeletCall) -> None:
        self.discovery.scan_now(min(call.left(), _SCAN_WAIT_S))

    def reopen_nvml(self, ref: ClaimRef) -> bool:
        """Let NVML open again if an attempt for this claim closed it; return whether that was so. The caller
        holds the claim's lock. Raises: StateError.
        """
        detachments = self.discovery.detachments
        return detachments is not None and detachments.end_of(ref)

    def answer(self, claim: AllocatedClaim, made: Plan | ClaimRecord) -> Prepared:
        held = made.devices if isinstance(made, ClaimRecord) else made.held_devices()
        return answer(claim, self.identity.driver, made.steps, held)

    def _used(self, claim: AllocatedClaim) -> Iterator[tuple[DeviceResult, OfferedDevice]]:
        """Skip adminAccess, and devices of lost GPUs."""
        inventory = self._inventory()
        for result in claim.results:
            device = inventory.usable(result.device)
            if device is not None and not result.admin_access and device.gpu.uuid not in inventory.lost_uuids:
                yield result, device

    def _inventory(self) -> Inventory:
        problem = self.discovery.unavailable()
        inventory = self.discovery.inventory
        if problem is not None or inventory is None:
            raise NvmlUnavailableError(f"devices of this node are not usable now: {problem}")
        return inventory

    def _others(self, claim: AllocatedClaim, inventory: Inventory) -> Iterator[ClaimRecord]:
        """Yield the other records on the claim's GPUs, and substitutes for lost ones."""
        found = [inventory.usable(result.device) for result in claim.results]
        gpus = {device.gpu.uuid for device in found if device is not None}
        for uid, record in (self.records.all() if None in found else self.records.having(gpus)).items():
            if uid != claim.ref.uid:
                yield record
        if not self.records.quarantined():
            return
        for uid, devices in self.without_record.lost(self.records.all()).items():
            lost = lost_claim(uid, devices, inventory)
            if uid != claim.ref.uid and lost is not None:
                yield lost


@dataclass(eq=False)
class Preparer:
    """Holds no lock while it waits for the API server or a lane."""

    planner: ClaimPlanner
    records: RecordStore
    executor: Executor
    cleaner: Cleaner
    waiter: Waiter
    layouts: NodeLayouts | None

    def __post_init__(self) -> None:
        self._begun: dict[str, PrepareAttempt] = {}
        """By claim UID: the last attempt that wrote the record, which must roll the claim back. Changed under
        the claim's lock, so an attempt that cannot take the lock at its end stays here.
        """

    def prepare(self, attempt: PrepareAttempt) -> tuple[Prepared, ClaimRecord | None]:
        """Return the answer and the record, None if the claim has no device of this driver.

        Raises: the error that prevents the Prepare now, after rolling the claim back.
        """
        try:
            return self._prepare_until_free(attempt)
        except Exception as error:
            self.give_up(attempt, error)
            raise
        finally:
            attempt.has_ended = True

    def _prepare_until_free(self, attempt: PrepareAttempt) -> tuple[Prepared, ClaimRecord | None]:
        has_looked = False
        while True:
            try:
                return self._prepare_once(attempt)
            except NOT_NOW as error:
                if not isinstance(error, NvmlTransientError):
                    self.give_up(attempt, error)
                self.waiter.wait(attempt, error)
            except (NvmlUnavailableError, DeviceLostError):
                # Discovery may not have noticed that the NVIDIA driver was loaded or that the GPU is back. A
                # rescan takes a moment; the kubelet would retry only after a minute.
                reopened = self._reopen_nvml(attempt)
                if has_looked or not (reopened or self.planner.discovery.unavailable() is None):
                    raise
                has_looked = True
                self.planner.rescan(attempt.call)

    def _reopen_nvml(self, attempt: PrepareAttempt) -> bool:
        """Open NVML again if a call that crashed closed it for this claim and no other call works on the
        claim.

        Raises: StateError; RetryableError.
        """
        with self.records.locks.hold(attempt.ref.uid, _LOCK_S):
            other = self._begun.get(attempt.ref.uid, attempt)
            is_taken = other is not attempt and not other.has_ended
            return not is_taken and not self._was_prepared(attempt) and self.planner.reopen_nvml(attempt.ref)

    def _prepare_once(self, attempt: PrepareAttempt) -> tuple[Prepared, ClaimRecord | None]:
        """After an error, answer from the record if the claim was prepared in this boot and is still in
        place: its pod may be running, and keeps its other devices if one GPU is lost.
        """
        claim = attempt.claim
        try:
            plan, record = self._planned(attempt)
            prepared = self.planner.answer(claim, plan)
            return prepared, None if record is None else self.carry_out(attempt, plan, record)
        except DraDriverError as error:
            if not self._was_prepared(attempt):
                raise
            with self._lock(attempt, _CHECK_S) as guard:
                known = self.records.get(attempt.ref.uid)
                if known is None or known.claim != claim or not self.executor.in_place(known):
                    raise
                guard.note_prepared(attempt.call.began_ns)
                _log.warning("prepared_claim_not_checked", claim_uid=attempt.ref.uid, reason=str(error))
                return self.planner.answer(claim, known), known

    @contextmanager
    def _lock(
        self, attempt: PrepareAttempt, timeout_s: float, is_cancelled: Callable[[], bool] | None = None
    ) -> Iterator[ClaimGuard]:
        """Raise RetryableError if the claim was unprepared since the call began. If a pod still needs the
        claim, the kubelet has started another call.
        """
        with self.records.locks.hold(attempt.ref.uid, timeout_s, is_cancelled) as guard:
            if guard.was_unprepared_since(attempt.call.began_ns):
                raise RetryableError(
                    "the claim was unprepared during this call; the kubelet retries if a pod still needs the claim"
                )
            yield guard

    def _was_prepared(self, attempt: PrepareAttempt) -> bool:
        known = self.records.get(attempt.ref.uid)
        return known is not None and known.claim == attempt.claim and known.phase == "prepared"

    def _planned(self, attempt: PrepareAttempt) -> tuple[Plan, ClaimRecord | None]:
        """Run the pending cleanups first. A claim without devices has no record."""
        tried: set[str] = set()
        while True:
            with ExitStack() as unlocked:
                plan, record, pending = self._planned_once(attempt, tried, unlocked)
            if plan is None:
                continue
            if not pending:
                return plan, record
            tried.update(one.name for one in pending)
            self.cleaner.clean_before(pending, plan.used_devices())
            attempt.call.left()

    def _planned_once(
        self, attempt: PrepareAttempt, tried: Collection[str], unlocked: ExitStack
    ) -> tuple[Plan | None, ClaimRecord | None, Sequence[PendingCleanup]]:
        """Plan and write the record under both locks, or return the cleanups that must run first.

        The plan is None if another call changed the record. The caller closes `unlocked` without the locks,
        which undoes the other steps of an earlier allocation.
        """
        uid, call, claim = attempt.ref.uid, attempt.call, attempt.claim
        known = self.records.get(uid)
        if claim.results or known is not None:
            # Both calls may wait: for discovery, and for nvidia-imex. Hold no lock, so that an Unprepare does not have
            # to wait too.
            self.planner.find_devices(claim, call)
            self.planner.refuse_unready_imex(claim, known, call)
        with self._lock(attempt, call.left(), call.is_cancelled):
            if self.records.get(uid) != known:
                return None, None, ()
            if not claim.results and known is None:
                return Plan(claim, (), ()), None, ()
            with self.records.planning.hold(call.left(), call.is_cancelled):
                try:
                    plan = self.planner.plan(claim, known)
                except ClaimRefusedError as error:
                    if known is not None and _releases(attempt, known, error):
                        self._end(known, unlocked)
                    raise
                self.cleaner.ledger.refuse_newer(plan.used_gpus)
                if self.layouts is not None:
                    self.layouts.refuse_changing(plan.used_gpus)
                if known is not None and known.devices != plan.held_devices():
                    self._end(known, unlocked)
                    known = None
                if known is None or known.phase != "prepared":
                    pending = self.cleaner.ledger.pending_before(plan.used_gpus, tried)
                    if pending:
                        return plan, None, pending
                call.left()
                return plan, self.begin(attempt, plan, known), ()

    def _end(self, known: ClaimRecord, unlocked: ExitStack) -> None:
        unlocked.callback(self.executor.undo_rest, known.ref.uid)
        self._remove(known)

    def _remove(self, record: ClaimRecord) -> None:
        self.executor.remove(record.ref, record)
        self.waiter.wake()

    # --- the steps of an attempt ---------------------------------------------------------------

    def begin(self, attempt: PrepareAttempt, plan: Plan, known: ClaimRecord | None) -> ClaimRecord | None:
        """Write the record before the steps run. The caller holds the claim's lock. Raises: StateError."""
        if not plan.devices:
            return None
        record = self.executor.intend(plan, known)
        if record.phase != "prepared":
            self._begun[attempt.ref.uid] = attempt
        return record

    def carry_out(self, attempt: PrepareAttempt, plan: Plan, record: ClaimRecord) -> ClaimRecord:
        """Run the plan's steps; return the final record.

        The caller holds no lock, and calls `give_up` after an error unless it retries. Raises: the error of a
        step; RetryableError if the claim was unprepared or changed during the steps.
        """
        left = attempt.call.left()
        self.executor.change(
            plan, record, min(left, _PREPARED_WAIT_S) if record.phase == "prepared" else left
        )
        with self._lock(attempt, _LOCK_S) as guard:
            done = self.executor.complete(plan, record)
            self._begun.pop(attempt.ref.uid, None)
            guard.note_prepared(attempt.call.began_ns)
            return done

    def give_up(self, attempt: PrepareAttempt, error: Exception) -> None:
        """Roll the claim back, unless it is prepared or a later attempt continues with it. A maintenance
        claim that may succeed later keeps its record, so that no other claim gets its GPUs, but NVML is
        opened again.

        Never raises a DraDriverError: the next Prepare or Unprepare handles the rest.
        """
        uid = attempt.ref.uid
        if self._begun.get(uid) is not attempt:
            return
        try:
            with self.records.locks.hold(uid, _LOCK_S):
                if self._begun.get(uid) is not attempt:
                    return
                self._begun.pop(uid, None)
                record = self.records.get(uid)
                if record is None or record.phase == "prepared":
                    return
                if record.maintenance is not None and isinstance(error, RetryableError):
                    self.planner.reopen_nvml(attempt.ref)
                    return
                self._remove(record)
            self.executor.undo_rest(uid)
        except DraDriverError as left:
            _log.error(
                "rollback_incomplete",
                claim_uid=uid,
                reason=str(left),
                remedy="the record is kept; the next Prepare or Unprepare of the claim continues from it",
            )


def _releases(attempt: PrepareAttempt, known: ClaimRecord, error: ClaimRefusedError) -> bool:
    """Whether a refused claim must release its devices. Otherwise two claims that swap devices would wait for
    each other forever, and the GPUs of a maintenance claim would stay withdrawn.
    """
    if known.maintenance is not None:
        return known.phase != "prepared"
    allocated = frozenset(result.device for result in attempt.claim.results)
    is_held = isinstance(error, DeviceHeldError) and attempt.waits_since is not None
    return is_held and not known.is_within(allocated)
