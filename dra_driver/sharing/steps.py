"""The steps that let several claims use one GPU: time slices and MPS daemons, and their undos."""

from __future__ import annotations

from dra_driver.base.deadline import seconds_for
from dra_driver.errors import (
    DriverGoneError,
    NvmlUnavailableError,
    StateError,
)
from dra_driver.host.driver_programs import NvidiaSmi
from dra_driver.journal.ledger import Ledger
from dra_driver.journal.setting_steps import SettingSteps
from dra_driver.model.claim import ClaimRef
from dra_driver.model.dataclass import dataclass, replace
from dra_driver.model.mps import INTERVALS, MpsDaemonSpec
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import RunMps, SetTimeSlice
from dra_driver.mps_host.host_files import MpsHostFiles

_TIME_SLICE_S = 20.0
_MPS_START_S = 22.0
_MPS_STOP_S = 15.0


class TimeSliceSteps(SettingSteps[SetTimeSlice]):
    """A claim without an interval has no such step."""

    def __init__(self, nvidia_smi: NvidiaSmi, ledger: Ledger) -> None:
        super().__init__(
            SetTimeSlice,
            ledger,
            otherwise="remove the interval from the claim, or select another product",
        )
        self._nvidia_smi = nvidia_smi

    def read(self, step: SetTimeSlice) -> None:
        """Return None: neither NVML nor nvidia-smi reports the level."""

    def write(self, step: SetTimeSlice, value: int | None) -> None:
        timeout = seconds_for(f"set the time slice of GPU {step.gpu_uuid}", _TIME_SLICE_S)
        try:
            self._nvidia_smi.set_time_slice(step.gpu_uuid, value or 0, timeout)
        except NvmlUnavailableError as error:
            if error.has_no_effect:
                raise
            raise DriverGoneError(str(error)) from error

    def text(self, value: int) -> str:
        return INTERVALS[value]


@dataclass(eq=False)
class MpsSteps:
    """Runs one daemon for each device, or for several GPUs of one request; all claims on them use it. Raises: the
    errors of `MpsHostFiles`; StateError if the daemon is in FAULT, or if the MIG device does not exist.
    """

    host: MpsHostFiles
    ledger: Ledger

    def do(self, step: RunMps, plan: Plan) -> None:
        timeout = seconds_for(f"start the MPS daemon of device {step.spec.device}", _MPS_START_S)
        status = self.host.ensure(self._of_today(step.spec), timeout)
        if status.state != "ready":
            raise StateError(
                f"the MPS daemon of device {step.spec.device} is in state {status.state}: "
                f"{status.problem or 'see the files in its log directory'}; stop the processes that use it"
            )

    def undo(self, step: RunMps, ref: ClaimRef) -> None:
        device = step.spec.device
        self.host.stop(device, seconds_for(f"stop the MPS daemon of device {device}", _MPS_STOP_S))

    def _of_today(self, spec: MpsDaemonSpec) -> MpsDaemonSpec:
        """Return the spec with the UUID of a MIG device, which changes at each creation."""
        if spec.uuid:
            return spec
        uuid = self.ledger.created_uuid(spec.device)
        if uuid is None:
            raise StateError(f"MIG device {spec.device} does not exist, so its MPS daemon cannot start")
        return replace(spec, uuid=uuid)

    def in_place(self, step: RunMps, record: ClaimRecord) -> bool:
        """As the MPS host last reported."""
        try:
            return self.host.runs(self._of_today(step.spec))
        except StateError:
            return False
