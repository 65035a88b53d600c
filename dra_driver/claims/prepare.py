"""NodePrepareResources: fetch the claim, wait in line, lock, plan, execute, answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TypeGuard

import structlog
from structlog.contextvars import bound_contextvars

from dra_driver.cdi.companions import CompanionFinder
from dra_driver.claims.attempt import (
    CLAIMS_AT_ONCE,
    CallsUnderWay,
    HalfDonePrepares,
    KubeletCall,
    PrepareAttempt,
)
from dra_driver.claims.fetch import ClaimFetch
from dra_driver.claims.outcomes import Observer, failed
from dra_driver.claims.rules.companions import gets_channels
from dra_driver.claims.rules.conflicts import DeviceHeldError
from dra_driver.claims.rules.plan import answer, lost_claim, plan_claim
from dra_driver.claims.specs_without_record import SpecsWithoutRecord
from dra_driver.claims.unprepare import Unpreparer
from dra_driver.claims.waiting_line import WAITED_FOR, WaitingLine
from dra_driver.concurrency.deadline import until
from dra_driver.concurrency.side_by_side import side_by_side
from dra_driver.errors import (
    DeviceLostError,
    DraDriverError,
    NvmlTransientError,
    NvmlUnavailableError,
    RetryableError,
)
from dra_driver.inventory.discovery import Discovery
from dra_driver.journal.claim_locks import ClaimGuard, ClaimLocks
from dra_driver.journal.debts import DebtKeeper
from dra_driver.journal.executor import Executor
from dra_driver.journal.gpu_locks import GpuLocks
from dra_driver.journal.records import RecordStore
from dra_driver.model.claim import (
    AllocatedClaim,
    ClaimRef,
    DeviceResult,
    Prepared,
    PrepareOutcome,
    UnprepareOutcome,
)
from dra_driver.model.companions import NO_COMPANIONS, Companions
from dra_driver.model.inventory import Inventory, OfferedDevice
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord
from dra_driver.model.sharing import NO_SHARING, SharingPolicy

_log = structlog.get_logger(__name__)

_SCAN_WAIT_S = 10.0
_FINISH_S = 5.0


@dataclass(frozen=True, slots=True)
class Identity:
    """Driver and pool name of this node's devices, how claims may share them, the versions of the metadata that
    containers get, and what they get beside their GPUs."""

    driver: str
    pool: str
    sharing: SharingPolicy = NO_SHARING
    metadata: tuple[str, ...] = ()
    companions: Companions = NO_COMPANIONS


class Preparer:
    """Serves the kubelet. Calls for different GPUs run at the same time; calls for one GPU run one after the other.

    No lock is held while the API server is asked.
    """

    def __init__(
        self,
        identity: Identity,
        fetch: ClaimFetch,
        discovery: Discovery,
        records: RecordStore,
        without_record: SpecsWithoutRecord,
        claim_locks: ClaimLocks,
        gpu_locks: GpuLocks,
        executor: Executor,
        keeper: DebtKeeper,
        half_done: HalfDonePrepares,
        under_way: CallsUnderWay,
        line: WaitingLine,
        unpreparer: Unpreparer,
        observer: Observer,
        setting_for_lost: Callable[[], str | None],
        companions: CompanionFinder,
    ) -> None:
        """`setting_for_lost` answers what to set so that new pods stay away from lost GPUs, None if they do."""
        self._identity = identity
        self._fetch = fetch
        self._discovery = discovery
        self._records = records
        self._without_record = without_record
        self._claim_locks = claim_locks
        self._gpu_locks = gpu_locks
        self._executor = executor
        self._keeper = keeper
        self._half_done = half_done
        self._under_way = under_way
        self._line = line
        self._unpreparer = unpreparer
        self._observer = observer
        self._setting_for_lost = setting_for_lost
        self._companions = companions

    def prepare(
        self,
        claims: Sequence[ClaimRef],
        deadline_s: float | None,
        has_left: Callable[[], bool] | None = None,
    ) -> Mapping[str, PrepareOutcome]:
        """An outcome for each claim. They are prepared side by side: one that fails or waits does not touch the
        others."""
        call = KubeletCall.begin(deadline_s, has_left)
        with until(call.deadline), ExitStack() as under_way:
            for ref in claims:
                under_way.enter_context(self._under_way.preparing(ref.uid))
            told = side_by_side([partial(self._told, ref, call) for ref in claims], CLAIMS_AT_ONCE)
        return {ref.uid: outcome.result() for ref, outcome in zip(claims, told, strict=True)}

    def unprepare(
        self,
        claims: Sequence[ClaimRef],
        deadline_s: float | None,
        has_left: Callable[[], bool] | None = None,
    ) -> Mapping[str, UnprepareOutcome]:
        """As `Unpreparer.unprepare`: the kubelet calls one service for both."""
        return self._unpreparer.unprepare(claims, KubeletCall.begin(deadline_s, has_left))

    def _told(self, ref: ClaimRef, call: KubeletCall) -> PrepareOutcome:
        with bound_contextvars(claim_uid=ref.uid):
            return self._outcome(ref, call)

    def _outcome(self, ref: ClaimRef, call: KubeletCall) -> PrepareOutcome:
        started = time.monotonic()
        try:
            prepared, record = self._tried(self._fetch.attempt(ref, call))
        except Exception as error:  # noqa: BLE001  a bug in one claim must not fail the others
            return failed(self._observer, "prepare", ref, time.monotonic() - started, error)
        self._under_way.note_prepared(ref.uid)
        duration = time.monotonic() - started
        self._observer.prepared(ref, duration, record)
        _log.info(
            "claim_prepared",
            claim=f"{ref.namespace}/{ref.name}",
            claim_uid=ref.uid,
            devices=[device.device for device in prepared.devices],
            duration_s=round(duration, 4),
        )
        return prepared

    def _tried(self, attempt: PrepareAttempt) -> tuple[Prepared, ClaimRecord | None]:
        """Try. While the holders of the devices are about to let go, wait and try again."""
        claim = attempt.claim
        has_looked = False
        with self._line.trying(attempt):
            try:
                while True:
                    try:
                        return self._try(attempt, claim)
                    except WAITED_FOR as error:
                        if not isinstance(error, NvmlTransientError):
                            self._half_done.give_up(attempt)
                        if not self._finished_one_of(error, attempt.call):
                            self._line.wait(attempt, error)
                    except (NvmlUnavailableError, DeviceLostError):
                        # Discovery may not have seen yet that the driver was loaded again or that the GPU is back.
                        # A look takes a moment; the kubelet would call again only after a minute.
                        if has_looked or self._discovery.unavailable() is not None:
                            raise
                        has_looked = True
                        self._discovery.scan_now(min(attempt.call.left(), _SCAN_WAIT_S))
            finally:
                self._half_done.give_up(attempt)  # while still in line for what this frees
                waited = self._line.waited_s(attempt)
                if waited is not None:
                    self._observer.waited(attempt.ref, waited)

    def _finished_one_of(self, error: DraDriverError, call: KubeletCall) -> bool:
        """Whether a holder is unprepared now whose Unprepare, called by the kubelet, could not be finished."""
        for conflict in error.conflicts if isinstance(error, DeviceHeldError) else ():
            ref = conflict.holder.ref
            since_ns = self._under_way.unfinished(ref.uid)
            if since_ns is None:
                continue
            try:
                if self._unpreparer.reclaim(ref, conflict.holder, since_ns, min(call.left(), _FINISH_S)):
                    return True
                self._under_way.note_unprepared(ref.uid)  # a newer Prepare wants the claim
            except DraDriverError as again:
                _log.info("unprepare_still_unfinished", claim_uid=ref.uid, reason=str(again))
        return False

    def _try(self, attempt: PrepareAttempt, claim: AllocatedClaim) -> tuple[Prepared, ClaimRecord | None]:
        """Lock, plan, execute, answer."""
        uid, call = attempt.ref.uid, attempt.call
        with self._claim_locks.hold(uid, call.left(), call.has_left) as guard:
            while True:
                _refuse_unprepared(guard, call)
                known = self._records.get(uid)
                if not claim.results and known is None:
                    return Prepared(()), None
                try:
                    gpus = self._gpus_of(claim, call)
                except NvmlUnavailableError:
                    # The pod may run while the NVIDIA driver is being replaced: it keeps what it has.
                    if self._stands(known, claim):
                        return self._as_recorded(known, guard, call)
                    raise
                if self._identity.companions.imex is not None:
                    self._refuse_unready_imex(claim, known, call)
                gpus |= known.locked_gpus if known else frozenset()
                with self._gpu_locks.hold(gpus, call.left(), call.has_left):
                    try:
                        plan = self._plan(attempt, claim, known)
                    except DeviceLostError:
                        # Its pod keeps the other devices of the claim too, whatever the GPU's taint does with the pod.
                        if self._stands(known, claim):
                            return self._as_recorded(known, guard, call)
                        raise
                    except DeviceHeldError:
                        if known is not None and attempt.number is not None:
                            self._give_back(known, claim)
                        raise
                    if not plan.locked_gpus <= gpus:
                        continue
                    if plan.has_companions:
                        self._companions.check(plan)
                    attempt.wanted = plan.held_devices()
                    self._settle(plan)
                    call.left()
                    prepared = answer(claim, self._identity.driver, plan.steps, plan.held_devices())
                    record = self._execute(attempt, plan, known)
                    guard.note_prepared(call.began_ns)
                    return prepared, record

    def _refuse_unready_imex(
        self, claim: AllocatedClaim, known: ClaimRecord | None, call: KubeletCall
    ) -> None:
        """Ask for the claims that get a channel, before the locks of GPUs: the daemon may take its time. A fabric that
        was not ready at the last look may be by now, so it is looked at again. A prepared claim keeps what it has.

        Raises: RetryableError if the fabric or the daemon is not ready.
        """
        if known is not None and known.phase == "prepared" and known.claim == claim:
            return
        if any(device.gpu.unready_fabric is not None for _, device in self._used(claim)):
            self._discovery.scan_now(min(call.left(), _SCAN_WAIT_S))
        if any([gets_channels(*pair) for pair in self._used(claim)]):
            self._companions.refuse_unready_imex(call.left())

    def _used(self, claim: AllocatedClaim) -> Iterator[tuple[DeviceResult, OfferedDevice]]:
        """The devices that the claim does more with than look, but for those of lost GPUs."""
        inventory = self._inventory()
        for result in claim.results:
            device = inventory.usable(result.device)
            if device is not None and not result.admin_access and device.gpu.uuid not in inventory.lost_uuids:
                yield result, device

    def _stands(self, known: ClaimRecord | None, claim: AllocatedClaim) -> TypeGuard[ClaimRecord]:
        return known is not None and known.claim == claim and self._executor.in_place(known)

    def _as_recorded(
        self, known: ClaimRecord, guard: ClaimGuard, call: KubeletCall
    ) -> tuple[Prepared, ClaimRecord]:
        guard.note_prepared(call.began_ns)
        return answer(known.claim, self._identity.driver, known.steps, known.devices), known

    def _execute(self, attempt: PrepareAttempt, plan: Plan, known: ClaimRecord | None) -> ClaimRecord | None:
        self._half_done.end(attempt.ref.uid)
        if known is not None and known.devices != plan.held_devices():
            self._executor.take_back(known)
            self._settle(plan)  # of what could not be taken back
            known = None
        try:
            return self._executor.carry_out(plan, known, tries_again=True) if plan.devices else None
        except NvmlTransientError:
            self._half_done.begin(attempt)
            raise

    def _settle(self, plan: Plan) -> None:
        """Have what ended claims owe on the plan's devices paid."""
        used = [device.offered for device in plan.devices if not device.result.admin_access]
        self._keeper.settle(used, plan.steps)

    def _give_back(self, known: ClaimRecord, claim: AllocatedClaim) -> None:
        """A waiting claim keeps no devices of an earlier allocation: two claims that swap devices would wait for each
        other for ever."""
        allocated = {result.device for result in claim.results}
        if any(held.device not in allocated for held in known.devices):
            self._executor.take_back(known)

    def _gpus_of(self, claim: AllocatedClaim, call: KubeletCall) -> frozenset[str]:
        """UUIDs of the GPUs whose locks the claim needs, as far as its devices are known; adminAccess needs none."""
        if self._discovery.unavailable() is not None or not self._knows_all(claim):
            # The devices may be newer than the last look: a MIG device made by hand, a driver loaded just now.
            self._discovery.scan_now(min(call.left(), _SCAN_WAIT_S))
        inventory = self._inventory()
        found = (inventory.usable(result.device) for result in claim.results if not result.admin_access)
        return frozenset(device.gpu.uuid for device in found if device is not None)

    def _plan(self, attempt: PrepareAttempt, claim: AllocatedClaim, known: ClaimRecord | None) -> Plan:
        inventory = self._inventory()
        identity = self._identity
        others = chain(self._others(claim, inventory), self._line.ahead_of(attempt))
        return plan_claim(
            claim,
            inventory,
            identity.pool,
            identity.driver,
            others,
            identity.sharing,
            known,
            identity.metadata,
            setting_for_lost=self._setting_for_lost,
            companions=identity.companions,
        )

    def _knows_all(self, claim: AllocatedClaim) -> bool:
        inventory = self._discovery.inventory
        return inventory is not None and all(result.device in inventory.by_name for result in claim.results)

    def _inventory(self) -> Inventory:
        problem = self._discovery.unavailable()
        inventory = self._discovery.inventory
        if problem is not None or inventory is None:
            raise NvmlUnavailableError(f"devices of this node are not usable now: {problem}")
        return inventory

    def _others(self, claim: AllocatedClaim, inventory: Inventory) -> Iterator[ClaimRecord]:
        """The records of the other claims, and one for each claim whose record was lost."""
        records = self._records.all()
        yield from (record for uid, record in records.items() if uid != claim.ref.uid)
        if not self._records.quarantined():
            return
        for uid, devices in self._without_record.lost(records).items():
            lost = lost_claim(uid, devices, inventory)
            if uid != claim.ref.uid and lost is not None:
                yield lost


def _refuse_unprepared(guard: ClaimGuard, call: KubeletCall) -> None:
    """Raises: RetryableError if the claim was unprepared since the call began. If a pod still needs the claim, the
    kubelet has then begun another call."""
    if guard.was_unprepared_since(call.began_ns):
        raise RetryableError(
            "the claim was unprepared while this call was under way; the kubelet calls again if a pod still needs it"
        )
