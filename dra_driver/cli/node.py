"""Reads this node for several commands, without waiting for a call that hangs."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path

from dra_driver.app.handover import WorkerLock
from dra_driver.app.settings import Settings
from dra_driver.app.steps import gpu_steps
from dra_driver.base.atomic import write_atomically
from dra_driver.base.threads import BoundedCall
from dra_driver.cdi.directory import CdiDirectory
from dra_driver.claims.specs_without_record import SpecsWithoutRecord
from dra_driver.cli.machine import CommandMachine, unread
from dra_driver.cli.rules.node_state import NodeState
from dra_driver.cli.rules.node_view import NodeView, NvmlFacts, node_view
from dra_driver.cli.rules.prepared_claims import NodeClaims
from dra_driver.cli.state_on_disk import (
    is_only_simulated,
    plugin_problems,
    plugin_runs,
    read_claims,
    read_state,
)
from dra_driver.errors import DeviceLostError, DraDriverError, NvmlUnavailableError, StateError
from dra_driver.host.driver_programs import InstalledPrograms
from dra_driver.host.processes import origin
from dra_driver.host.sysfs import Sysfs
from dra_driver.journal.cleaner import RETRY_FILE, Cleaner
from dra_driver.journal.executor import StepDispatcher
from dra_driver.journal.lanes import Lanes
from dra_driver.journal.ledger import DIRECTORY as LEDGER
from dra_driver.journal.ledger import Ledger
from dra_driver.journal.locks import GpuLocks
from dra_driver.journal.records import RecordStore
from dra_driver.journal.rules.cleanups import PendingCleanup
from dra_driver.model.dataclass import dataclass, replace
from dra_driver.model.gpu import Gpu, GpuLoad, GpuProcess
from dra_driver.model.health import PolledHealth
from dra_driver.model.inventory import Inventory
from dra_driver.model.mps import MpsDaemonStatus
from dra_driver.model.problems import NodeProblem
from dra_driver.mps_host.host_files import MpsHostFiles, mps_layout
from dra_driver.nvml.gpu_users import read_gpu_processes
from dra_driver.nvml.health_polls import read_health
from dra_driver.nvml.mig_reading import gpu_handle
from dra_driver.nvml.usage_source import read_load, with_utilisation

_RETRIED_WITHIN_S = 15.0
"""The plugin sees the request within a second; an undo may take longer."""
_LOOK_EVERY_S = 0.3


@dataclass(eq=False)
class NodeSnapshot:
    """Reads the node repeatedly. NVML stays open between reads."""

    machine: CommandMachine
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)

    def __post_init__(self) -> None:
        machine = self.machine
        self.nvml = machine.nvml_reader(lambda gpu: gpu.mig_enabled or machine.is_on_demand(gpu))
        self._is_open = False
        self._facts = BoundedCall("NVML", lambda: self.read_gpus(self.read_inventory()))
        self._mps = MpsHostFiles(mps_layout(machine.settings.plugin_directory))

    def close(self) -> None:
        if not self._facts.is_running:
            self.nvml.session.close()

    def view(self, wait_s: float) -> NodeView:
        """Return all that can be read, waiting up to `wait_s` seconds for NVML."""
        settings, now, notes = self.machine.settings, self.clock(), list[str]()
        self._facts.start()
        daemons: Sequence[MpsDaemonStatus] = ()
        try:
            daemons = self._mps.statuses()
        except StateError as error:
            notes.append(f"MPS daemons are not shown: {error}")
        state = self.machine.state()
        claims = read_claims(state, settings, now)
        problems: list[NodeProblem] = []
        if not is_only_simulated(settings):
            reported = plugin_problems(settings.plugin_directory, settings.http_endpoint).problems
            # The notes have the pending cleanups from the ledgers, even if no plugin runs.
            problems += [one for one in reported if one.code != "cleanup-pending"]
        nvml, nvml_problem = self._facts.result(wait_s)
        nvml = nvml or NvmlFacts()
        if nvml_problem is not None:
            problems.append(NodeProblem("nvml-unavailable", nvml_problem, since=int(now.timestamp())))
        notes += [
            *state.notes,
            *(one.text for one in claims.cleanups),
            *claims.problems,
            *unread(nvml.inventory),
        ]
        node, driver = settings.node_name, settings.driver_name
        runs = plugin_runs(settings.plugin_directory)
        return node_view(
            node, driver, now, nvml, claims.claims, state, daemons, notes, problems, plugin_runs=runs
        )

    def read_inventory(self) -> Inventory:
        # While the node is detached, gpu-dra-driver has closed NVML, and this process must not keep it open.
        if self._is_open and self.machine.detachments.problem() is not None:
            self.nvml.session.close()
            self._is_open = False
        if not self._is_open:
            self.nvml.reopen()
        # Set only on success: after a failure, or to list a GPU that came back, NVML must be reopened.
        self._is_open = False
        found = self.nvml.read_inventory()
        return replace(found, cards=self.machine.cards_under_vfio(found.gpus))

    def read_gpus(self, inventory: Inventory) -> NvmlFacts:
        """Return what NVML reports for the GPUs of a fresh inventory.

        Raises: DraDriverError; the next read then reopens NVML.
        """
        loads: dict[str, GpuLoad] = {}
        polled: dict[str, PolledHealth] = {}
        processes: dict[str, Sequence[GpuProcess]] = {}

        def read(gpu: Gpu) -> None:
            handle = gpu_handle(gpu.uuid, gpu.pci_bus_id)
            load = loads[gpu.uuid] = read_load(gpu.uuid, handle)
            polled[gpu.uuid] = read_health(gpu.uuid, handle)
            listed = read_gpu_processes(gpu.uuid, handle)
            processes[gpu.uuid] = with_utilisation(handle, listed, load.utilisation_percent)

        lost: set[str] = set()
        for uuid, answer in self.nvml.of_each(inventory.gpus, read).items():
            try:
                answer.result()
            except DeviceLostError:
                lost.add(uuid)
            except NvmlUnavailableError:
                raise
            except DraDriverError:
                continue
        # Copies, because a hanging call may return and change the originals at any moment.
        loads, polled, processes = dict(loads), dict(polled), dict(processes)
        self._is_open = None not in self.nvml.nvml_fingerprint()
        proc = self.machine.paths.proc
        pids = {process.pid for listed in processes.values() for process in listed}
        # A GPU that answers no query has a UUID but no PCI bus ID.
        shown = {known for gpu in inventory.gpus for known in (gpu.pci_bus_id, gpu.uuid) if known}
        bound = self.machine.sysfs.gpus_of_the_nvidia_driver()
        hidden = {bus_id: uuid for bus_id, uuid in bound.items() if shown.isdisjoint((bus_id, uuid))}
        origins = {pid: origin(proc, pid) for pid in pids}
        return NvmlFacts(inventory, loads, polled, frozenset(lost), hidden, processes, origins)


def prepared_claims(settings: Settings) -> NodeClaims:
    # A simulated machine has its own boot ID. It is read directly, because creating the platform would repair
    # the machine.
    proc = "/proc" if settings.simulator_dir is None else f"{settings.simulator_dir}/root/proc"
    directory = settings.plugin_directory
    specs = CdiDirectory(settings.cdi_root, settings.driver_name)
    state = read_state(directory, Sysfs(proc=proc).boot_id(), specs)
    found = read_claims(state, settings, datetime.now(UTC))
    failing = plugin_problems(directory, settings.http_endpoint).failing
    return replace(found, failing=failing, running=_running(state, GpuLocks(directory / "locks")))


def _running(state: NodeState, locks: GpuLocks) -> Mapping[str, str]:
    """Return a busy GPU for each claim that is being prepared, by claim UID.

    Nothing has begun in this boot for a claim of an earlier boot.
    """
    with suppress(StateError):
        return {
            record.ref.uid: busy[0]
            for record in state.records
            if record.phase == "preparing" and state.boot_id in (None, record.boot_id)
            if (busy := sorted(filter(locks.is_held, record.gpu_uuids)))
        }
    return {}


def pending_cleanup(settings: Settings, *, now: bool) -> tuple[Sequence[PendingCleanup], Sequence[str]]:
    """Return the pending cleanups and read errors. With `now`, the plugin, or this process if no plugin works on the
    node, first retries all cleanups. Raises: StateError.
    """
    machine, directory = CommandMachine(settings), settings.plugin_directory
    state = machine.state()
    if not now or not state.cleanups:
        return state.cleanups, state.faults
    lock = WorkerLock(directory)
    if lock.take():
        left, hanging = _cleaned(machine, settings)
        if not hanging:  # otherwise the end of this process releases it
            lock.close()
        return left, state.faults
    lock.close()
    write_atomically(directory / RETRY_FILE, b"", durable=False)
    until = time.monotonic() + _RETRIED_WITHIN_S
    while state.cleanups and time.monotonic() < until:
        time.sleep(_LOOK_EVERY_S)
        state = machine.state()
    return state.cleanups, state.faults


def _cleaned(machine: CommandMachine, settings: Settings) -> tuple[Sequence[PendingCleanup], Collection[str]]:
    directory = settings.plugin_directory
    boot = machine.sysfs.this_boot()
    records = RecordStore(directory / "claims", boot)
    programs = InstalledPrograms(machine.paths.driver_root, directory / "host.lib")
    without_record = SpecsWithoutRecord(records, CdiDirectory(Path(settings.cdi_root), settings.driver_name))
    ledger = Ledger(directory / LEDGER, records, boot, without_record.uids)
    nvml, lanes = machine.nvml_reader(machine.is_on_demand), Lanes(GpuLocks(directory / "locks"))
    steps = gpu_steps(
        ledger,
        lanes,
        nvml,
        machine.detachments,
        machine.vfio,
        machine.paths.proc,
        programs,
        MpsHostFiles(mps_layout(directory)),
        without_record.lost_devices,
        # NVML must be reopened to list a GPU that came back.
        lambda wait_s: None if wait_s is None else nvml.reopen(),
        lambda *_: None,
        settings.power.default_w,
        tuple,
    )
    with closing(nvml.session):
        with suppress(DraDriverError):  # an undo that needs NVML says why
            nvml.reopen()
        return Cleaner(
            ledger, lanes, StepDispatcher(steps.runners), restorers=steps.restorers
        ).clean_all(), lanes.under_way()
