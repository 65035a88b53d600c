"""Reads and sets the power limit of a GPU, and locks its clocks.

All methods raise ClaimRefusedError if NVML refuses the value or this node may not set it; NotSupportedError;
DeviceLostError if the GPU is gone or replaced; NvmlUnavailableError; RetryableError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import pynvml

from dra_driver.errors import ClaimRefusedError, RetryableError
from dra_driver.model.gpu import whole_watts
from dra_driver.model.steps import ClockDomain
from dra_driver.nvml.calls import Handle, nvml_errors
from dra_driver.nvml.mig_reading import gpu_handle

_REFUSED: Final = {
    pynvml.NVML_ERROR_INVALID_ARGUMENT: "the GPU does not accept this value",
    pynvml.NVML_ERROR_NO_PERMISSION: "NVML denies permission, as it may in a virtual machine",
}
_LOCKS: Final[Mapping[ClockDomain, tuple[Callable[..., Any], Callable[..., Any]]]] = {
    "graphics": (pynvml.nvmlDeviceSetGpuLockedClocks, pynvml.nvmlDeviceResetGpuLockedClocks),
    "memory": (pynvml.nvmlDeviceSetMemoryLockedClocks, pynvml.nvmlDeviceResetMemoryLockedClocks),
}


class GpuLimits:
    """`operation` waits for NVML and keeps it initialised; it is reentrant."""

    def __init__(self, operation: Callable[[], AbstractContextManager[object]]) -> None:
        self._operation = operation

    def power_mw(self, gpu_uuid: str) -> int:
        """Return the power limit that is set. The enforced one may be lower."""
        with self._gpu(f"read the power limit of GPU {gpu_uuid}", gpu_uuid) as gpu:
            return int(pynvml.nvmlDeviceGetPowerManagementLimit(gpu))

    def power_range_w(self, gpu_uuid: str) -> tuple[int, int]:
        with self._gpu(f"read the power limits of GPU {gpu_uuid}", gpu_uuid) as gpu:
            return whole_watts(pynvml.nvmlDeviceGetPowerManagementLimitConstraints(gpu))

    def set_power(self, gpu_uuid: str, milliwatts: int) -> None:
        with self._gpu(f"set the power limit of GPU {gpu_uuid} to {milliwatts / 1000:g} W", gpu_uuid) as gpu:
            # The binding drops the return code of the newer nvmlDeviceSetPowerManagementLimit_v2.
            pynvml.nvmlDeviceSetPowerManagementLimit(gpu, milliwatts)

    def lock_clock(self, gpu_uuid: str, domain: ClockDomain, least_mhz: int, most_mhz: int) -> None:
        what = f"lock the {domain} clock of GPU {gpu_uuid} to {least_mhz} to {most_mhz} MHz"
        with self._gpu(what, gpu_uuid) as gpu:
            _LOCKS[domain][0](gpu, least_mhz, most_mhz)

    def unlock_clock(self, gpu_uuid: str, domain: ClockDomain) -> None:
        with self._gpu(f"unlock the {domain} clock of GPU {gpu_uuid}", gpu_uuid) as gpu:
            _LOCKS[domain][1](gpu)

    @contextmanager
    def _gpu(self, action: str, gpu_uuid: str) -> Iterator[Handle]:
        with self._operation():
            gpu = gpu_handle(gpu_uuid, None)
            try:
                with nvml_errors(action):
                    yield gpu
            except RetryableError as error:
                reason = _REFUSED.get(getattr(error.__cause__, "value", None))
                if reason is None:
                    raise
                refused = ClaimRefusedError(f"cannot {action}: {reason}")
                refused.has_no_effect = True
                raise refused from error
