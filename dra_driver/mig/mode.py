"""Switches a GPU's MIG mode: on for the first MIG device, off after the last one if this plugin switched it on."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Literal

import structlog

from dra_driver.base.deadline import seconds_for
from dra_driver.errors import ClaimRefusedError, DraDriverError, NvmlUnavailableError, RetryableError
from dra_driver.journal.ledger import Ledger
from dra_driver.journal.records import RecordStore
from dra_driver.model.dataclass import dataclass
from dra_driver.model.mig import GpuAddress, OwnedInstance, OwnedMode
from dra_driver.model.remedies import reset
from dra_driver.model.steps import CreateMig
from dra_driver.nvml.mig_changes import MigHardware
from dra_driver.nvml.session import NvmlSession

_log = structlog.get_logger(__name__)

_NVML_S = 30.0

MigAction = Literal["create", "destroy", "mode-on", "mode-off"]
MigObserver = Callable[[MigAction, str, float, Exception | None], None]
"""Receives the action, the device (for a mode change the GPU's UUID), the seconds, and the error, if any."""


@dataclass(eq=False)
class MigHolders:
    """Methods raise StateError.

    `lost_devices` returns the devices of claims that still have a CDI spec but no record.
    """

    records: RecordStore
    lost_devices: Callable[[], Collection[str]]

    def by_device(self) -> Mapping[str, str]:
        """Return each device in use, with a text that names one claim on it."""
        users = dict.fromkeys(self.lost_devices(), "a claim whose record was lost")
        for record in self.records.all().values():
            names = {step.device for step in record.steps if isinstance(step, CreateMig)}
            names |= {held.device for held in record.devices if not held.admin_access}
            users |= dict.fromkeys(names, f"claim {record.ref}")
        return users

    def on_gpu(self, gpu_uuid: str, gpu_name: str, boot_id: str) -> str | None:
        """Return a text that names a claim on the GPU or a MIG device on it.

        MIG devices do not survive a reboot: a claim that was not prepared again in this boot holds none.
        """
        for record in self.records.all().values():
            is_held = any(
                held.gpu_uuid == gpu_uuid and (held.kind == "gpu" or record.boot_id == boot_id)
                for held in record.devices
                if record.maintenance is not None or not held.admin_access
            )
            if is_held:
                return f"claim {record.ref}"
        if any(f"{name}-".startswith(f"{gpu_name}-") for name in self.lost_devices()):
            return "a claim whose record was lost"
        return None


@dataclass(frozen=True, slots=True)
class MigContext:
    """`operation` keeps NVML initialised for a whole action. `clock` and `pause` use seconds."""

    hardware: MigHardware
    ledger: Ledger
    users: MigHolders
    observe: MigObserver
    operation: Callable[[], AbstractContextManager[object]]
    clock: Callable[[], float]
    pause: Callable[[float], None]

    @contextmanager
    def observed(self, action: MigAction, subject: str) -> Iterator[Callable[[], None]]:
        """Report failures of its body. Yields a function with which the caller reports success."""
        began = self.clock()
        try:
            yield lambda: self.observe(action, subject, self.clock() - began, None)
        except Exception as error:
            self.observe(action, subject, self.clock() - began, error)
            raise


def mig_context(
    session: NvmlSession,
    closed_elsewhere: Callable[[str, str], AbstractContextManager[object]],
    ledger: Ledger,
    users: MigHolders,
    observe: MigObserver,
) -> MigContext:
    """Within `closed_elsewhere`, no other process of the plugin has NVML open."""

    def kept_open() -> AbstractContextManager[None]:
        return session.operation(lambda: seconds_for("wait until NVML is initialised", _NVML_S))

    @contextmanager
    def whole_action() -> Iterator[None]:
        # Removing a ledger detail does not need NVML; every other action fails with its own error.
        with ExitStack() as held:
            with suppress(NvmlUnavailableError):
                held.enter_context(kept_open())
            yield

    hardware = MigHardware(kept_open, closed_elsewhere)
    return MigContext(hardware, ledger, users, observe, whole_action, time.monotonic, time.sleep)


class MigMode:
    """Enters and leaves MIG mode, in the GPU's lane. Also a `Restorer` of the cleaner."""

    what = "the MIG mode change"

    def __init__(self, context: MigContext) -> None:
        self._context = context
        self._hardware = context.hardware
        self._ledger = context.ledger
        self._logged: dict[str, str] = {}  # by GPU, the last logged reason

    def is_on(self, gpu: GpuAddress) -> bool:
        mode = self._hardware.mode(*gpu)
        return mode is not None and mode[0]

    def enter(self, gpu: GpuAddress) -> None:
        """Enable MIG mode if necessary. Raises: ClaimRefusedError on a GPU without MIG; DeviceBusyError."""
        mode = self._hardware.mode(*gpu)
        if mode is None:
            raise ClaimRefusedError(
                f"GPU {gpu.uuid} does not support MIG; delete the pod and its claim so that the scheduler allocates "
                "another device"
            )
        if mode[0]:
            return
        self._ledger.save(OwnedMode(*gpu, self._ledger.boot_id or ""))
        try:
            self._switch(gpu, on=True)
        except Exception:
            self._cancel_switch(gpu)
            raise

    def leave(self, gpu: GpuAddress) -> None:
        """Disable the MIG mode. Raises: ClaimRefusedError if this plugin did not enable it."""
        if self.is_on(gpu):
            if not self._ledger.details(OwnedMode, gpu.uuid):
                raise ClaimRefusedError(
                    f"GPU {gpu.uuid} was switched to MIG mode by another program and cannot be used as a whole; switch "
                    f"MIG mode off with `nvidia-smi -i {gpu.uuid} -mig 0`, or delete the pod"
                )
            self._switch(gpu, on=False)
        self._disown(gpu)

    def ensure(self, gpu: GpuAddress, on: bool) -> None:
        """Set the mode that a layout requires, which cleanup never changes.

        Raises: DeviceBusyError; RetryableError if the mode waits for a reset.
        """
        mode = self._hardware.mode(*gpu)
        if mode is None:
            return
        if mode == (not on, on):
            raise RetryableError(
                f"MIG mode of GPU {gpu.uuid} turns {'on' if on else 'off'} at the next reset of the GPU; "
                f"{reset(gpu.uuid)}"
            )
        if mode[0] != on:
            self._switch(gpu, on=on)
        self._disown(gpu)

    def gpus(self) -> set[str]:
        """Return the GPUs whose MIG mode is ours and no longer needed, except with a ledger of a newer release."""
        ours = {mode.gpu_uuid for mode in self._ledger.details(OwnedMode)}
        if ours:
            ours -= {instance.gpu_uuid for instance in self._ledger.details(OwnedInstance)}
            records = self._ledger.records.all().values()
            steps = (step for record in records for step in record.steps if isinstance(step, CreateMig))
            ours -= {step.gpu_uuid for step in steps} | self._ledger.newer().keys()
        return ours

    def restore(self, gpu_uuid: str) -> None:
        """Leave MIG mode unless a foreign GPU instance exists. Raises: DeviceBusyError, RetryableError, StateError."""
        for mode in self._ledger.details(OwnedMode, gpu_uuid):
            gpu = GpuAddress(mode.gpu_uuid, mode.pci_bus_id)
            try:
                with self._context.operation():
                    if self.is_on(gpu):
                        if self._hardware.instances(*gpu):
                            return
                        self._switch(gpu, on=False)
                        if self.is_on(gpu):
                            raise RetryableError(
                                f"NVML reported success, but GPU {gpu_uuid} is still in MIG mode"
                            )
                        _log.info("mig_mode_disabled", gpu_uuid=gpu_uuid)
            except DraDriverError as error:
                if self._logged.get(gpu_uuid) != str(error):
                    _log.warning("mig_mode_disable_failed", gpu_uuid=gpu_uuid, reason=str(error))
                self._logged[gpu_uuid] = str(error)
                raise
            self._disown(gpu)

    def _disown(self, gpu: GpuAddress) -> None:
        self._logged.pop(gpu.uuid, None)
        for mode in self._ledger.details(OwnedMode, gpu.uuid):
            self._ledger.remove(mode)

    def _cancel_switch(self, gpu: GpuAddress) -> None:
        """Cancel a failed switch, so that the next reset of the GPU does not enable MIG mode."""
        try:
            with self._context.observed("mode-off", gpu.uuid):
                mode = self._hardware.mode(*gpu)
                if mode is not None and not mode[0]:
                    if mode[1]:
                        self._hardware.set_mode(*gpu, False)
                    self._disown(gpu)
        except DraDriverError as error:
            _log.warning("mig_mode_unknown", gpu_uuid=gpu.uuid, reason=str(error))

    def _switch(self, gpu: GpuAddress, *, on: bool) -> None:
        with self._context.observed("mode-on" if on else "mode-off", gpu.uuid) as switched:
            self._hardware.set_mode(*gpu, on)
        switched()
