"""One GPU of a simulated machine with everything that makes MIG devices: real ledger, records and locks, the real
binding below. `restarted` is the next instance of the plugin over the same directory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from dra_driver.errors import NvmlTransientError
from dra_driver.journal.cleaner import Cleaner
from dra_driver.journal.executor import StepDispatcher
from dra_driver.mig.collector import MigCollector
from dra_driver.mig.context import MigContext
from dra_driver.mig.create import MigDevices
from dra_driver.mig.holders import MigHolders
from dra_driver.mig.ledger import MigLedger
from dra_driver.mig.steps import MigSteps
from dra_driver.model.claim import AllocatedClaim
from dra_driver.model.gpu import Gpu
from dra_driver.model.inventory import DynamicMigDevice
from dra_driver.model.mig import GpuAddress, MigProfile, OwnedInstance, Placement
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
    "own_mode", "set_mode", "save", "create", "create_compute", "destroy_compute", "destroy", "delete", "disown_mode",
    "add", "change",
})  # fmt: skip


UNTOUCHED: tuple[object, ...] = ((False, []), set(), set(), {})
"""The `state` of a node of which nothing is left, where MIG mode was off before."""


class Countdown:
    """Calls `die` after so many changes, whoever makes them."""

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
        self.lost: tuple[str, ...] = ()
        self.told: list[tuple[str, str, str | None]] = []
        self.told_of_modes: list[tuple[str, str, str | None]] = []
        self.left_over = 0
        self.changes = 0
        self.clock = Clock()
        self.countdown = Countdown()
        self.hardware = MigHardware(nullcontext)
        self.ledger = MigLedger(directory / "mig", boot_id, self.clock)
        self.ledger.open()
        self.open_journal(directory, boot_id, self.countdown.counted)
        self.users = MigHolders(self.records, lambda: self.lost)
        self.context = MigContext(
            self.countdown.counted(self.hardware),
            self.countdown.counted(self.ledger),
            self.users,
            self._observed,
            left_over=self._left_over,
            operation=nullcontext,
            clock=self.clock,
            pause=self.clock.pause,
        )
        self.devices = MigDevices(self.context)
        self.steps = MigSteps(self.context, self.devices, simulated.paths.proc)
        self.work_with(StepDispatcher({CreateMig: self.steps, LeaveMigMode: self.steps}))
        self.cleaner.temporary = [(directory, "*/.*.tmp")]
        self.collector = MigCollector(self.context, self.devices, self._changed)

    def loop(self) -> Cleaner:
        """The loop that works off what is left over, by the node's clock."""
        return Cleaner(self.gpu_ledger, self.lanes, self.runner, keepers=[self.collector], clock=self.clock)

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
            return self.executor.finish(plan, record)
        except Exception as error:
            if record.phase != "prepared" and not (tries_again and isinstance(error, NvmlTransientError)):
                self.executor.leave(record)
                self.executor.clean(claim.ref.uid)
            raise

    def unprepare(self, uid: str = "uid-1") -> None:
        record = self.records.get(uid)
        if record is not None:
            self.executor.leave(record)
            self.executor.clean(uid)

    def made(self, wanted: DynamicMigDevice) -> OwnedInstance:
        """The instance of a device that was made in this boot."""
        found = self.ledger.created_instance(wanted.name)
        assert found is not None
        return found

    def entry_of(self, wanted: DynamicMigDevice) -> OwnedInstance:
        """The ledger's entry of a device that has one."""
        found = self.ledger.get(wanted.name)
        assert found is not None
        return found

    def settle(self) -> None:
        """What a start does with what an earlier instance has left."""
        self.cleaner.clear_temporary()
        assert self.cleaner.clean_all() == []
        self.work_off()

    # --- what is there -------------------------------------------------------------------------

    def on_gpu(self) -> tuple[bool, list[tuple[int, int, int, int]]]:
        """MIG mode, and of each GPU instance its ID, profile, start and number of compute instances."""
        gpu = self.machine.gpu(0)
        found = [(item.id, item.profile_id, item.start, len(item.compute)) for item in gpu.instances]
        return bool(gpu.mig_mode), sorted(found)

    def state(self) -> tuple[object, ...]:
        """Everything that a claim may leave. MIG UUIDs are other ones each time: only that they are right counts."""
        uuids = {item.uuid for _, item in self.machine.gpu(0).mig_devices}
        entries = {
            (entry.device, entry.phase, entry.gpu_instance_id, entry.compute_instance_id, entry.gpu_minor,
             entry.uuid in uuids)
            for entry in self.ledger.all().values()
        }  # fmt: skip
        modes = {(uuid, mode.boot_id) for uuid, mode in self.ledger.owned_modes().items()}
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
        told = self.told_of_modes if kind.startswith("mode-") else self.told
        told.append((kind, subject, error and type(error).__name__))

    def _left_over(self) -> None:
        self.left_over += 1

    def _changed(self) -> None:
        self.changes += 1


def make_idle(simulated: SimulatedNode, *, mig_mode: bool) -> None:
    """GPU 0 as after a boot: no faults, processes or instances."""
    machine = simulated.machine
    if machine.current().faults:
        machine.clear_faults()
    machine.reboot()
    if bool(machine.gpu(0).mig_mode) != mig_mode:
        machine.set_mig_mode(0, mig_mode)
    simulated.session.reopen()
