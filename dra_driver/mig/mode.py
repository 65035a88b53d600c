"""MIG mode of a GPU: switched on for the first MIG device, off after the last one if we switched it on."""

from __future__ import annotations

import structlog

from dra_driver.errors import ClaimRefusedError, DraDriverError, RetryableError
from dra_driver.mig.context import MigContext
from dra_driver.model.mig import GpuAddress

_log = structlog.get_logger(__name__)


class MigMode:
    """Enters and leaves MIG mode. The caller holds the GPU's lock."""

    def __init__(self, context: MigContext) -> None:
        self._context = context
        self._hardware = context.hardware
        self._ledger = context.ledger

    def is_on(self, gpu: GpuAddress) -> bool:
        """Whether the GPU is in MIG mode now."""
        mode = self._hardware.mode(*gpu)
        return mode is not None and mode[0]

    def enter(self, gpu: GpuAddress) -> None:
        """Have the GPU in MIG mode. Raises: ClaimRefusedError on a GPU without MIG; DeviceBusyError."""
        mode = self._hardware.mode(*gpu)
        if mode is None:
            raise ClaimRefusedError(
                f"GPU {gpu.uuid} has no MIG; delete the claim so that it is allocated anew"
            )
        if mode[0]:
            return
        self._ledger.own_mode(*gpu)
        try:
            self._switch(gpu, on=True)
        except Exception:
            self._take_back(gpu)
            raise

    def leave(self, gpu: GpuAddress) -> None:
        """Have the GPU out of the mode that we switched on. Raises: ClaimRefusedError if somebody else did."""
        if self.is_on(gpu):
            if not self._ledger.mode_owned(gpu.uuid):
                raise ClaimRefusedError(
                    f"GPU {gpu.uuid} was put into MIG mode by somebody else and cannot be used whole; switch the "
                    "mode off by hand (nvidia-smi --multi-instance-gpu 0), or delete the pod"
                )
            self._switch(gpu, on=False)
        self._ledger.disown_mode(gpu.uuid)

    def have(self, gpu: GpuAddress, on: bool) -> None:
        """Have the mode that a layout asks for. It is nobody's to take back, also while it waits for a reset.

        Raises: DeviceBusyError; RetryableError if the mode waits for a reset.
        """
        mode = self._hardware.mode(*gpu)
        if mode is None:
            return
        if mode == (not on, on):
            raise RetryableError(
                f"MIG mode of GPU {gpu.uuid} is switched {'on' if on else 'off'} by the next reset of the GPU; stop "
                "everything that uses the GPU and run `nvidia-smi --gpu-reset`, or reboot the node"
            )
        if mode[0] != on:
            self._switch(gpu, on=on)
        self._ledger.disown_mode(gpu.uuid)

    def leave_if_idle(self, gpu: GpuAddress) -> bool:
        """Leave the mode if we switched it on and no GPU instance is left; whether something changed.

        Raises: DeviceBusyError, RetryableError, StateError.
        """
        if not self._ledger.mode_owned(gpu.uuid):
            return False
        if self.is_on(gpu):
            if self._hardware.instances(*gpu):
                return False
            self._switch(gpu, on=False)
            _log.info("mig_mode_left", gpu_uuid=gpu.uuid)
        self._ledger.disown_mode(gpu.uuid)
        return True

    def _take_back(self, gpu: GpuAddress) -> None:
        """The mode could not be entered. Where it waits for a reset of the GPU, it must not come with that reset."""
        try:
            with self._context.observed("mode-off", gpu.uuid):
                mode = self._hardware.mode(*gpu)
                if mode is not None and not mode[0]:
                    if mode[1]:
                        self._hardware.set_mode(*gpu, False)
                    self._ledger.disown_mode(gpu.uuid)
        except DraDriverError as error:
            _log.warning("mig_mode_unsure", gpu_uuid=gpu.uuid, reason=str(error))
            self._context.left_over()

    def _switch(self, gpu: GpuAddress, *, on: bool) -> None:
        with self._context.observed("mode-on" if on else "mode-off", gpu.uuid) as switched:
            self._hardware.set_mode(*gpu, on)
        switched()
