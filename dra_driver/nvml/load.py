"""One look at how busy a GPU is: memory, utilisation, temperature, power, each best effort."""

from __future__ import annotations

from typing import Any

import pynvml

from dra_driver.model.gpu import GpuLoad
from dra_driver.nvml.failures import Handle, ask
from dra_driver.nvml.mig_instances import gpu_handle


def read_load(uuid: str, handle: Handle | None = None) -> GpuLoad:
    """What the GPU tells; what it does not tell, or fails to tell, is None. The caller may have a handle of this
    session.

    Raises: DeviceLostError if the GPU does not answer; NvmlUnavailableError; RetryableError if it cannot be found
    for another reason.
    """
    handle = gpu_handle(uuid, None) if handle is None else handle
    memory = ask(read_memory, handle)
    rates = ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
    power = ask(pynvml.nvmlDeviceGetPowerUsage, handle)
    limit = ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    return GpuLoad(
        memory_used_bytes=None if memory is None else int(memory.used),
        memory_total_bytes=None if memory is None else int(memory.total),
        utilisation_percent=None if rates is None else int(rates.gpu),
        temperature_c=ask(temperature, handle),
        power_w=None if power is None else power / 1000,
        power_limit_w=None if limit is None else limit / 1000,
    )


def temperature(handle: Handle) -> int:
    """In degrees Celsius; by the older call where the newer one is missing. Raises: pynvml.NVMLError."""
    try:
        return int(pynvml.nvmlDeviceGetTemperatureV(handle, pynvml.NVML_TEMPERATURE_GPU))
    except pynvml.NVMLError_FunctionNotFound:
        return int(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))


def read_memory(handle: Handle) -> Any:
    """NVML's struct, by the newer call, which does not count as used what the NVIDIA driver keeps for itself; by the
    older one where that is missing. Raises: pynvml.NVMLError."""
    try:
        return pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except (pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NotSupported):
        return pynvml.nvmlDeviceGetMemoryInfo(handle)
