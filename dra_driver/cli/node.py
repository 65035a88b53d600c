"""What `top`, `claims` and `cleanup` find out about this node."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from dra_driver.app.settings import Settings
from dra_driver.cdi.directory import CdiDirectory
from dra_driver.claims.specs_without_record import SpecsWithoutRecord
from dra_driver.cli.machine import CommandMachine
from dra_driver.cli.plugin_problems import plugin_problems
from dra_driver.cli.rules.node_state import NodeState
from dra_driver.cli.rules.prepared_claims import NodeClaims, RunningStep
from dra_driver.cli.snapshot import NodePaths, NodeSnapshot
from dra_driver.cli.state_on_disk import read_claims, read_state
from dra_driver.host.driver_programs import InstalledPrograms, NvidiaSmi
from dra_driver.host.sysfs import Sysfs
from dra_driver.inventory.detachment import nvml_pause
from dra_driver.journal.cleaner import Cleaner
from dra_driver.journal.executor import StepDispatcher
from dra_driver.journal.lanes import Lanes
from dra_driver.journal.ledger import DIRECTORY as LEDGER
from dra_driver.journal.ledger import Ledger
from dra_driver.journal.locks import GpuLocks, LockUse
from dra_driver.journal.records import RecordStore
from dra_driver.journal.rules.cleanups import PendingCleanup
from dra_driver.model.record import BindVfio, RunMps, SetTimeSlice
from dra_driver.mps_host.host_files import MpsHostFiles, mps_layout
from dra_driver.passthrough.steps import VfioSteps, waits_for_nvml
from dra_driver.sharing.steps import MpsSteps, TimeSliceSteps


def node_snapshot(machine: CommandMachine) -> NodeSnapshot:
    """The node as `top` shows it."""
    settings = machine.settings
    paths = NodePaths(
        node=settings.node_name,
        driver=settings.driver_name,
        plugin_directory=settings.plugin_directory,
        cdi_root=Path(settings.cdi_root),
        boot_id=machine.boot_id,
        proc=machine.paths.proc,
        sys=machine.paths.sys,
    )
    return NodeSnapshot(
        paths,
        machine.nvml_reader(machine.is_on_demand),
        machine.is_on_demand,
        is_detached=lambda: machine.detachments.problem() is not None,
        cards=machine.cards_under_vfio,
        problems=lambda: plugin_problems(settings.plugin_directory, settings.http_endpoint).problems,
    )


def prepared_claims(settings: Settings) -> NodeClaims:
    """What is prepared on this node, from its files alone."""
    # A simulated machine has its own boot ID. It is read here directly, because making the platform would repair the
    # machine.
    proc = "/proc" if settings.simulator_dir is None else f"{settings.simulator_dir}/root/proc"
    directory, cdi_root = settings.plugin_directory, Path(settings.cdi_root)
    specs = CdiDirectory(cdi_root, settings.driver_name)
    state = read_state(directory, Sysfs(proc=proc).boot_id(), specs)
    found = read_claims(state, directory, cdi_root, settings.driver_name, datetime.now(UTC))
    failing = plugin_problems(directory, settings.http_endpoint).failing
    return replace(
        found, failing=failing, running=_running_steps(state, GpuLocks(directory / "locks").uses())
    )


def _running_steps(state: NodeState, uses: Iterable[LockUse]) -> Mapping[str, RunningStep]:
    """The step under way on the GPUs of each claim that is being prepared, by claim UID. A record of an earlier boot
    has none: nothing has begun for it in this boot."""
    now, by_gpu = time.monotonic(), {use.gpu_uuid: use for use in uses}
    return {
        record.ref.uid: RunningStep(by_gpu[uuid].what, uuid, max(0.0, now - by_gpu[uuid].began))
        for record in state.records
        if record.phase == "preparing" and state.boot_id in (None, record.boot_id)
        for uuid in sorted(record.gpu_uuids & by_gpu.keys())[:1]
    }


def pending_cleanup(settings: Settings, *, now: bool) -> tuple[Sequence[PendingCleanup], Sequence[str]]:
    """The pending cleanups, and what could not be read of them. With `now` everything is tried first. Raises:
    StateError if that needs rights that this process does not have."""
    machine, directory = CommandMachine(settings), settings.plugin_directory
    state = machine.state()
    if not now or not state.cleanups:
        return state.cleanups, state.faults
    boot = machine.sysfs.this_boot()
    records = RecordStore(directory / "claims", boot)
    programs = InstalledPrograms(machine.paths.driver_root, directory / "host.lib")
    smi = NvidiaSmi(programs, machine.detachments.using_nvml)
    without_record = SpecsWithoutRecord(records, CdiDirectory(Path(settings.cdi_root), settings.driver_name))
    ledger = Ledger(directory / LEDGER, records, boot, without_record.uids)
    from dra_driver.nvml.gpu_users import PersistenceModes

    nvml, lanes = machine.nvml_reader(machine.is_on_demand), Lanes(GpuLocks(directory / "locks"))
    vfio = VfioSteps(
        machine.vfio,
        ledger,
        nvml,
        nvml_pause(nvml.session, machine.detachments),
        PersistenceModes(partial(nvml.session.operation, waits_for_nvml)),
        # NVML shows a GPU that has come back when it is opened.
        lambda wait_s: None if wait_s is None else nvml.reopen(),
        machine.detachments.detached,
        lanes,
    )
    runner = StepDispatcher(
        {
            BindVfio: vfio,
            SetTimeSlice: TimeSliceSteps(smi, records),
            RunMps: MpsSteps(MpsHostFiles(mps_layout(directory)), ledger),
        }
    )
    with closing(nvml.session):
        left = Cleaner(ledger, lanes, runner).clean_all()
    return left, state.faults
