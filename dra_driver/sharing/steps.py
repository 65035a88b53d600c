"""The steps that let several claims use one GPU: time slices and MPS daemons, with their undos."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
from dra_driver.model.mps import MpsDaemonSpec
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord, RunMps, SetTimeSlice
from dra_driver.mps_host.host_files import MpsHostFiles

_log = structlog.get_logger(__name__)

_TIME_SLICE_S = 20.0
_MPS_START_S = 22.0
_MPS_STOP_S = 15.0


class TimeSliceSteps:
    """Does and undoes `SetTimeSlice`. A claim that asks for no interval has no such step and touches nothing. It is a
    `Keeper` of the cleaner for the time slices that a reload of the NVIDIA driver lost."""

    what = "the setting of the time slice after a reload of the NVIDIA driver"

    def __init__(self, nvidia_smi: NvidiaSmi, records: RecordStore) -> None:
        self._nvidia_smi = nvidia_smi
        self._records = records
        self._reloads = self._looked_at = 0
        self._lost: dict[tuple[str, SetTimeSlice], str | None] = {}  # with why it could not be set again

    def do(self, step: SetTimeSlice, plan: Plan) -> None:
        """Set it again, whatever it is now: a reboot or a driver reload forgets it.

        Raises: ClaimRefusedError if the GPU cannot; as `NvidiaSmi.set_time_slice`.
        """
        timeout = seconds_for(f"set the time slice of GPU {step.gpu_uuid}", _TIME_SLICE_S)
        try:
            self._nvidia_smi.set_time_slice(step.gpu_uuid, step.interval, timeout)
        except NotSupportedError as error:
            raise ClaimRefusedError(
                f"{error}; ask for no interval, or select another product in the claim"
            ) from error

    def undo(self, step: SetTimeSlice, record: ClaimRecord) -> None:
        """Back to the default. Raises: RetryableError."""
        try:
            timeout = seconds_for(f"reset the time slice of GPU {step.gpu_uuid}", _TIME_SLICE_S)
            self._nvidia_smi.set_time_slice(step.gpu_uuid, 0, timeout)
        except (NotSupportedError, NvmlUnavailableError) as error:
            if error.has_no_effect:
                raise
            # Without driver or GPU the setting is gone with them.
            _log.info("time_slice_not_reset", gpu_uuid=step.gpu_uuid, reason=str(error))

    def in_place(self, step: SetTimeSlice, record: ClaimRecord) -> bool:
        """Taken for granted: only the GPU driver could tell."""
        return True

    def driver_reloaded(self) -> None:
        """The NVIDIA driver was loaded anew, or the GPUs are others than before: every time slice may be lost."""
        self._reloads += 1

    def gpus(self) -> set[str]:
        """The GPUs of lost time slices. MPS daemons are the MPS host's business. Raises: StateError."""
        reloads = self._reloads
        if reloads != self._looked_at:
            records = self._records.all()
            self._looked_at = reloads
            for uid, record in records.items():
                self._lost |= {(uid, step): None for step in record.steps if isinstance(step, SetTimeSlice)}
        return {step.gpu_uuid for _, step in self._lost.copy()}

    def put_right(self, gpu_uuid: str) -> None:
        """Set the lost time slice of a GPU again; its lane runs it. A GPU that refuses is logged once for each reason.
        Raises: RetryableError, StateError; then it stays lost."""
        for lost, reason in self._lost.copy().items():
            (uid, step), reloads = lost, self._reloads
            if step.gpu_uuid != gpu_uuid:
                continue
            try:
                record = self._records.get(uid)
                if record is not None and step in record.steps:
                    self._nvidia_smi.set_time_slice(gpu_uuid, step.interval)
                    _log.info("time_slice_set_again", gpu_uuid=gpu_uuid, claim_uid=uid)
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
    """Does and undoes `RunMps`: one daemon a device, or for several GPUs of one request, for all claims that
    share them.
    """

    host: MpsHostFiles
    ledger: Ledger

    def do(self, step: RunMps, plan: Plan) -> None:
        """Have the daemon run and answer. Raises: RetryableError, ClaimRefusedError."""
        timeout = seconds_for(f"start the MPS daemon of device {step.spec.device}", _MPS_START_S)
        status = self.host.ensure(self._of_today(step.spec), timeout)
        if status.state != "ready":
            raise StateError(
                f"the MPS daemon of device {step.spec.device} is in state {status.state}: "
                f"{status.problem or 'see the files in its log directory'}; end the processes that use it"
            )

    def undo(self, step: RunMps, record: ClaimRecord) -> None:
        """Stop the daemon. Raises: RetryableError."""
        device = step.spec.device
        self.host.stop(device, seconds_for(f"stop the MPS daemon of device {device}", _MPS_STOP_S))

    def _of_today(self, spec: MpsDaemonSpec) -> MpsDaemonSpec:
        """The spec with the UUID that the device has now, where each making gives it another one."""
        if spec.uuid:
            return spec
        uuid = self.ledger.created_uuid(spec.device)
        if uuid is None:
            raise StateError(f"MIG device {spec.device} was not made before its MPS daemon is started")
        return replace(spec, uuid=uuid)

    def in_place(self, step: RunMps, record: ClaimRecord) -> bool:
        """Whether the device's daemon runs with these settings, as the MPS host reported last."""
        try:
            return self.host.runs(self._of_today(step.spec))
        except StateError:
            return False
