"""MIG mode of a GPU: switched on for the first MIG device, off after the last one if we switched it on."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import structlog

from dra_driver.errors import ClaimRefusedError, DraDriverError
from dra_driver.services.migports import ModeHardware, ModeLedger, Observe, Where

_log = structlog.get_logger(__name__)


def _unobserved(_action: str, _gpu_uuid: str, _duration_s: float, _error: Exception | None) -> None:
    pass


class MigMode:
    """Enters and leaves MIG mode. The caller holds the GPU's lock."""

    def __init__(
        self,
        hardware: ModeHardware,
        ledger: ModeLedger,
        boot_id: str,
        left_over: Callable[[], None],
        observe: Observe = _unobserved,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`left_over` is called when nobody can tell whether the mode is on; `observe` is told `mode-on` or `mode-off`
        of a GPU's UUID."""
        self._hardware = hardware
        self._ledger = ledger
        self._boot_id = boot_id
        self._left_over = left_over
        self._observe = observe
        self._clock = clock

    def is_on(self, where: Where) -> bool:
        """Whether the GPU is in MIG mode now."""
        mode = self._hardware.mode(*where)
        return mode is not None and mode[0]

    def enter(self, where: Where) -> None:
        """Have the GPU in MIG mode. Raises: ClaimRefusedError on a GPU without MIG; DeviceBusyError."""
        mode = self._hardware.mode(*where)
        if mode is None:
            raise ClaimRefusedError(
                f"GPU {where[0]} has no MIG; delete the claim so that it is allocated anew"
            )
        if mode[0]:
            return
        self._ledger.own_mode(*where, self._boot_id)
        try:
            self._switch(where, "on")
        except Exception:
            self._take_back(where)
            raise

    def leave(self, where: Where) -> None:
        """Have the GPU out of the mode that we switched on. Raises: ClaimRefusedError if somebody else did."""
        if self.is_on(where):
            if not self._ledger.mode_owned(where[0], self._boot_id):
                raise ClaimRefusedError(
                    f"GPU {where[0]} was put into MIG mode by somebody else and cannot be used whole; switch the "
                    "mode off by hand (nvidia-smi --multi-instance-gpu 0), or delete the pod"
                )
            self._switch(where, "off")
        self._ledger.disown_mode(where[0])

    def leave_if_idle(self, where: Where) -> bool:
        """Leave the mode if we switched it on and no GPU instance is left; whether something changed.

        Raises: DeviceBusyError, RetryableError, StateError.
        """
        if not self._ledger.mode_owned(where[0], self._boot_id):
            return False
        if self.is_on(where):
            if self._hardware.instances(*where):
                return False
            self._switch(where, "off")
            _log.info("mig_mode_left", gpu_uuid=where[0])
        self._ledger.disown_mode(where[0])
        return True

    def _take_back(self, where: Where) -> None:
        """The mode could not be entered; where it waits for a reset of the GPU, it shall not come by then."""
        try:
            with self._observed(where, "mode-off", success=False):
                mode = self._hardware.mode(*where)
                if mode is not None and not mode[0]:
                    if mode[1]:
                        self._hardware.set_mode(*where, False)
                    self._ledger.disown_mode(where[0])
        except DraDriverError as error:
            _log.warning("mig_mode_unsure", gpu_uuid=where[0], reason=str(error))
            self._left_over()

    def _switch(self, where: Where, wanted: Literal["on", "off"]) -> None:
        with self._observed(where, "mode-on" if wanted == "on" else "mode-off"):
            self._hardware.set_mode(*where, wanted == "on")

    @contextmanager
    def _observed(
        self, where: Where, action: Literal["mode-on", "mode-off"], *, success: bool = True
    ) -> Iterator[None]:
        """Tell how long it took and how it ended; without `success` only if it failed."""
        began = self._clock()
        try:
            yield
        except Exception as error:
            self._observe(action, where[0], self._clock() - began, error)
            raise
        if success:
            self._observe(action, where[0], self._clock() - began, None)
