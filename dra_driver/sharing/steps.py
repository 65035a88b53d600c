"""The steps that let several claims use one GPU: time slices and MPS daemons, and their undos."""

from __future__ import annotations

import structlog

from dra_driver.base.deadline import seconds_for
from dra_driver.errors import (
    ClaimRefusedError,
    DraDriverError,
    NotSupportedError,
    NvmlUnavailableError,
    StateError,
)
from dra_driver.host.driver_programs import NvidiaSmi
from dra_driver.journal.ledger import Ledger
from dra_driver.journal.records import RecordStore
from dra_driver.model.claim import ClaimRef
from dra_driver.model.dataclass import dataclass, replace
from dra_driver.model.mps import MpsDaemonSpec
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord, RunMps, SetTimeSlice
from dra_driver.mps_host.host_files import MpsHostFiles

_log = structlog.get_logger(__name__)

_TIME_SLICE_S = 20.0
_MPS_START_S = 22.0
_MPS_STOP_S = 15.0


class TimeSliceSteps:
    """Runs and undoes `SetTimeSlice`. A claim without an interval has no such step.

    Also a `Restorer` of the cleaner: restores time slices that a reload of the NVIDIA driver reset.
    """

    what = "restoring the time slice after a reload of the NVIDIA driver"

    def __init__(self, nvidia_smi: NvidiaSmi, records: RecordStore) -> None:
        self._nvidia_smi = nvidia_smi
        self._records = records
        self._reloads = self._reloads_handled = 0
        self._lost: dict[tuple[str, SetTimeSlice], str | None] = {}  # the last error

    def do(self, step: SetTimeSlice, plan: Plan) -> None:
        """Set the time slice, whatever its current value: a reboot or driver reload resets it.

        Raises: ClaimRefusedError if the GPU does not support it; the errors of `NvidiaSmi.set_time_slice`.
        """
        timeout = seconds_for(f"set the time slice of GPU {step.gpu_uuid}", _TIME_SLICE_S)
        try:
            self._nvidia_smi.set_time_slice(step.gpu_uuid, step.interval, timeout)
        except NotSupportedError as error:
            raise ClaimRefusedError(
                f"{error}; remove the interval from the claim, or select another product"
            ) from error

    def undo(self, step: SetTimeSlice, ref: ClaimRef) -> None:
        """Restores the default time slice. Raises: RetryableError, StateError."""
        try:
            timeout = seconds_for(f"reset the time slice of GPU {step.gpu_uuid}", _TIME_SLICE_S)
            self._nvidia_smi.set_time_slice(step.gpu_uuid, 0, timeout)
        except (NotSupportedError, NvmlUnavailableError) as error:
            if error.has_no_effect:
                raise
            # Without the driver or GPU the setting no longer exists.
            _log.info("time_slice_not_reset", gpu_uuid=step.gpu_uuid, reason=str(error))

    def in_place(self, step: SetTimeSlice, record: ClaimRecord) -> bool:
        """Return True: the driver does not report the current time slice."""
        return True

    def driver_reloaded(self) -> None:
        """Note that the NVIDIA driver was reloaded or the GPUs changed, so every time slice may be lost."""
        self._reloads += 1

    def gpus(self) -> set[str]:
        """Return the GPUs with lost time slices. Raises: StateError.

        MPS daemons are not included: the MPS host restores them.
        """
        reloads = self._reloads
        if reloads != self._reloads_handled:
            records = self._records.all()
            self._reloads_handled = reloads
            for uid, record in records.items():
                self._lost |= {(uid, step): None for step in record.steps if isinstance(step, SetTimeSlice)}
        return {step.gpu_uuid for _, step in self._lost.copy()}

    def restore(self, gpu_uuid: str) -> None:
        """Restores the lost time slice of a GPU. Runs in the GPU's lane. Logs each failure reason once.

        Raises: RetryableError, StateError; the time slice then counts as lost until the next attempt.
        """
        for lost, reason in self._lost.copy().items():
            (uid, step), reloads = lost, self._reloads
            if step.gpu_uuid != gpu_uuid:
                continue
            try:
                record = self._records.get(uid)
                if record is not None and step in record.steps:
                    self._nvidia_smi.set_time_slice(gpu_uuid, step.interval)
                    _log.info("time_slice_restored", gpu_uuid=gpu_uuid, claim_uid=uid)
            except DraDriverError as error:
                if reason != str(error):
                    _log.error("time_slice_lost", gpu_uuid=gpu_uuid, claim_uid=uid, reason=str(error))
                if not isinstance(error, NotSupportedError):
                    self._lost[lost] = str(error)
                    raise
            if reloads == self._reloads:
                self._lost.pop(lost, None)


@dataclass(eq=False)
class MpsSteps:
    """Runs and undoes `RunMps`: one daemon for each device, or for several GPUs of one request. All claims that share
    the devices use the same daemon.
    """

    host: MpsHostFiles
    ledger: Ledger

    def do(self, step: RunMps, plan: Plan) -> None:
        """Start the daemon if necessary, and wait until it responds. Raises: the errors of `MpsHostFiles.ensure`;
        StateError if the daemon is in FAULT, or if the MIG device does not exist.
        """
        timeout = seconds_for(f"start the MPS daemon of device {step.spec.device}", _MPS_START_S)
        status = self.host.ensure(self._of_today(step.spec), timeout)
        if status.state != "ready":
            raise StateError(
                f"the MPS daemon of device {step.spec.device} is in state {status.state}: "
                f"{status.problem or 'see the files in its log directory'}; stop the processes that use it"
            )

    def undo(self, step: RunMps, ref: ClaimRef) -> None:
        """Stop the daemon. Raises: the errors of `MpsHostFiles.stop`."""
        device = step.spec.device
        self.host.stop(device, seconds_for(f"stop the MPS daemon of device {device}", _MPS_STOP_S))

    def _of_today(self, spec: MpsDaemonSpec) -> MpsDaemonSpec:
        """Return the spec with the current UUID of a MIG device, which changes each time it is created."""
        if spec.uuid:
            return spec
        uuid = self.ledger.created_uuid(spec.device)
        if uuid is None:
            raise StateError(f"MIG device {spec.device} does not exist, so its MPS daemon cannot start")
        return replace(spec, uuid=uuid)

    def in_place(self, step: RunMps, record: ClaimRecord) -> bool:
        """Whether the MPS host last reported that the device's daemon runs with these settings."""
        try:
            return self.host.runs(self._of_today(step.spec))
        except StateError:
            return False
