"""Makes what does and undoes the steps of claims, for the daemon, `cleanup --now` and tests."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from dra_driver.host.driver_programs import NvidiaSmi
from dra_driver.host.vfio import VfioCards
from dra_driver.inventory.detachment import Detachments, closed_elsewhere, nvml_pause
from dra_driver.journal.cleaner import Restorer, StepRunner
from dra_driver.journal.lanes import Lanes
from dra_driver.journal.ledger import Ledger
from dra_driver.mig.devices import MigDevices
from dra_driver.mig.mode import MigContext, MigHolders, MigMode, MigObserver, mig_context
from dra_driver.model.driver_files import FindPrograms
from dra_driver.model.steps import (
    BindVfio,
    CreateMig,
    LeaveMigMode,
    RunMps,
    SetTimeSlice,
    Step,
)
from dra_driver.mps_host.host_files import MpsHostFiles
from dra_driver.nvml.gpu_users import PersistenceModes
from dra_driver.nvml.reader import NvmlReader
from dra_driver.passthrough.steps import VfioSteps, nvml_wait_s
from dra_driver.sharing.steps import MpsSteps, TimeSliceSteps


class GpuSteps:
    """Does and undoes the steps that change GPUs: `runners`. `restorers` are those that also restore settings."""

    def __init__(
        self, mig: MigContext, proc: str, vfio: VfioSteps, nvidia_smi: NvidiaSmi, mps: MpsHostFiles
    ) -> None:
        self.mig, self.mig_mode = mig, MigMode(mig)
        self.mig_devices = MigDevices(mig, self.mig_mode, proc)
        self._time_slices = TimeSliceSteps(nvidia_smi, mig.ledger)
        self.restorers: tuple[Restorer, ...] = (self._time_slices, self.mig_mode)
        self.runners: dict[type[Step], StepRunner[Any]] = {
            CreateMig: self.mig_devices,
            LeaveMigMode: self.mig_devices,
            SetTimeSlice: self._time_slices,
            RunMps: MpsSteps(mps, mig.ledger),
            BindVfio: vfio,
        }

    def driver_reloaded(self) -> None:
        """Note that the NVIDIA driver was reloaded or the GPUs changed, so settings may be lost."""
        self._time_slices.driver_reloaded()


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
) -> GpuSteps:
    """Return the steps on the GPUs of this node. `rescan` is as in `VfioSteps`."""
    session = nvml.session
    elsewhere = closed_elsewhere(session, detachments, lanes.refuse_other_hangs)
    mig = mig_context(session, elsewhere, ledger, MigHolders(ledger.records, lost_devices), mig_changed)
    vfio = VfioSteps(
        cards,
        ledger,
        nvml,
        nvml_pause(session, detachments),
        PersistenceModes(partial(session.operation, nvml_wait_s)),
        rescan,
        detachments.detached,
        lanes,
    )
    return GpuSteps(mig, proc, vfio, NvidiaSmi(programs, detachments.using_nvml), mps)
