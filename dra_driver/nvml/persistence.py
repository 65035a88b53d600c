"""Persistence mode: the NVIDIA driver keeps a GPU though nobody has it open. It must let go before another driver gets
the GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pynvml

from dra_driver.nvml.failures import nvml_errors, supported
from dra_driver.nvml.mig_instances import gpu_handle


class PersistenceModes:
    """Reads and sets it, through NVML, which tells nvidia-persistenced where that runs.

    Raises, all methods: DeviceLostError where the GPU is gone or another one stands at its address,
    NvmlUnavailableError, RetryableError.
    """

    def __init__(self, operation: Callable[[], AbstractContextManager[object]]) -> None:
        """`operation` keeps NVML initialised, and waits for it; calls within it may enter it again."""
        self._operation = operation

    def get(self, gpu_uuid: str, pci_bus_id: str | None) -> bool | None:
        """Whether it is on; None where the GPU has none."""
        with self._operation():
            mode = supported(pynvml.nvmlDeviceGetPersistenceMode, gpu_handle(gpu_uuid, pci_bus_id))
        return None if mode is None else bool(mode)

    def set(self, gpu_uuid: str, pci_bus_id: str | None, on: bool) -> None:
        """Switch it; nothing is done where it is so. Raises: NotSupportedError too."""
        with self._operation():
            if self.get(gpu_uuid, pci_bus_id) != on:
                with nvml_errors(f"switch persistence mode of GPU {gpu_uuid} {'on' if on else 'off'}"):
                    pynvml.nvmlDeviceSetPersistenceMode(gpu_handle(gpu_uuid, pci_bus_id), int(on))
