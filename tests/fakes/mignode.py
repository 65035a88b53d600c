"""One GPU of a simulated machine with everything that MIG devices need: real ledger, records and locks, and
the real binding. `restarted` is the next instance of the plugin over the same directory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from dra_driver.errors import NvmlTransientError
from dra_driver.journal.executor import StepDispatcher
from dra_driver.mig.devices import MigDevices
from dra_driver.mig.mode import MigContext, MigHolders, MigMode
from dra_driver.mig.offer import MigOwnership
from dra_driver.model.claim import AllocatedClaim
from dra_driver.model.gpu import Gpu
from dra_driver.model.inventory import DynamicMigDevice
from dra_driver.model.mig import GpuAddress, MigProfile, OwnedInstance, OwnedMode, Placement
from dra_driver.model.plan import Plan, PlannedDevice
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import CreateMig, LeaveMigMode, Step
from dra_driver.nvml.mig_changes import MigHardware
from tests.fakes.clock import Clock
from tests.fakes.journal import Journaled
from tests.fakes.machines import SimulatedNode
from tests.fakes.preparing import Crash
from tests.fakes.samples import claim as a_claim
from tests.fakes.samples import result

CHANGES = frozenset({
    "set_mode", "save", "create", "create_compute", "destroy_compute", "destroy", "delete", "add", "change", "remove",
})  # fmt: skip


UNTOUCHED: tuple[object, ...] = ((False, []), set(), set(), {})
"""The `state` of an empty node on which MIG mode was off before."""


class Countdown:
    """Calls `die` after this many changes, from any caller."""

    def __init__(self, changes: int | None = None, die: Callable[[], None] | None = None) -> None:
        self.left = changes
        self.die = die or self._crash
        self.done: list[str] = []

    def counted(self, subject: Any) -> Any:
        return _Counted(subject, self)

    def note(self, name: str) -> None:
        self.done.append(name)
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                self.die()

    def _crash(self) -> None:
        raise Crash


class _Counted:
    def __init__(self, subject: Any, countdown: Countdown) -> None:
        self._subject = subject
        self._countdown = countdown

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._subject, name)
        if name not in CHANGES:
            return found

        def call(*args: Any, **options: Any) -> Any:
            answer = found(*args, **options)
            if name != "add" or answer != args[0]:
                self._countdown.note(name)
            return answer

        return call


class MigNode(Journaled):
    """An instance of the plugin for GPU 0 of a machine."""

    def __init__(self, simulated: SimulatedNode, directory: Path, *, boot_id: str = "boot-1") -> None:
        self.simulated = simulated
        self.machine = simulated.machine
        self.directory = directory
        self.gpu_uuid = self.machine.gpu(0).uuid
        self.address = GpuAddress(self.gpu_uuid, None)
        self.lost: dict[str, tuple[str, ...]] = {}
        self.reported: list[tuple[str, str, str | None]] = []
        self.reported_modes: list[tuple[str, str, str | None]] = []
        self.clock = Clock()
        self.countdown = Countdown()
        self.hardware = MigHardware(nullcontext)
        self.open_journal(directory, boot_id, self.countdown.counted, self.clock)
        self.ownership = MigOwnership(self.ledger)
        self.users = MigHolders(
            self.records, lambda: [name for names in self.lost.values() for name in names]
        )
        self.context = MigContext(
            self.countdown.counted(self.hardware),
            self.countdown.counted(self.ledger),
            self.users,
            self._observed,
            operation=nullcontext,
            clock=self.clock,
            pause=self.clock.pause,
        )
        self.reconnect()

    def reconnect(self, **changes: Any) -> None:
        """Work in another way."""
        self.context = replace(self.context, **changes)
        self.mode = MigMode(self.context)
        self.devices = MigDevices(self.context, self.mode, self.simulated.paths.proc)
        self.work_with(
            StepDispatcher({CreateMig: self.devices, LeaveMigMode: self.devices}), restorers=[self.mode]
        )
        self.cleaner.temporary = [(self.directory, "*/.*.tmp")]

    def without_record(self) -> Collection[str]:
        return self.lost

    def restarted(self, **options: Any) -> MigNode:
        return MigNode(self.simulated, self.directory, **{"boot_id": self.boot_id, **options})

    # --- what is asked for ---------------------------------------------------------------------

    def wanted(self, profile: str, start: int) -> DynamicMigDevice:
        """The device of a profile at a placement of GPU 0."""
        gpu = self.machine.gpu(0)
        row = next(item for item in self.machine.current().model_of(gpu).mig if item.name == profile)
        assert start in row.starts
        return DynamicMigDevice(
            f"gpu-0-mig-{row.id}-{start}",
            Gpu(uuid=gpu.uuid),
            MigProfile(row.id, row.name, row.slices, row.max_instances, 0, 0, 0, 0, 0, 0, row.memory_mib),
            Placement(start, row.size),
        )

    def step(self, wanted: DynamicMigDevice) -> CreateMig:
        profile = wanted.profile
        return CreateMig(wanted.name, self.gpu_uuid, None, profile.profile_id, profile.name, wanted.placement)

    def prepare(
        self,
        wanted: DynamicMigDevice,
        uid: str = "uid-1",
        *others: DynamicMigDevice,
        tries_again: bool = False,
    ) -> ClaimRecord:
        devices = (wanted, *others)
        claim = a_claim(*(item.name for item in devices), uid=uid)
        return self._carry_out(claim, tuple(map(self.step, devices)), *devices, tries_again=tries_again)

    def prepare_whole(self, uid: str = "uid-1") -> ClaimRecord:
        return self._carry_out(a_claim("gpu-0", uid=uid), (LeaveMigMode(self.gpu_uuid, None),))

    def _carry_out(
        self,
        claim: AllocatedClaim,
        steps: tuple[Step, ...],
        *wanted: DynamicMigDevice,
        tries_again: bool = False,
    ) -> ClaimRecord:
        planned = tuple(PlannedDevice(result(item.name), item) for item in wanted)
        plan, known = Plan(claim, planned, steps), self.records.get(claim.ref.uid)
        record = self.executor.intend(plan, known)
        try:
            self.executor.change(plan, record)
            return self.executor.complete(plan, record)
        except Exception as error:
            if record.phase != "prepared" and not (tries_again and isinstance(error, NvmlTransientError)):
                self.executor.remove(record.ref, record)
                self.executor.undo_rest(claim.ref.uid)
            raise

    def unprepare(self, uid: str = "uid-1") -> None:
        record = self.records.get(uid)
        if record is not None:
            self.executor.remove(record.ref, record)
            self.executor.undo_rest(uid)

    def made(self, wanted: DynamicMigDevice) -> OwnedInstance:
        """Return the instance of a device that was created in this boot."""
        found = self.ledger.created_instance(wanted.name)
        assert found is not None
        return found

    def entry_of(self, wanted: DynamicMigDevice) -> OwnedInstance:
        """What the ledger says of a device."""
        [found] = [one for one in self.ledger.details(OwnedInstance) if one.device == wanted.name]
        return found

    def settle(self) -> None:
        """Handle what an earlier instance left, as at a start."""
        self.cleaner.clear_temporary()
        assert self.cleaner.clean_all() == []

    # --- what is there -------------------------------------------------------------------------

    def on_gpu(self) -> tuple[bool, list[tuple[int, int, int, int]]]:
        """MIG mode, and of each GPU instance its ID, profile, start and number of compute instances."""
        gpu = self.machine.gpu(0)
        found = [(item.id, item.profile_id, item.start, len(item.compute)) for item in gpu.instances]
        return bool(gpu.mig_mode), sorted(found)

    def state(self) -> tuple[object, ...]:
        """Return everything that a claim may leave. MIG UUIDs change each time, so only their correctness is
        included.
        """
        uuids = {item.uuid for _, item in self.machine.gpu(0).mig_devices}
        entries = {
            (entry.device, entry.phase, entry.gpu_instance_id, entry.compute_instance_id, entry.gpu_minor,
             entry.uuid in uuids)
            for entry in self.ledger.details(OwnedInstance)
        }  # fmt: skip
        modes = {(mode.gpu_uuid, mode.boot_id) for mode in self.ledger.details(OwnedMode)}
        return self.on_gpu(), entries, modes, dict(self.records.all())

    @contextmanager
    def dying_after(self, changes: int) -> Iterator[list[str]]:
        """Die after so many changes; the next calls go to `restarted`."""
        self.countdown.done.clear()
        self.countdown.left = changes
        try:
            yield self.countdown.done
        finally:
            self.countdown.left = None

    def _observed(self, kind: str, subject: str, _duration_s: float, error: Exception | None) -> None:
        reported = self.reported_modes if kind.startswith("mode-") else self.reported
        reported.append((kind, subject, error and type(error).__name__))


def make_idle(simulated: SimulatedNode, *, mig_mode: bool) -> None:
    """GPU 0 as after a boot: no faults, processes or instances."""
    machine = simulated.machine
    if machine.current().faults:
        machine.clear_faults()
    machine.reboot()
    if bool(machine.gpu(0).mig_mode) != mig_mode:
        machine.set_mig_mode(0, mig_mode)
    simulated.session.reopen()
