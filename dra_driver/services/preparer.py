"""NodePrepareResources and NodeUnprepareResources: what the kubelet asks for, claim by claim."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import structlog
from structlog.contextvars import bound_contextvars

from dra_driver.core.holding import DeviceHeldError
from dra_driver.core.planning import Plan, answer, device_of_cdi_name, lost_claim, plan_claim
from dra_driver.errors import (
    DeviceLostError,
    DraDriverError,
    NvmlUnavailableError,
    PassingRefusalError,
    RetryableError,
)
from dra_driver.model.claim import (
    AllocatedClaim,
    ClaimRef,
    Failed,
    Prepared,
    PrepareOutcome,
    UnprepareOutcome,
)
from dra_driver.model.inventory import Inventory
from dra_driver.model.record import ClaimRecord
from dra_driver.model.sharing import NO_SHARING, SharingPolicy
from dra_driver.services.begun import BegunClaims
from dra_driver.services.claimcalls import Action, Call, CalledClaims, Read, Records, told_as
from dra_driver.services.claimcalls import ClaimReader as CalledReader
from dra_driver.services.deadlines import until
from dra_driver.services.executor import Executor, refuse_newer
from dra_driver.services.preparingports import ClaimLocks, ClaimTurn, Locks
from dra_driver.services.waiting import WAITED_FOR, Holders, Place, Releases

_log = structlog.get_logger(__name__)

_SCAN_WAIT_S = 10.0
_RECLAIM_S = 30.0
_FINISH_S = 5.0


class ClaimReader(CalledReader, Holders, Protocol):
    """The claims in the API server."""


class Devices(Protocol):
    """The node's inventory, and why there is none."""

    @property
    def inventory(self) -> Inventory | None:
        """The last snapshot."""

    def unavailable(self) -> str | None:
        """Why devices are not known or not usable now; None when they are."""

    def scan_now(self, timeout_s: float) -> None:
        """Have everything read anew, and wait for that; a hanging NVML costs `timeout_s` seconds at most."""


class Observer(Protocol):
    """Told of each claim's outcome. Must not raise, nor wait for anybody."""

    def prepared(self, ref: ClaimRef, duration_s: float, record: ClaimRecord | None) -> None:
        """A claim is prepared; `record` is None where nothing of it is ours."""

    def unprepared(self, ref: ClaimRef, duration_s: float) -> None:
        """A claim is not prepared (any more)."""

    def waited(self, ref: ClaimRef, duration_s: float) -> None:
        """A Prepare, which ends now, waited for another claim to let go of a device, in vain or not."""

    def failed(self, action: Action, ref: ClaimRef, duration_s: float, error: Exception, told: str) -> None:
        """It did not work; `told` is what the kubelet gets to hear."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The names under which this node's devices are allocated, how they may be shared, and in which versions
    containers are told of them."""

    driver: str
    pool: str
    sharing: SharingPolicy = NO_SHARING
    metadata: tuple[str, ...] = ()


