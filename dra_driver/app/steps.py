"""Makes what does and undoes the steps of claims."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

from dra_driver.host.driver_programs import NvidiaSmi
from dra_driver.host.vfio import VfioCards
from dra_driver.inventory.detachment import Detachments, closed_elsewhere, nvml_paused
from dra_driver.journal.cleaner import Restorer, StepRunner
from dra_driver.journal.lanes import Lanes
from dra_driver.journal.ledger import Ledger
from dra_driver.mig.devices import MigDevices
from dra_driver.mig.mode import MigContext, MigHolders, MigMode, MigObserver, mig_context
from dra_driver.model.driver_files import FindPrograms
from dra_driver.model.problems import NodeProblem
from dra_driver.model.steps import (
    BindVfio,
    CreateMig,
    LeaveMigMode,
    LockClocks,
    RunMps,
    SetPowerLimit,
    SetTimeSlice,
    Step,
)
from dra_driver.mps_host.host_files import MpsHostFiles
from dra_driver.nvml.gpu_users import PersistenceModes
from dra_driver.nvml.limits import GpuLimits
from dra_driver.nvml.reader import NvmlReader
from dra_driver.passthrough.steps import VfioSteps, nvml_wait_s
from dra_driver.power.steps import ClockSteps, PowerLimitSteps
from dra_driver.sharing.steps import MpsSteps, TimeSliceSteps


class GpuSteps:
    """Does and undoes the steps that change GPUs. `restorers` also restore settings."""

    def __init__(
        self,
        mig: MigContext,
        proc: str,
        vfio: VfioSteps,
        nvidia_smi: NvidiaSmi,
        mps: MpsHostFiles,
        limits: GpuLimits,
        default_w: int | None = None,
        gpus: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        self.mig, self.mig_mode = mig, MigMode(mig)
        self.mig_devices = MigDevices(mig, self.mig_mode, proc)
        time_slices, clocks = TimeSliceSteps(nvidia_smi, mig.ledger), ClockSteps(limits, mig.ledger)
        self.power_limits = PowerLimitSteps(limits, mig.ledger, default_w, gpus)
        self.settings = (time_slices, self.power_limits, clocks)
        self.restorers: tuple[Restorer, ...] = (*self.settings, self.mig_mode)
        self.runners: dict[type[Step], StepRunner[Any]] = {
            CreateMig: self.mig_devices,
            LeaveMigMode: self.mig_devices,
            SetTimeSlice: time_slices,
            SetPowerLimit: self.power_limits,
            LockClocks: clocks,
            RunMps: MpsSteps(mps, mig.ledger),
            BindVfio: vfio,
        }

    def driver_reloaded(self) -> None:
        for setting in self.settings:
            setting.driver_reloaded()

    def mig_mode_changed(self, gpu_uuid: str) -> None:
        self.power_limits.gpu_reset(gpu_uuid)

    def problems(self) -> list[NodeProblem]:
        return [problem for setting in self.settings for problem in setting.problems()]


def gpu_steps(
    ledger: Ledger,
    lanes: Lanes,
    nvml: NvmlReader,
    detachments: Detachments,
    cards: VfioCards,
    proc: str,
    programs: FindPrograms,
    mps: MpsHostFiles,
    lost_devices: Callable[[], Collection[str]],
    rescan: Callable[[float | None], None],
    mig_changed: MigObserver,
    default_w: int | None,
    gpus: Callable[[], Iterable[str]],
) -> GpuSteps:
    """Return the steps. `rescan` is as in `VfioSteps`, `default_w` and `gpus` as in `PowerLimitSteps`."""
    session = nvml.session
    elsewhere = partial(closed_elsewhere, session, detachments, lanes.refuse_other_hangs)
    mig = mig_context(session, elsewhere, ledger, MigHolders(ledger.records, lost_devices), mig_changed)
    operation = partial(session.operation, nvml_wait_s)
    vfio = VfioSteps(
        cards,
        ledger,
        nvml,
        partial(nvml_paused, session, detachments),
        PersistenceModes(operation),
        rescan,
        detachments.detached,
        lanes,
    )
    nvidia_smi, limits = NvidiaSmi(programs, detachments.using_nvml), GpuLimits(operation)
    return GpuSteps(mig, proc, vfio, nvidia_smi, mps, limits, default_w, gpus)
