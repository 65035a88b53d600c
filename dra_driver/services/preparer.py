"""NodePrepareResources and NodeUnprepareResources: what the kubelet asks for, claim by claim."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import structlog

from dra_driver.core.planning import Plan, answer, device_of_cdi_name, our_part, plan_claim
from dra_driver.errors import (
    ApiRejectedError,
    ApiUnavailableError,
    DraDriverError,
    NvmlUnavailableError,
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
from dra_driver.model.record import ClaimRecord, HeldDevice
from dra_driver.model.sharing import NO_SHARING, SharingPolicy, kind_of
from dra_driver.services.deadlines import until
from dra_driver.services.executor import Executor

_log = structlog.get_logger(__name__)

_KUBELET_DEADLINE_S = 45.0
_ANSWER_BEFORE_S = 2.0
"""The kubelet drops an answer that comes after its deadline, and with it the reason."""
_KNOWN_CLAIMS_API_S = 3.0
_SCAN_WAIT_S = 10.0
_READERS = 8


class ClaimReader(Protocol):
    """Reads claims from the API server."""

    def read(self, ref: ClaimRef, timeout_s: float) -> AllocatedClaim:
        """The allocated claim. Raises: ClaimRefusedError if it is gone, replaced or not allocated;
        ApiUnavailableError."""


class Devices(Protocol):
    """The node's inventory, and why there is none."""

    @property
    def inventory(self) -> Inventory | None:
        """The last snapshot."""

    def unavailable(self) -> str | None:
        """Why devices are not known or not usable now; None when they are."""

    def scan_now(self, timeout_s: float) -> None:
        """Have everything read anew, and wait for that; a hanging NVML costs `timeout_s` seconds at most."""


class Records(Protocol):
    """The claim records."""

    def get(self, uid: str) -> ClaimRecord | None:
        """One claim's record."""

    def all(self) -> Mapping[str, ClaimRecord]:
        """Every record by claim UID."""


class Locks(Protocol):
    """Locks on physical GPUs."""

    def hold(self, gpu_uuids: Iterable[str], timeout_s: float) -> AbstractContextManager[None]:
        """Hold all of them."""


class ClaimTurn(Protocol):
    """The right to work on one claim."""

    def was_unprepared_since(self, moment_ns: int) -> bool:
        """Whether an Unprepare of the claim ended after the moment."""

    def note_unprepared(self) -> None:
        """Remember that the claim was unprepared now."""


class ClaimLocks(Protocol):
    """Locks on claims."""

    def hold(self, uid: str, timeout_s: float) -> AbstractContextManager[ClaimTurn]:
        """Hold the claim's lock."""


