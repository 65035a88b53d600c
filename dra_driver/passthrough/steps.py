"""The step that gives a card to a virtual machine, with its undo. The lane of the GPU runs both, and nothing else
changes the card.

    with NVIDIA's driver ──detail──▶ persistence off ──▶ NVML closed ──▶ no driver ──▶ with vfio, NVML open again
          ▲                                                                               │
          └── detail removed ◀── persistence as it was ◀── with its drivers ◀── no VM has it ──┘

| A crash … | leaves | and then |
|---|---|---|
| before the detail is written | the entry of the step | the kubelet asks again, or the undo finds nothing to do |
| anywhere after it | the detail too | the step or its undo goes on from sysfs |
| after the last write of the undo | the detail | the undo finds nothing to do and removes it |

A step that fails is undone at once, so no card is left without a driver. A write to the kernel that blocks keeps the
lane and nothing else: NVML is opened again for the other GPUs, and when the write has ended, what was done is undone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
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
from dra_driver.model.gpu import VFIO_PCI, Card, FunctionBefore, OwnedCard, is_vfio
from dra_driver.model.plan import Plan
from dra_driver.model.record import BindVfio, ClaimRecord
from dra_driver.nvml.reader import NvmlReader
from dra_driver.passthrough.rules.moves import Move, are_bound, back, to_vfio

if TYPE_CHECKING:
    from dra_driver.nvml.gpu_users import PersistenceModes

_log = structlog.get_logger(__name__)

_MODULE_S = 10.0
_NVML_S = 15.0
"""How long a bind waits until other operations of NVML have ended."""
_WRITE_S = 15.0
"""How long the kernel may take for one write. It waits in there for whoever has the card open."""
_LET_GO_S, _LOOK_S = 2.0, 0.05
_STUCK_FIRST_S, _STUCK_MOST_S = 5.0, 60.0
_NODE_S = 3.0
_UNDO_S = 40.0
_RESCAN_S = 10.0
_TOGETHER_S = 3.0
"""How long the binds of one claim wait for each other, so that NVML is closed once for all of them."""


@dataclass(eq=False)
class _Meeting:
    """The binds of one claim by one plan: why some `failed`, and how many have `ended`."""

    plan: Plan
    barrier: threading.Barrier
    failed: list[str] = field(default_factory=list)
    ended: int = 0


@dataclass(eq=False)
class VfioSteps:
    """Does and undoes `BindVfio`. Neither runs within an operation of NVML.

    Within `pause` NVML is closed in every process of ours; its arguments are what is done during the pause, for people,
    and what returns how many seconds it may wait for calls of NVML. `rescan` has discovery look again, and waits so
    many seconds for that, None: not at all. `detached` says why NVML is kept closed, None if it is not.
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
        self._meetings: dict[str, _Meeting] = {}  # by claim UID
        self._guard = threading.Lock()

    def do(self, step: BindVfio, plan: Plan) -> None:
        """Have the card with its vfio driver. What fails is undone at once. Raises: ClaimRefusedError, DeviceBusyError
        that names who has the card, RetryableError, StateError."""
        try:
            with self._meeting(plan) as met:
                self._bind(step, plan, met)
        except Exception as error:
            is_clean = self._take_back(step)
            if isinstance(error, DraDriverError):
                error.has_no_effect = is_clean
            raise

    def undo(self, step: BindVfio, record: ClaimRecord) -> None:
        """Have the card with the drivers that it had. Raises: DeviceBusyError that names the virtual machine that has
        it; RetryableError, StateError."""
        with self._guard:
            self._meetings.pop(record.ref.uid, None)
        with until(time.monotonic() + _UNDO_S):
            self._return(step)

    def in_place(self, step: BindVfio, record: ClaimRecord) -> bool:
        """Whether a vfio driver has the GPU."""
        card = self.cards.card(step.pci_bus_id)
        return card is not None and card.driver in _vfio(step, card)

    # --- to vfio -------------------------------------------------------------------------------

    def _bind(self, step: BindVfio, plan: Plan, met: Callable[[], None]) -> None:
        card = self._card(step)
        now = self._drivers(card)
        if are_bound(now, _vfio(step, card)):
            return  # where the ledger has nothing, an administrator did it since the claim was planned
        self._refuse(step, card)
        driver = self.cards.ready_driver(step.pci_bus_id, seconds_for("load a module", _MODULE_S))
        if not (card.has_iommufd and _prefers_iommufd(step, plan)):
            self.cards.ready_container(seconds_for("load a module", _MODULE_S))
        self._made_ready(step, now)
        met()
        with self._paused(step):
            self._refuse_programs(step)
            stuck = self._make(to_vfio(self._drivers(card), card.bus_id, driver))
        self._end_of(stuck, step)
        self.cards.verify(card, driver, seconds_for(f"see GPU {step.gpu_uuid} under vfio", _NODE_S))
        _log.info(
            "card_bound",
            device=step.device,
            gpu_uuid=step.gpu_uuid,
            driver=driver,
            claim_uid=plan.claim.ref.uid,
        )
        self.rescan(None)

    def _refuse(self, step: BindVfio, card: Card) -> None:
        """Raises: ClaimRefusedError, RetryableError, also where a write would wait for a virtual machine."""
        if card.problem is not None:
            raise ClaimRefusedError(
                f"GPU {step.gpu_uuid} ({card.bus_id}) cannot be given to a virtual machine: {card.problem}"
            )
        users = self.cards.vm_users(card)
        if users:
            raise RetryableError(
                f"GPU {step.gpu_uuid} ({card.bus_id}) is being taken from vfio or from the PCI bus, and the kernel "
                f"waits until {', '.join(users)} closes it; end that virtual machine"
            )
        if users is None:
            raise RetryableError(
                "which programs use a card cannot be told, because gpu-dra-driver does not see the processes of the "
                "host; set hostPID: true for its pods"
            )
        self._refuse_detached()
        self.lanes.refuse_beside_hang(step.gpu_uuid)  # closing NVML might hang with the other GPU

    def _refuse_detached(self) -> None:
        reason = self.detached()
        if reason is not None:
            raise NvmlUnavailableError(reason)

    def _made_ready(self, step: BindVfio, now: Mapping[str, str | None]) -> None:
        """Write what the card has now and leave the persistence mode, if NVML has the GPU still. Raises:
        DeviceBusyError; RetryableError if other programs have the GPU open: NVML need not be closed to see that."""
        session, is_in_nvml = self.nvml.session, now[step.pci_bus_id] == NVIDIA
        with session.operation(waits_for_nvml) if is_in_nvml else nullcontext():
            if is_in_nvml:
                _refuse_users(step, self.nvml.processes(step.gpu_uuid).values())
                if others := self.cards.gpu_users(step.pci_bus_id, others_only=True):
                    raise RetryableError(_in_use(step, others))
            before = self._before(step)
            if before is None:
                # A GPU without a driver is one whose detail was lost half-way.
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
        """The override of an administrator. One to vfio without effect is ours, of a ledger that was lost half-way."""
        override = self.cards.overridden_by(bus_id)
        return None if override is not None and is_vfio(override) and override != driver else override

    def _refuse_programs(self, step: BindVfio) -> None:
        """Raises: RetryableError if programs still have the GPU open a moment after NVML was closed and persistence
        mode left, or if that is not known. The call does not wait for them: each look closes NVML for all GPUs, and a
        monitor never ends."""
        end = time.monotonic() + seconds_for("see who has the GPU open", _LET_GO_S)
        while (users := self.cards.gpu_users(step.pci_bus_id)) and time.monotonic() < end:
            time.sleep(_LOOK_S)
        if users is None:
            raise RetryableError(
                f"which programs have GPU {step.gpu_uuid} ({step.pci_bus_id}) open cannot be told, because the NVIDIA "
                "driver does not tell its device minor; see `nvidia-smi -q` on the node"
            )
        if users:
            raise RetryableError(_in_use(step, users))

    @contextmanager
    def _meeting(self, plan: Plan) -> Iterator[Callable[[], None]]:
        """What it yields waits for the other binds of the claim, unless one of them takes too long. Raises:
        RetryableError, as the error of one that has failed: to bind the others would close NVML for nothing."""
        uid, count = plan.claim.ref.uid, sum(isinstance(step, BindVfio) for step in plan.steps)
        with self._guard:
            if uid not in self._meetings or self._meetings[uid].plan is not plan:
                self._meetings[uid] = _Meeting(plan, threading.Barrier(count))
            one = self._meetings[uid]

        def met() -> None:
            with suppress(threading.BrokenBarrierError):
                one.barrier.wait(_TOGETHER_S)
            if one.failed:
                raise RetryableError(one.failed[0])

        try:
            yield met
        except DraDriverError as error:
            one.failed.append(str(error))
            raise
        finally:
            one.barrier.abort()
            with self._guard:
                one.ended += 1
                if one.ended >= count and self._meetings.get(uid) is one:
                    del self._meetings[uid]

    # --- back ----------------------------------------------------------------------------------

    def _take_back(self, step: BindVfio) -> bool:
        """Undo what a failed bind has done; whether that is nothing now."""
        try:
            with until(time.monotonic() + _UNDO_S):
                self._return(step)
        except DraDriverError as error:
            _log.warning("card_not_returned", device=step.device, reason=str(error))
            return False
        return True

    def _return(self, step: BindVfio) -> None:
        entry = self._before(step)
        if entry is None and step.gpu_uuid not in self.ledger.unreadable():
            return
        card = self.cards.card(step.pci_bus_id)
        if card is None:  # it was pulled out; what comes in its place, the kernel binds anew
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
            self._make_back(moves, step)
            if self.cards.bound_driver(step.pci_bus_id) != before[step.pci_bus_id]:
                raise RetryableError(
                    f"GPU {step.gpu_uuid} ({card.bus_id}) has left vfio, and {before[step.pci_bus_id]} does not take "
                    "it; see the kernel log, it may need a reset of the node"
                )
            if self.cards.overridden_by(step.pci_bus_id) != (override := overrides.get(step.pci_bus_id)):
                raise RetryableError(
                    f"GPU {step.gpu_uuid} ({card.bus_id}) has left vfio, and its driver_override is not "
                    f"{override or 'empty'} again; see the kernel log"
                )
            _log.info("card_returned", device=step.device, gpu_uuid=step.gpu_uuid)
        self.rescan(seconds_for("look at the card", _RESCAN_S))
        if entry is not None and entry.persistence:
            with suppress(NotSupportedError):  # by another NVIDIA driver than before
                self.persistence.set(step.gpu_uuid, step.pci_bus_id, on=True)
        self._forget(entry)
        self.rescan(None)

    def _forget(self, entry: OwnedCard | None) -> None:
        if entry is not None:
            self.ledger.remove(entry)

    def _refuse_return(self, step: BindVfio, card: Card, driver: str | None) -> None:
        """Raises: DeviceBusyError, RetryableError. A card under vfio is left alone while somebody may have it."""
        self._refuse_detached()
        if driver is not None and not self.cards.has_driver(driver):
            raise NvmlUnavailableError(
                f"the kernel driver {driver} is not loaded, so GPU {step.gpu_uuid} ({card.bus_id}) stays under vfio"
            )
        users = self.cards.vm_users(card)
        if users is None:
            raise RetryableError(
                f"whether a virtual machine has GPU {step.gpu_uuid} ({card.bus_id}) cannot be told, because "
                "gpu-dra-driver does not see the processes of the host; set hostPID: true for its pods"
            )
        _refuse_users(step, users)

    def _make_back(self, moves: Sequence[Move], step: BindVfio) -> None:
        """Make the moves, all of them: what accompanies a GPU must not keep it. Where a driver does not take its
        function back, the kernel chooses."""
        for move in moves:
            try:
                self._end_of(self._make([move]), step)
            except RetryableError as error:
                _log.warning("function_not_moved", bus_id=move.bus_id, reason=str(error))
                if move.action == "unbind" and move.bus_id == step.pci_bus_id:
                    raise
                if move.action == "bind":
                    with suppress(RetryableError):
                        self._end_of(self._make([Move("probe", move.bus_id)]), step)

    # --- both ----------------------------------------------------------------------------------

    def _card(self, step: BindVfio) -> Card:
        card = self.cards.card(step.pci_bus_id)
        if card is None:
            raise RetryableError(f"GPU {step.gpu_uuid} ({step.pci_bus_id}) is not on the PCI bus any more")
        return card

    def _drivers(self, card: Card) -> dict[str, str | None]:
        return {bus_id: self.cards.bound_driver(bus_id) for bus_id in card.functions}

    def _make(self, moves: Iterable[Move]) -> NotAnsweredError | None:
        """Make the moves one after the other; the error of one that blocks, and no other follows it. Raises:
        RetryableError."""
        with only_writes():
            return self._made(moves)

    def _made(self, moves: Iterable[Move]) -> NotAnsweredError | None:
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

    def _end_of(self, stuck: NotAnsweredError | None, step: BindVfio) -> None:
        """Wait until a write that blocks has ended, however long it takes: meanwhile nobody else may touch the card.

        NVML is open again, and may itself be what the kernel waits for, at last if something else was it before. So it
        is closed for a moment now and then, at a time when no other process has the GPU open. Raises: the error.
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
                        wait([stuck.answer], _LET_GO_S)
        raise stuck

    def _paused(self, step: BindVfio) -> AbstractContextManager[None]:
        return self.pause(f"changes the kernel driver of GPU {step.gpu_uuid}", waits_for_nvml)


def waits_for_nvml() -> float:
    """How many seconds an operation waits for NVML. Raises: RetryableError where the call has no time left."""
    return seconds_for("wait for NVML", _NVML_S)


def _prefers_iommufd(step: BindVfio, plan: Plan) -> bool:
    return any(one.prefers_iommufd for one in plan.devices if one.result.device == step.device)


def _vfio(step: BindVfio, card: Card) -> tuple[str, ...]:
    """The drivers that count as vfio: before its module is loaded, the name of one may not be known."""
    return (step.vfio_driver, card.vfio_driver, VFIO_PCI)


def _refuse_users(step: BindVfio, users: Iterable[str]) -> None:
    """Raises: DeviceBusyError."""
    if found := list(users):
        raise DeviceBusyError(_in_use(step, found))


def _in_use(step: BindVfio, users: Sequence[str]) -> str:
    return f"GPU {step.gpu_uuid} ({step.pci_bus_id}) is in use by {', '.join(users)}; end that, or wait until it ends"
