"""The steps that make MIG devices and take GPUs out of MIG mode, with their undos."""

from __future__ import annotations

import structlog

from dra_driver.base.deadline import seconds_for
from dra_driver.errors import (
    ClaimRefusedError,
    DraDriverError,
    NotSupportedError,
)
from dra_driver.host.capability_nodes import MigCaps
from dra_driver.mig.context import MigContext
from dra_driver.mig.create import MigDevices
from dra_driver.model.plan import Plan
from dra_driver.model.record import ClaimRecord
from dra_driver.model.steps import CreateMig, LeaveMigMode, Step

_log = structlog.get_logger(__name__)

_BUSY_S = 0.5


class MigSteps:
    """Does and undoes `CreateMig` and `LeaveMigMode`. The caller holds the GPU's lock."""

    def __init__(self, context: MigContext, devices: MigDevices, proc: str) -> None:
        """`proc` is the host's procfs."""
        self._operation = context.operation
        self._ledger = context.ledger
        self._users = context.users
        self._devices = devices
        self._proc = proc

    def do(self, step: Step, plan: Plan) -> None:
        """Have the device exist, or the GPU whole. Raises: ClaimRefusedError, RetryableError, StateError."""
        try:
            with self._operation():
                if isinstance(step, CreateMig):
                    self._devices.create(step)
                elif isinstance(step, LeaveMigMode):
                    self._devices.make_whole(step)
        except NotSupportedError as error:
            raise ClaimRefusedError(
                f"{error}; delete the pod and its claim so that they are allocated anew"
            ) from error

    def undo(self, step: Step, record: ClaimRecord) -> None:
        """Destroy the device with the last claim that uses it. If it cannot be destroyed now, the ledger says that it
        is to go, and the collector tries again. Raises: StateError if the ledger cannot be written."""
        if not isinstance(step, CreateMig) or step.device in self._users.by_device(record.ref.uid):
            return
        try:
            patience = seconds_for(f"destroy MIG device {step.device}", _BUSY_S)
            with self._operation():
                self._devices.destroy(step.device, step.gpu, patience_s=patience, besides=record.ref.uid)
        except DraDriverError as error:
            self._devices.abandon(step.device)
            _log.warning("mig_device_abandoned", device=step.device, reason=str(error))

    def in_place(self, step: Step, record: ClaimRecord) -> bool:
        """Whether the device was made in this boot and the driver still shows its capability files."""
        if not isinstance(step, CreateMig):
            return True
        entry = self._ledger.created_instance(step.device)
        if entry is None:
            return False
        minor, gpu_instance, compute = entry.gpu_minor, entry.gpu_instance_id, entry.compute_instance_id
        if minor is None or gpu_instance is None or compute is None:
            return False
        return MigCaps(self._proc).exist(minor, gpu_instance, compute)