class Observer(Protocol):
    """Told of each claim's outcome, for metrics."""

    def prepared(self, duration_s: float, error: Exception | None) -> None:
        """A Prepare ended."""

    def unprepared(self, duration_s: float, error: Exception | None) -> None:
        """An Unprepare ended."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The names under which this node's devices are allocated, and how they may be shared."""

    driver: str
    pool: str
    sharing: SharingPolicy = NO_SHARING


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of the kubelet: when it began and when an answer would come too late (time.monotonic())."""

    began_ns: int
    deadline: float

    @classmethod
    def begin(cls, deadline_s: float | None) -> _Call:
        seconds = deadline_s if deadline_s is not None else _KUBELET_DEADLINE_S
        return cls(time.monotonic_ns(), time.monotonic() + seconds - _ANSWER_BEFORE_S)

    def left(self) -> float:
        """Seconds until it is too late. Raises: RetryableError if it is."""
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise RetryableError("the kubelet's deadline is over; it will ask again")
        return left

    def left_for_known(self) -> float:
        """Seconds that the API server may take over claims which can do without; shared by all of the call."""
        spent = (time.monotonic_ns() - self.began_ns) / 1e9
        return max(0.05, min(self.left(), _KNOWN_CLAIMS_API_S - spent))


@dataclass(frozen=True, slots=True)
class _Read:
    """A claim, or why it could not be read; and how long that took."""

    outcome: AllocatedClaim | Exception
    duration_s: float

    def claim_or_raise(self) -> AllocatedClaim:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


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
    ) -> None:
        self._identity = identity
        self._claims = claims
        self._devices = devices
        self._records = records
        self._orphans = orphans
        self._claim_locks = claim_locks
        self._gpu_locks = gpu_locks
        self._executor = executor
        self._observer = observer

    def prepare(self, claims: Sequence[ClaimRef], deadline_s: float | None) -> Mapping[str, PrepareOutcome]:
        """An outcome for each claim; one claim's failure does not touch the others."""
        call = _Call.begin(deadline_s)
        read = self._read_all(claims, call)
        with until(call.deadline):
            return {ref.uid: self._prepare_reported(ref, read[ref.uid], call) for ref in claims}

    def unprepare(
        self, claims: Sequence[ClaimRef], deadline_s: float | None
    ) -> Mapping[str, UnprepareOutcome]:
        """None for each claim that is not prepared (any more), which includes one never seen."""
        call = _Call.begin(deadline_s)
        with until(call.deadline):
            return {ref.uid: self._unprepare_reported(ref, call) for ref in claims}

    def _prepare_reported(self, ref: ClaimRef, read: _Read, call: _Call) -> PrepareOutcome:
        started = time.monotonic() - read.duration_s
        try:
            prepared = self._prepare(ref, read.claim_or_raise(), call)
        except Exception as error:  # noqa: BLE001  a bug in one claim must not fail the others
            duration = time.monotonic() - started
            self._observer.prepared(duration, error)
            return Failed(_told("prepare", ref, error))
        duration = time.monotonic() - started
        self._observer.prepared(duration, None)
        _log.info(
            "claim_prepared",
            claim=f"{ref.namespace}/{ref.name}",
            claim_uid=ref.uid,
            devices=[device.device for device in prepared.devices],
            duration_s=round(duration, 4),
        )
        return prepared

    def _unprepare_reported(self, ref: ClaimRef, call: _Call) -> UnprepareOutcome:
        started = time.monotonic()
        try:
            record = self._unprepare(ref, call)
        except Exception as error:  # noqa: BLE001  a bug in one claim must not fail the others
            duration = time.monotonic() - started
            self._observer.unprepared(duration, error)
            return Failed(_told("unprepare", ref, error))
        duration = time.monotonic() - started
        self._observer.unprepared(duration, None)
        _log.info(
            "claim_unprepared",
            claim=f"{ref.namespace}/{ref.name}",
            claim_uid=ref.uid,
            devices=[] if record is None else [held.device for held in record.devices],
            duration_s=round(duration, 4),
        )
        return None

    def _read_all(self, refs: Sequence[ClaimRef], call: _Call) -> dict[str, _Read]:
        """Every claim, read at the same time: an API server that hangs costs one wait, not one a claim."""
        if len(refs) == 1:
            return {refs[0].uid: self._read(refs[0], call)}
        with ThreadPoolExecutor(_READERS, thread_name_prefix="read-claims") as pool:
            return dict(
                zip((ref.uid for ref in refs), pool.map(lambda ref: self._read(ref, call), refs), strict=True)
            )

    def _read(self, ref: ClaimRef, call: _Call) -> _Read:
        started = time.monotonic()
        try:
            return _Read(self._allocated(ref, call), time.monotonic() - started)
        except Exception as error:  # noqa: BLE001  told as this claim's error
            return _Read(error, time.monotonic() - started)

    def _allocated(self, ref: ClaimRef, call: _Call) -> AllocatedClaim:
        """Our part of the claim: from the API server, or from the record if it does not answer."""
        known = self._records.get(ref.uid)
        is_prepared = known is not None and known.phase == "prepared"
        try:
            timeout = call.left_for_known() if is_prepared else call.left()
            return our_part(self._claims.read(ref, timeout), self._identity.driver)
        except (ApiUnavailableError, ApiRejectedError) as error:
            # A refusal (no permission, no such version served) says as little of the claim as silence.
            if known is None or not is_prepared:
                raise
            _log.warning("claim_read_from_record", claim_uid=ref.uid, reason=str(error))
            return known.claim

    def _prepare(self, ref: ClaimRef, claim: AllocatedClaim, call: _Call) -> Prepared:
        with self._claim_locks.hold(ref.uid, call.left()) as turn:
            while True:
                known = self._records.get(ref.uid)
                if not claim.results and known is None:
                    return Prepared(())
                try:
                    gpus = self._gpus_of(claim, call)
                except NvmlUnavailableError:
                    # The pod may be running while the driver is replaced; it keeps what it has.
                    if known is not None and known.claim == claim and self._executor.in_place(known):
                        return answer(claim, self._identity.driver)
                    raise
                gpus |= known.gpu_uuids if known else frozenset()
                with self._gpu_locks.hold(gpus, call.left()):
                    plan = self._plan(claim, known)
                    if not plan.gpu_uuids <= gpus:
                        continue
                    call.left()
                    if turn.was_unprepared_since(call.began_ns):
                        raise RetryableError(
                            "it was unprepared while this call was under way; it is retried if a pod still wants it"
                        )
                    self._carry_out(plan, known)
                    return answer(claim, self._identity.driver)

    def _carry_out(self, plan: Plan, known: ClaimRecord | None) -> None:
        if known is not None and known.devices != plan.held_devices():
            self._executor.take_back(known)
            known = None
        if plan.devices:
            self._executor.carry_out(plan, known)

    def _unprepare(self, ref: ClaimRef, call: _Call) -> ClaimRecord | None:
        with self._claim_locks.hold(ref.uid, call.left()) as turn:
            record = self._records.get(ref.uid)
            with self._gpu_locks.hold(record.gpu_uuids if record else frozenset(), call.left()):
                if record is None:
                    self._executor.forget(ref.uid)
                else:
                    self._executor.take_back(record)
            turn.note_unprepared()
            return record

    def _gpus_of(self, claim: AllocatedClaim, call: _Call) -> frozenset[str]:
        """The physical GPUs behind the claim's devices, as far as the devices are known."""
        if self._devices.unavailable() is not None or not self._knows_all(claim):
            # They may have come after the last look: a MIG device made by hand, a driver that is loaded now.
            self._devices.scan_now(min(call.left(), _SCAN_WAIT_S))
        by_name = self._inventory().by_name
        return frozenset(
            by_name[result.device].gpu.uuid for result in claim.results if result.device in by_name
        )

    def _plan(self, claim: AllocatedClaim, known: ClaimRecord | None) -> Plan:
        inventory = self._inventory()
        identity = self._identity
        others = self._others(claim, inventory)
        return plan_claim(claim, inventory, identity.pool, identity.driver, others, identity.sharing, known)

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
                yield ClaimRecord(
                    AllocatedClaim(ClaimRef("?", "?", uid), ()),
                    "prepared",
                    "",
                    tuple(
                        HeldDevice(device.name, kind_of(device), device.uuid, device.gpu.uuid)
                        for device in held
                    ),
                    (),
                )


def _told(action: str, ref: ClaimRef, error: Exception) -> str:
    """The error as the claim's entry: one line. What is not one of ours is a bug and goes to the log whole."""
    if isinstance(error, DraDriverError):
        text = " ".join(str(error).split())
    else:
        text = (
            f"internal error ({type(error).__name__}: {' '.join(str(error).split())}); see the driver's log"
        )
        _log.exception("claim_crashed", action=action, claim_uid=ref.uid)
    return f"{action} claim {ref.namespace}/{ref.name} (UID {ref.uid}): {text}"
