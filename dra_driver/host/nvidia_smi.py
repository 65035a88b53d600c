"""Runs the NVIDIA driver's own nvidia-smi, for settings for which NVML has no call."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass

from dra_driver.base.bounded_program import run_driver_program
from dra_driver.errors import NotSupportedError, NvmlDetachedError, NvmlUnavailableError, RetryableError
from dra_driver.model.driver_programs import SMI_PROGRAM, FindPrograms, exit_text

_TIMEOUT_S = 20.0
_LEAST_S = 0.1
_ABSENT_CODES = (6, 9, 15)
"""No such GPU, driver not loaded, GPU is lost."""
_ABSENT = (
    "gpu is lost",
    "unable to determine the device handle",
    "couldn't communicate with the nvidia driver",
)


@dataclass(eq=False)
class NvidiaSmi:
    """The NVIDIA driver's nvidia-smi, looked up at each call. It opens NVML, so it runs only within `using_nvml`, which
    waits for so many seconds at most, and raises NvmlDetachedError while NVML is to stay closed."""

    find: FindPrograms
    using_nvml: Callable[[float], AbstractContextManager[None]] = lambda _wait_s: nullcontext()

    def set_time_slice(self, gpu_uuid: str, level: int, timeout_s: float = _TIMEOUT_S) -> None:
        """Set the length of a GPU's time slices: 0 default, 1 short, 2 medium, 3 long; in `timeout_s` seconds at most.

        Raises: NotSupportedError if the GPU has no such setting, NvmlUnavailableError if the NVIDIA driver or the GPU
        is missing, StateError if the NVIDIA driver's libraries do not fit or cannot be linked, RetryableError
        otherwise."""
        action = f"set the time slice of GPU {gpu_uuid}"
        until = time.monotonic() + timeout_s
        with ExitStack() as held:
            try:
                held.enter_context(self.using_nvml(timeout_s))
            except NvmlDetachedError as error:
                waits = RetryableError(f"{action}: {error}")
                waits.has_no_effect = True
                raise waits from error
            self._run(action, gpu_uuid, level, max(_LEAST_S, until - time.monotonic()))

    def _run(self, action: str, gpu_uuid: str, level: int, timeout_s: float) -> None:
        programs = self.find()
        if SMI_PROGRAM not in programs.paths:
            absent = NvmlUnavailableError(
                f"{action}: nvidia-smi is not below the driver root {programs.root}; install the NVIDIA driver"
            )
            absent.has_no_effect = True
            raise absent
        arguments = (SMI_PROGRAM, "compute-policy", "-i", gpu_uuid, "--set-timeslice", str(level))
        code, output = run_driver_program(
            lambda: programs, *arguments, action=action, timeout_s=timeout_s, subject=gpu_uuid
        )
        lowered = output.lower()
        said = f"nvidia-smi ended with {exit_text(code)}: {' '.join(output.split()) or 'it printed nothing'}"
        if code in _ABSENT_CODES or (code and any(part in lowered for part in _ABSENT)):
            raise NvmlUnavailableError(f"{action}: {said}")
        if "not supported" in lowered:
            raise NotSupportedError(f"{action}: the GPU does not support it ({said})")
        if "not found" in lowered:
            raise NvmlUnavailableError(f"{action}: {said}")
        if code:
            raise RetryableError(f"{action}: {said}")
