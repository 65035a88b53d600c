"""NodePrepareResources and NodeUnprepareResources: what the kubelet asks for, claim by claim."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import structlog

from dra_driver.core.planning import Plan, answer, device_kind, our_part, plan_claim
from dra_driver.errors import (
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
from dra_driver.services.executor import Executor

_log = structlog.get_logger(__name__)

_KUBELET_DEADLINE_S = 45.0
_ANSWER_BEFORE_S = 2.0
"""The kubelet drops an answer that comes after its deadline, and with it the reason."""
_KNOWN_CLAIM_API_TIMEOUT_S = 3.0


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

    def scan_now(self) -> None:
        """Read everything anew."""


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


class Observer(Protocol):
    """Told of each claim's outcome, for metrics."""

    def prepared(self, duration_s: float, error: Exception | None) -> None:
        """A Prepare ended."""

    def unprepared(self, duration_s: float, error: Exception | None) -> None:
        """An Unprepare ended."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The names under which this node's devices are allocated."""

    driver: str
    pool: str


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
        locks: Locks,
        executor: Executor,
        observer: Observer,
    ) -> None:
        self._identity = identity
        self._claims = claims
        self._devices = devices
        self._records = records
        self._orphans = orphans
        self._locks = locks
        self._executor = executor
        self._observer = observer

    def prepare(self, claims: Sequence[ClaimRef], deadline_s: float | None) -> Mapping[str, PrepareOutcome]:
        """An outcome for each claim; one claim's failure does not touch the others."""
        deadline = _deadline(deadline_s)
        return {ref.uid: self._prepare_reported(ref, deadline) for ref in claims}

    def unprepare(
        self, claims: Sequence[ClaimRef], deadline_s: float | None
    ) -> Mapping[str, UnprepareOutcome]:
        """None for each claim that is not prepared (any more), which includes one never seen."""
        deadline = _deadline(deadline_s)
        return {ref.uid: self._unprepare_reported(ref, deadline) for ref in claims}

    def _prepare_reported(self, ref: ClaimRef, deadline: float) -> PrepareOutcome:
        started = time.monotonic()
        try:
            prepared = self._prepare(ref, deadline)
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

    def _unprepare_reported(self, ref: ClaimRef, deadline: float) -> UnprepareOutcome:
        started = time.monotonic()
        try:
            record = self._unprepare(ref, deadline)
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

    def _prepare(self, ref: ClaimRef, deadline: float) -> Prepared:
        claim = self._allocated(ref, deadline)
        while True:
            known = self._records.get(ref.uid)
            if not claim.results and known is None:
                return Prepared(())
            try:
                gpus = self._gpus_of(claim)
            except NvmlUnavailableError:
                # The pod may be running while the driver is replaced; it keeps what it has.
                if known is not None and known.claim == claim and self._executor.in_place(known):
                    return answer(claim, self._identity.driver)
                raise
            gpus |= known.gpu_uuids if known else frozenset()
            with self._locks.hold(gpus, _remaining(deadline)):
                current = self._records.get(ref.uid)
                if not _covers(gpus, current):
                    continue
                plan = self._plan(claim)
                if not plan.gpu_uuids <= gpus:
                    continue
                # After its deadline the kubelet may unprepare what has no record yet; none may appear then.
                _remaining(deadline)
                if current is not None and current.devices != plan.held_devices():
                    self._executor.take_back(current)
                    current = None
                if plan.devices:
                    self._executor.carry_out(plan, current)
                return answer(claim, self._identity.driver)

    def _unprepare(self, ref: ClaimRef, deadline: float) -> ClaimRecord | None:
        while True:
            known = self._records.get(ref.uid)
            gpus = known.gpu_uuids if known else frozenset()
            with self._locks.hold(gpus, _remaining(deadline)):
                current = self._records.get(ref.uid)
                if not _covers(gpus, current):
                    continue
                if current is None:
                    self._executor.forget(ref.uid)
                else:
                    self._executor.take_back(current)
                return current

    def _allocated(self, ref: ClaimRef, deadline: float) -> AllocatedClaim:
        """Our part of the claim: from the API server, or from the record if it does not answer."""
        known = self._records.get(ref.uid)
        timeout = _remaining(deadline)
        if known is not None and known.phase == "prepared":
            timeout = min(timeout, _KNOWN_CLAIM_API_TIMEOUT_S)
        try:
            return our_part(self._claims.read(ref, timeout), self._identity.driver)
        except ApiUnavailableError as error:
            if known is None or known.phase != "prepared":
                raise
            _log.warning("claim_read_from_record", claim_uid=ref.uid, reason=str(error))
            return known.claim

    def _gpus_of(self, claim: AllocatedClaim) -> frozenset[str]:
        """The physical GPUs behind the claim's devices, as far as the devices are known."""
        by_name = self._inventory().by_name
        if any(result.device not in by_name for result in claim.results):
            # The device may have come after the last look: a MIG device made by hand, a driver reload.
            self._devices.scan_now()
            by_name = self._inventory().by_name
        return frozenset(
            by_name[result.device].gpu.uuid for result in claim.results if result.device in by_name
        )

    def _plan(self, claim: AllocatedClaim) -> Plan:
        inventory = self._inventory()
        identity = self._identity
        return plan_claim(claim, inventory, identity.pool, identity.driver, self._others(claim, inventory))

    def _inventory(self) -> Inventory:
        problem = self._devices.unavailable()
        if problem is not None:
            self._devices.scan_now()
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
            held = [offered[name] for name in names if name in offered]
            if uid != claim.ref.uid and held:
                yield ClaimRecord(
                    AllocatedClaim(ClaimRef("?", "?", uid), ()),
                    "prepared",
                    "",
                    tuple(
                        HeldDevice(device.name, device_kind(device), device.uuid, device.gpu.uuid)
                        for device in held
                    ),
                    (),
                )


def _covers(gpus: frozenset[str], record: ClaimRecord | None) -> bool:
    return record is None or record.gpu_uuids <= gpus


def _deadline(deadline_s: float | None) -> float:
    return (
        time.monotonic() + (deadline_s if deadline_s is not None else _KUBELET_DEADLINE_S) - _ANSWER_BEFORE_S
    )


def _remaining(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise RetryableError("the kubelet's deadline is over; it will ask again")
    return left


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