class Preparer:
    """Serves the kubelet. Calls for different GPUs run at the same time; those for one GPU in turn.

    No lock is held while the API server is asked.
    """

    def __init__(
        self,
        identity: Identity,
        claims: ClaimReader,
        devices: Devices,
        records: Records,
        orphans: Callable[[Mapping[str, ClaimRecord]], Sequence[tuple[str, Sequence[str]]]],
        claim_locks: ClaimLocks,
        gpu_locks: Locks,
        executor: Executor,
        observer: Observer,
        releases: Releases | None = None,
    ) -> None:
        """`releases` is given where somebody else has to know who waits."""
        self._identity = identity
        self._called = CalledClaims(claims, records, identity.driver)
        self._releases = releases or Releases(claims, records, identity.driver)
        self._devices = devices
        self._records = records
        self._orphans = orphans
        self._claim_locks = claim_locks
        self._gpu_locks = gpu_locks
        self._executor = executor
        self._begun = BegunClaims(records, executor, claim_locks, gpu_locks)
        self._observer = observer

    def prepare(self, claims: Sequence[ClaimRef], deadline_s: float | None) -> Mapping[str, PrepareOutcome]:
        """An outcome for each claim; one claim's failure does not touch the others."""
        call = Call.begin(deadline_s)
        outcomes: dict[str, PrepareOutcome] = {}
        with until(call.deadline), ExitStack() as under_way:
            for ref in claims:
                under_way.enter_context(self._releases.preparing(ref.uid))
            read = self._called.read_all(claims, call)
            for ref in claims:
                with bound_contextvars(claim_uid=ref.uid):
                    outcomes[ref.uid] = self._prepare_reported(ref, read[ref.uid], call)
        return outcomes

    def unprepare(
        self, claims: Sequence[ClaimRef], deadline_s: float | None
    ) -> Mapping[str, UnprepareOutcome]:
        """None for each claim that is not prepared (any more), which includes one never seen."""
        call = Call.begin(deadline_s)
        outcomes: dict[str, UnprepareOutcome] = {}
        with until(call.deadline):
            for ref in claims:
                with bound_contextvars(claim_uid=ref.uid):
                    outcomes[ref.uid] = self._unprepare_reported(ref, call)
        return outcomes

    def reclaim(
        self, ref: ClaimRef, expected: ClaimRecord | None, looked_ns: int, within_s: float = _RECLAIM_S
    ) -> bool:
        """Unprepare a claim that the kubelet will not, as if it had asked; whether that was done.

        Not done if its record is another one than `expected` by now, if it was prepared after `looked_ns`, when the
        API server was asked about it, or is being prepared. Raises: what an undo raised; the record stays.
        """
        call = Call(time.monotonic_ns(), time.monotonic() + within_s)
        with until(call.deadline), bound_contextvars(claim_uid=ref.uid), self._releases.unpreparing(ref.uid):
            started = time.monotonic()
            with self._claim_locks.hold(ref.uid, call.left()) as turn:
                is_wanted = turn.was_prepared_since(looked_ns) or self._releases.is_preparing(ref.uid)
                if is_wanted or self._records.get(ref.uid) != expected:
                    return False
                self._taken_back(ref, call, turn)
        self._unprepared(ref, expected, time.monotonic() - started)
        return True

    def _prepare_reported(self, ref: ClaimRef, read: Read, call: Call) -> PrepareOutcome:
        started = time.monotonic() - read.duration_s
        try:
            prepared, record = self._prepare_patiently(ref, read.claim_or_raise(), call)
        except Exception as error:  # noqa: BLE001  a bug in one claim must not fail the others
            return self._failed("prepare", ref, time.monotonic() - started, error)
        self._releases.note_prepared(ref.uid)
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

    def _unprepare_reported(self, ref: ClaimRef, call: Call) -> UnprepareOutcome:
        started = time.monotonic()
        try:
            with self._releases.unpreparing(ref.uid):
                record = self._unprepare(ref, call)
        except Exception as error:  # noqa: BLE001  a bug in one claim must not fail the others
            if isinstance(error, RetryableError):
                self._releases.note_unprepared(ref.uid, unfinished_since_ns=call.began_ns)
            return self._failed("unprepare", ref, time.monotonic() - started, error)
        self._unprepared(ref, record, time.monotonic() - started)
        return None

    def _unprepared(self, ref: ClaimRef, record: ClaimRecord | None, duration_s: float) -> None:
        self._releases.note_unprepared(ref.uid)
        self._observer.unprepared(ref, duration_s)
        _log.info(
            "claim_unprepared",
            claim=f"{ref.namespace}/{ref.name}",
            claim_uid=ref.uid,
            devices=[] if record is None else [held.device for held in record.devices],
            duration_s=round(duration_s, 4),
        )

    def _failed(self, action: Action, ref: ClaimRef, duration_s: float, error: Exception) -> Failed:
        told = told_as(action, ref, error)
        self._observer.failed(action, ref, duration_s, error, told)
        return Failed(told)

    def _prepare_patiently(
        self, ref: ClaimRef, claim: AllocatedClaim, call: Call
    ) -> tuple[Prepared, ClaimRecord | None]:
        """Try, and as long as others are about to let go of the devices, wait and try again."""
        has_looked = False
        with self._releases.place(claim, call.deadline) as place:
            try:
                while True:
                    try:
                        return self._prepare(ref, claim, call, place)
                    except WAITED_FOR as error:
                        if not isinstance(error, PassingRefusalError):
                            self._begun.give_up(place, call.began_ns)
                        if not self._finished_one_of(error, call):
                            self._releases.wait(place, error)
                    except (NvmlUnavailableError, DeviceLostError):
                        # The driver was loaded again or the GPU is back, which discovery has not seen yet: the
                        # kubelet would come back in a minute, a look takes a moment.
                        if has_looked or self._devices.unavailable() is not None:
                            raise
                        has_looked = True
                        self._devices.scan_now(min(call.left(), _SCAN_WAIT_S))
            finally:
                self._begun.give_up(place, call.began_ns)  # while it stands in line for what it frees
                waited = self._releases.waited_s(place)
                if waited is not None:
                    self._observer.waited(ref, waited)

    def _finished_one_of(self, error: DraDriverError, call: Call) -> bool:
        """Whether a holder that the kubelet wanted unprepared, which failed then, is unprepared now."""
        for conflict in error.conflicts if isinstance(error, DeviceHeldError) else ():
            ref = conflict.holder.ref
            since_ns = self._releases.unfinished(ref.uid)
            if since_ns is None:
                continue
            try:
                if self.reclaim(ref, conflict.holder, since_ns, min(call.left(), _FINISH_S)):
                    return True
                self._releases.note_unprepared(ref.uid)  # it is wanted again
            except DraDriverError as again:
                _log.info("unprepare_still_unfinished", claim_uid=ref.uid, reason=str(again))
        return False

    def _prepare(
        self, ref: ClaimRef, claim: AllocatedClaim, call: Call, place: Place
    ) -> tuple[Prepared, ClaimRecord | None]:
        with self._claim_locks.hold(ref.uid, call.left()) as turn:
            while True:
                _refuse_unprepared(turn, call)
                known = self._records.get(ref.uid)
                if not claim.results and known is None:
                    return Prepared(()), None
                try:
                    gpus = self._gpus_of(claim, call)
                except NvmlUnavailableError:
                    # The pod may be running while the driver is replaced; it keeps what it has.
                    if known is not None and known.claim == claim and self._executor.in_place(known):
                        turn.note_prepared()
                        return answer(claim, self._identity.driver, known.steps), known
                    raise
                gpus |= known.gpu_uuids if known else frozenset()
                with self._gpu_locks.hold(gpus, call.left()):
                    try:
                        plan = self._plan(claim, known, place)
                    except DeviceHeldError:
                        if known is not None and place.number is not None:
                            self._give_back(known, claim)
                        raise
                    if not plan.gpu_uuids <= gpus:
                        continue
                    place.wanted = plan.held_devices()
                    call.left()
                    prepared = answer(claim, self._identity.driver, plan.steps)
                    record = self._carry_out(plan, known, place)
                    turn.note_prepared()
                    return prepared, record

    def _carry_out(self, plan: Plan, known: ClaimRecord | None, place: Place) -> ClaimRecord | None:
        self._begun.end(plan.claim.ref.uid)
        if known is not None and known.devices != plan.held_devices():
            refuse_newer(known)
            self._executor.take_back(known)
            known = None
        try:
            return self._executor.carry_out(plan, known, tries_again=True) if plan.devices else None
        except PassingRefusalError:
            self._begun.begin(place)
            raise

    def _give_back(self, known: ClaimRecord, claim: AllocatedClaim) -> None:
        """Who waits keeps no devices of an allocation before: two claims that swapped would wait for each other."""
        allocated = {result.device for result in claim.results}
        if any(held.device not in allocated for held in known.devices):
            refuse_newer(known)
            self._executor.take_back(known)

    def _unprepare(self, ref: ClaimRef, call: Call) -> ClaimRecord | None:
        with self._claim_locks.hold(ref.uid, call.left()) as turn:
            return self._taken_back(ref, call, turn)

    def _taken_back(self, ref: ClaimRef, call: Call, turn: ClaimTurn) -> ClaimRecord | None:
        record = self._records.get(ref.uid)
        self._begun.end(ref.uid)
        with self._gpu_locks.hold(record.gpu_uuids if record else frozenset(), call.left()):
            if record is None:
                self._executor.forget(ref.uid)
            else:
                self._executor.take_back(record)
        turn.note_unprepared()
        return record

    def _gpus_of(self, claim: AllocatedClaim, call: Call) -> frozenset[str]:
        """The physical GPUs behind the claim's devices, as far as the devices are known."""
        if self._devices.unavailable() is not None or not self._knows_all(claim):
            # They may have come after the last look: a MIG device made by hand, a driver that is loaded now.
            self._devices.scan_now(min(call.left(), _SCAN_WAIT_S))
        inventory = self._inventory()
        found = (inventory.usable(result.device) for result in claim.results)
        return frozenset(device.gpu.uuid for device in found if device is not None)

    def _plan(self, claim: AllocatedClaim, known: ClaimRecord | None, place: Place) -> Plan:
        inventory = self._inventory()
        identity = self._identity
        others = chain(self._others(claim, inventory), self._releases.ahead_of(place))
        return plan_claim(
            claim,
            inventory,
            identity.pool,
            identity.driver,
            others,
            identity.sharing,
            known,
            identity.metadata,
        )

    def _knows_all(self, claim: AllocatedClaim) -> bool:
        inventory = self._devices.inventory
        return inventory is not None and all(result.device in inventory.by_name for result in claim.results)

    def _inventory(self) -> Inventory:
        problem = self._devices.unavailable()
        inventory = self._devices.inventory
        if problem is not None or inventory is None:
            raise NvmlUnavailableError(f"devices of this node are not usable now: {problem}")
        return inventory

    def _others(self, claim: AllocatedClaim, inventory: Inventory) -> Iterator[ClaimRecord]:
        """Records of the other claims, and what is known of claims whose record was lost."""
        records = self._records.all()
        yield from (record for uid, record in records.items() if uid != claim.ref.uid)
        offered = inventory.by_name
        for uid, names in self._orphans(records):
            devices = {device_of_cdi_name(name) for name in names}
            held = [offered[name] for name in sorted(devices) if name in offered]
            if uid != claim.ref.uid and held:
                yield lost_claim(uid, held)


def _refuse_unprepared(turn: ClaimTurn, call: Call) -> None:
    """Raises: RetryableError if the claim was unprepared since the call began; the kubelet began another then, if a pod
    wants the claim."""
    if turn.was_unprepared_since(call.began_ns):
        raise RetryableError(
            "it was unprepared while this call was under way; it is retried if a pod still wants it"
        )
