"""Binds a card to vfio for a virtual machine, and undoes this. Both run in the GPU's lane, and only this module
changes the card's driver.

    NVIDIA's driver ──detail──▶ persistence off ──▶ NVML closed ──▶ no driver ──▶ vfio driver, NVML open
          ▲                                                                             │
          └── detail removed ◀── persistence restored ◀── drivers restored ◀── no VM uses it ──┘

| A crash … | leaves | then |
|---|---|---|
| before the detail is written | the record's step | the kubelet retries, or the undo finds nothing to do |
| after the detail is written | also the detail | the step or its undo continues from the state in sysfs |
| after the last write of the undo | the detail | the undo finds nothing to do and removes the detail |

A failed step is undone at once. A write to the kernel that blocks keeps only the lane busy: NVML is reopened for the
other GPUs, and the step is undone when the write has returned.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

import structlog

from dra_driver.base.backoff import Backoff
from dra_driver.base.deadline import seconds_for, until
from dra_driver.base.threads import NotAnsweredError
from dra_driver.errors import (
    ClaimRefusedError,
    DeviceBusyError,
    DraDriverError,
    NotSupportedError,
    NvmlUnavailableError,
    RetryableError,
)
from dra_driver.host.vfio import NVIDIA, VfioCards
from dra_driver.journal.lanes import Lanes, only_writes
from dra_driver.journal.ledger import Ledger
from dra_driver.model.claim import ClaimRef
from dra_driver.model.dataclass import dataclass, field
from dra_driver.model.gpu import VFIO_PCI, Card, FunctionBefore, OwnedCard, is_vfio
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import BindVfio
from dra_driver.nvml.reader import NvmlReader
from dra_driver.passthrough.rules.moves import Move, are_bound, back, to_vfio

if TYPE_CHECKING:
    from dra_driver.nvml.gpu_users import PersistenceModes

_log = structlog.get_logger(__name__)

_MODULE_S = 10.0
_NVML_S = 15.0
"""For other NVML operations to end."""
_WRITE_S = 15.0
"""For one write. The kernel blocks it until every program has closed the card."""
_RELEASE_S, _CHECK_EVERY_S = 2.0, 0.05
_STUCK_FIRST_S, _STUCK_MOST_S = 5.0, 60.0
_NODE_S = 3.0
_UNDO_S = 40.0
_RESCAN_S = 10.0
_TOGETHER_S = 3.0
"""The binds of one claim wait for each other, so that NVML is closed only once."""


@dataclass(eq=False)
class _Rendezvous:
    plan: Plan
    barrier: threading.Barrier
    failed: list[str] = field(default_factory=list)
    ended: int = 0


@dataclass(eq=False)
class VfioSteps:
    """Runs and undoes `BindVfio`. Must not be called during an NVML operation.

    While `pause` is entered, NVML is closed in every process of the plugin; its arguments are a description for
    errors, and a function that returns how many seconds to wait for NVML calls. `rescan` waits that many seconds for
    a new discovery, or not at all for None. `detached` returns why NVML must stay closed.
    """

    cards: VfioCards
    ledger: Ledger
    nvml: NvmlReader
    pause: Callable[[str, Callable[[], float]], AbstractContextManager[None]]
    persistence: PersistenceModes
    rescan: Callable[[float | None], None]
    detached: Callable[[], str | None]
    lanes: Lanes

    def __post_init__(self) -> None:
        self._rendezvous_by_claim: dict[str, _Rendezvous] = {}
        self._guard = threading.Lock()

    def do(self, step: BindVfio, plan: Plan) -> None:
        """Bind the card. A failed bind is undone at once.

        Raises: ClaimRefusedError, DeviceBusyError that names the users of the card, RetryableError, StateError.
        """
        try:
            with self._rendezvous(plan) as wait_for_others:
                self._bind(step, plan, wait_for_others)
        except Exception as error:
            is_clean = self._roll_back(step)
            if isinstance(error, DraDriverError):
                error.has_no_effect = is_clean
            raise

    def undo(self, step: BindVfio, ref: ClaimRef) -> None:
        """Restore the card's drivers.

        Raises: DeviceBusyError that names the virtual machine that uses the card; RetryableError, StateError.
        """
        with self._guard:
            self._rendezvous_by_claim.pop(ref.uid, None)
        with until(time.monotonic() + _UNDO_S):
            self._return(step)

    def in_place(self, step: BindVfio, record: ClaimRecord) -> bool:
        card = self.cards.card(step.pci_bus_id)
        return card is not None and card.driver in _vfio(step, card)

    # --- to vfio -------------------------------------------------------------------------------

    def _bind(self, step: BindVfio, plan: Plan, wait_for_others: Callable[[], None]) -> None:
        card = self._card(step)
        now = self._drivers(card)
        if are_bound(now, _vfio(step, card)):
            return  # needs no ledger entry: an administrator bound the card after the claim was planned
        self._refuse(step, card)
        driver = self.cards.ready_driver(step.pci_bus_id, seconds_for("load a module", _MODULE_S))
        if not (card.has_iommufd and _prefers_iommufd(step, plan)):
            self.cards.ready_container(seconds_for("load a module", _MODULE_S))
        self._prepare_card(step, now)
        wait_for_others()
        with self._paused(step):
            self._refuse_programs(step)
            stuck = self._make(to_vfio(self._drivers(card), card.bus_id, driver))
        self._wait_for_write(stuck, step)
        self.cards.verify(
            card, driver, seconds_for(f"wait for the vfio node of GPU {step.gpu_uuid}", _NODE_S)
        )
        _log.info(
            "vfio_bound",
            device=step.device,
            gpu_uuid=step.gpu_uuid,
            driver=driver,
            claim_uid=plan.claim.ref.uid,
        )
        self.rescan(None)

    def _refuse(self, step: BindVfio, card: Card) -> None:
        """Refuse a card that cannot be bound, or that a virtual machine uses: the kernel would block the write."""
        if card.problem is not None:
            raise ClaimRefusedError(
                f"GPU {step.gpu_uuid} ({card.bus_id}) cannot be used by a virtual machine: {card.problem}"
            )
        users = self.cards.vm_users(card)
        if users:
            raise RetryableError(
                f"GPU {step.gpu_uuid} ({card.bus_id}) is being unbound from vfio or removed from the PCI bus, and "
                f"the kernel waits for {', '.join(users)} to close the GPU; stop the virtual machine"
            )
        if users is None:
            raise RetryableError(
                "gpu-dra-driver cannot find the programs that use a card, because it does not see the processes of "
                "the host; set hostPID: true for its pods"
            )
        self._refuse_detached()
        self.lanes.refuse_other_hangs(step.gpu_uuid)  # closing NVML might hang with the other GPU

    def _refuse_detached(self) -> None:
        reason = self.detached()
        if reason is not None:
            raise NvmlUnavailableError(reason)

    def _prepare_card(self, step: BindVfio, now: Mapping[str, str | None]) -> None:
        """Record the current drivers; if NVML still lists the GPU, also turn persistence mode off.

        Raises: DeviceBusyError; RetryableError if other programs have the GPU open, which is checked without closing
        NVML.
        """
        session, is_in_nvml = self.nvml.session, now[step.pci_bus_id] == NVIDIA
        with session.operation(nvml_wait_s) if is_in_nvml else nullcontext():
            if is_in_nvml:
                _refuse_users(step, self.nvml.processes(step.gpu_uuid).values())
                if others := self.cards.gpu_users(step.pci_bus_id, others_only=True):
                    raise RetryableError(_in_use(step, others))
            before = self._before(step)
            if before is None:
                # If the GPU has no driver, its detail was lost during an earlier move.
                had = {**now, step.pci_bus_id: now[step.pci_bus_id] or NVIDIA}
                before = OwnedCard(
                    step.gpu_uuid,
                    step.pci_bus_id,
                    self.ledger.boot_id or "",
                    tuple(
                        FunctionBefore(bus_id, driver, self._override_before(bus_id, driver))
                        for bus_id, driver in had.items()
                    ),
                    self.persistence.get(step.gpu_uuid, step.pci_bus_id) if is_in_nvml else None,
                    self.cards.product_name(step.pci_bus_id),
                )
                self.ledger.save(before)
            if before.persistence and is_in_nvml:
                self.persistence.set(step.gpu_uuid, step.pci_bus_id, on=False)

    def _before(self, step: BindVfio) -> OwnedCard | None:
        return next(iter(self.ledger.details(OwnedCard, step.gpu_uuid)), None)

    def _override_before(self, bus_id: str, driver: str | None) -> str | None:
        """Return the administrator's driver override.

        A vfio override that differs from the current driver is ours: the ledger was lost during a move.
        """
        override = self.cards.overridden_by(bus_id)
        return None if override is not None and is_vfio(override) and override != driver else override

    def _refuse_programs(self, step: BindVfio) -> None:
        """Raise RetryableError if programs still have the GPU open shortly after NVML was closed, or if this is
        unknown.

        The wait is short, because NVML is closed for all GPUs and a monitoring program never exits.
        """
        end = time.monotonic() + seconds_for("find the programs that have the GPU open", _RELEASE_S)
        while (users := self.cards.gpu_users(step.pci_bus_id)) and time.monotonic() < end:
            time.sleep(_CHECK_EVERY_S)
        if users is None:
            raise RetryableError(
                f"gpu-dra-driver cannot find the programs that have GPU {step.gpu_uuid} ({step.pci_bus_id}) open, "
                "because the NVIDIA driver does not report its device minor; see `nvidia-smi -q` on the node"
            )
        if users:
            raise RetryableError(_in_use(step, users))

    @contextmanager
    def _rendezvous(self, plan: Plan) -> Iterator[Callable[[], None]]:
        """Yield a function that waits for the other binds of the claim, up to a limit.

        It raises RetryableError with the error of a failed bind, because binding the other cards would close NVML for
        nothing.
        """
        uid, count = plan.claim.ref.uid, sum(isinstance(step, BindVfio) for step in plan.steps)
        with self._guard:
            if uid not in self._rendezvous_by_claim or self._rendezvous_by_claim[uid].plan is not plan:
                self._rendezvous_by_claim[uid] = _Rendezvous(plan, threading.Barrier(count))
            meeting = self._rendezvous_by_claim[uid]

        def wait_for_others() -> None:
            with suppress(threading.BrokenBarrierError):
                meeting.barrier.wait(_TOGETHER_S)
            if meeting.failed:
                raise RetryableError(meeting.failed[0])

        try:
            yield wait_for_others
        except DraDriverError as error:
            meeting.failed.append(str(error))
            raise
        finally:
            meeting.barrier.abort()
            with self._guard:
                meeting.ended += 1
                if meeting.ended >= count and self._rendezvous_by_claim.get(uid) is meeting:
                    del self._rendezvous_by_claim[uid]

    # --- back ----------------------------------------------------------------------------------

    def _roll_back(self, step: BindVfio) -> bool:
        """Undo a failed bind; returns whether this succeeded."""
        try:
            with until(time.monotonic() + _UNDO_S):
                self._return(step)
        except DraDriverError as error:
            _log.warning("vfio_release_failed", device=step.device, reason=str(error))
            return False
        return True

    def _return(self, step: BindVfio) -> None:
        entry = self._before(step)
        if entry is None and step.gpu_uuid not in self.ledger.unreadable():
            return
        card = self.cards.card(step.pci_bus_id)
        if card is None:  # the card was removed; the kernel binds a driver to its replacement
            self._forget(entry)
            return
        vfio, before = _vfio(step, card), dict[str, str | None]({step.pci_bus_id: NVIDIA})
        overrides = dict[str, str | None]()
        if entry is not None:
            before |= {one.bus_id: one.driver for one in entry.functions}
            overrides = {one.bus_id: one.override for one in entry.functions}
        now = self._drivers(card)
        moves = back(now, before, overrides, vfio)
        if any(move.action != "override" for move in moves) or any(
            self.cards.overridden_by(bus_id) != overrides.get(bus_id) for bus_id in now
        ):
            self._refuse_return(step, card, before[step.pci_bus_id])
            self._restore_drivers(moves, step)
            if self.cards.bound_driver(step.pci_bus_id) != before[step.pci_bus_id]:
                raise RetryableError(
                    f"GPU {step.gpu_uuid} ({card.bus_id}) is no longer bound to vfio, but {before[step.pci_bus_id]} "
                    "does not accept it; see the kernel log (the node may need a reboot)"
                )
            if self.cards.overridden_by(step.pci_bus_id) != (override := overrides.get(step.pci_bus_id)):
                raise RetryableError(
                    f"GPU {step.gpu_uuid} ({card.bus_id}) is no longer bound to vfio, but its driver_override could "
                    f"not be {f'restored to {override}' if override else 'cleared'}; see the kernel log"
                )
            _log.info("vfio_released", device=step.device, gpu_uuid=step.gpu_uuid)
        self.rescan(seconds_for("check the card", _RESCAN_S))
        if entry is not None and entry.persistence:
            with suppress(NotSupportedError):  # the NVIDIA driver was replaced in between
                self.persistence.set(step.gpu_uuid, step.pci_bus_id, on=True)
        self._forget(entry)
        self.rescan(None)

    def _forget(self, entry: OwnedCard | None) -> None:
        if entry is not None:
            self.ledger.remove(entry)

    def _refuse_return(self, step: BindVfio, card: Card, driver: str | None) -> None:
        self._refuse_detached()
        if driver is not None and not self.cards.has_driver(driver):
            raise NvmlUnavailableError(
                f"the kernel driver {driver} is not loaded, so GPU {step.gpu_uuid} ({card.bus_id}) stays bound to vfio"
            )
        users = self.cards.vm_users(card)
        if users is None:
            raise RetryableError(
                f"gpu-dra-driver cannot find out whether a virtual machine uses GPU {step.gpu_uuid} ({card.bus_id}), "
                "because it does not see the processes of the host; set hostPID: true for its pods"
            )
        _refuse_users(step, users)

    def _restore_drivers(self, moves: Sequence[Move], step: BindVfio) -> None:
        """Make all moves, even if the move of another function of the card fails: it must not keep the GPU bound."""
        for move in moves:
            try:
                self._wait_for_write(self._make([move]), step)
            except RetryableError as error:
                _log.warning("pci_function_not_rebound", bus_id=move.bus_id, reason=str(error))
                if move.action == "unbind" and move.bus_id == step.pci_bus_id:
                    raise
                if move.action == "bind":
                    with suppress(RetryableError):
                        self._wait_for_write(self._make([Move("probe", move.bus_id)]), step)

    # --- both ----------------------------------------------------------------------------------

    def _card(self, step: BindVfio) -> Card:
        card = self.cards.card(step.pci_bus_id)
        if card is None:
            raise RetryableError(f"GPU {step.gpu_uuid} ({step.pci_bus_id}) is no longer on the PCI bus")
        return card

    def _drivers(self, card: Card) -> dict[str, str | None]:
        return {bus_id: self.cards.bound_driver(bus_id) for bus_id in card.functions}

    def _make(self, moves: Iterable[Move]) -> NotAnsweredError | None:
        """Make the moves up to one that blocks; returns its error. Raises: RetryableError."""
        with only_writes():
            for move in moves:
                limit = seconds_for("change the driver of a card", _WRITE_S)
                try:
                    match move.action:
                        case "override":
                            self.cards.override(move.bus_id, move.driver, limit)
                        case "unbind":
                            self.cards.unbind(move.bus_id, limit)
                        case "probe":
                            self.cards.probe(move.bus_id, limit)
                        case "bind":
                            self.cards.bind(move.bus_id, move.driver or "", limit)
                except NotAnsweredError as error:
                    return error
        return None

    def _wait_for_write(self, stuck: NotAnsweredError | None, step: BindVfio) -> None:
        """Wait until a blocked write has returned, because nothing else may touch the card until then. Then raise
        its error.

        The kernel may be waiting for NVML itself, which is open again. So NVML is closed briefly from time to time,
        when no other process has the GPU open.
        """
        if stuck is None:
            return
        pause = Backoff(_STUCK_FIRST_S, _STUCK_MOST_S)
        with only_writes():
            while not wait([stuck.answer], pause.next()).done:
                if self.cards.gpu_users(step.pci_bus_id, others_only=True):
                    continue
                with suppress(DraDriverError), until(time.monotonic() + _NVML_S), self._paused(step):
                    if not self.cards.gpu_users(step.pci_bus_id):
                        wait([stuck.answer], _RELEASE_S)
        raise stuck

    def _paused(self, step: BindVfio) -> AbstractContextManager[None]:
        return self.pause(f"is changing the kernel driver of GPU {step.gpu_uuid}", nvml_wait_s)


def nvml_wait_s() -> float:
    """Return how many seconds an operation waits for NVML. Raises: RetryableError if the call has no time left."""
    return seconds_for("wait for NVML", _NVML_S)


def _prefers_iommufd(step: BindVfio, plan: Plan) -> bool:
    return any(one.prefers_iommufd for one in plan.devices if one.result.device == step.device)


def _vfio(step: BindVfio, card: Card) -> tuple[str, ...]:
    """Return all drivers that count as vfio: a card's own driver may be unknown before its module is loaded."""
    return (step.vfio_driver, card.vfio_driver, VFIO_PCI)


def _refuse_users(step: BindVfio, users: Iterable[str]) -> None:
    if found := list(users):
        raise DeviceBusyError(_in_use(step, found))


def _in_use(step: BindVfio, users: Sequence[str]) -> str:
    remedy = (
        "these programs, or wait until they stop"
        if len(users) > 1
        else "this program, or wait until it stops"
    )
    return f"GPU {step.gpu_uuid} ({step.pci_bus_id}) is in use by {', '.join(users)}; stop {remedy}"
