"""How GPUs and MIG devices are used: one look at a GPU, for people and for the metrics, each value best effort.

NVML has no utilisation for a MIG device, only samples of its GPU instance (GPM), from Hopper on: the utilisation lies
between two of them. So the first look at a device has none, and each later look takes one sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import pynvml

from dra_driver.model.gpu import GpuLoad, GpuProcess, GpuUse
from dra_driver.model.mig import GpuAddress, MigAddress
from dra_driver.nvml.calls import Handle, ask
from dra_driver.nvml.gpu_users import read_gpu_processes
from dra_driver.nvml.mig_reading import gpu_handle
from dra_driver.nvml.session import NvmlSession

_SAMPLED_US = 2_000_000
"""NVML has the mean of a process since a point in time. `nvidia-smi pmon` takes about this one."""
_FULL = 100
_SHORTEST_S = 1.0
"""Between two samples of a device. A look that comes sooner, as of a second Prometheus, has the value of before."""


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


@dataclass(frozen=True, slots=True)
class _Sample:
    """`percent` is the utilisation since the sample before, None for the first."""

    buffer: Handle
    taken_at: float
    percent: int | None


class UsageSource:
    """NVML as the metrics ask it. Several GPUs may be read at the same time, one GPU once at a time.

    `sees_all` says whether this process is in the PID namespace of the host. From any other namespace NVML does not
    show the processes of other containers.
    """

    def __init__(
        self,
        session: NvmlSession,
        clock: Callable[[], float] = time.monotonic,
        *,
        sees_all: bool = True,
    ) -> None:
        self._session = session
        self.sees_all = sees_all
        self._clock = clock
        self._samples: dict[str, dict[str, _Sample]] = {}
        session.before_shutdown.append(self._end_session)

    def _end_session(self) -> None:
        """Free the samples of all GPUs: they are of no use in another session."""
        samples, self._samples = self._samples, {}
        for one in (one for of_gpu in samples.values() for one in of_gpu.values()):
            _free(one)

    def _processes(self, gpu: GpuAddress, handle: Handle, load: GpuLoad) -> Sequence[GpuProcess] | None:
        """None if this process cannot see those of others."""
        if not self.sees_all:
            return None
        return with_utilisation(handle, read_gpu_processes(gpu.uuid, handle), load.utilisation_percent)

    def read(self, gpu: GpuAddress, devices: Collection[MigAddress]) -> GpuUse:
        """The GPU, and these MIG devices of it; one that is gone is missing. No MIG device is searched for, since NVML
        can take seconds for that.

        Raises: DeviceLostError, NvmlUnavailableError; RetryableError if the processes cannot be read.
        """
        with self._session.kept_open():
            handle = gpu_handle(gpu.uuid, gpu.pci_bus_id)
            load = read_load(gpu.uuid, handle)
            samples = self._samples.setdefault(gpu.uuid, {})
            wanted = {device.uuid for device in devices}
            for uuid in samples.keys() - wanted:
                _free(samples.pop(uuid))
            has_samples = bool(devices) and _has_samples(handle)
            found: dict[str, GpuLoad] = {}
            for device in devices:
                mig = _mig_handle(handle, device)
                if mig is not None:
                    memory = ask(read_memory, mig)
                    found[device.uuid] = GpuLoad(
                        memory_used_bytes=None if memory is None else int(memory.used),
                        memory_total_bytes=None if memory is None else int(memory.total),
                        utilisation_percent=self._percent(handle, device, samples) if has_samples else None,
                    )
            return GpuUse(load, found, self._processes(gpu, handle, load))

    def read_processes(self, gpu: GpuAddress) -> GpuUse:
        """The processes on the GPU, and nothing else. Raises: as `read`."""
        with self._session.kept_open():
            handle = gpu_handle(gpu.uuid, gpu.pci_bus_id)
            return GpuUse(GpuLoad(), {}, read_gpu_processes(gpu.uuid, handle) if self.sees_all else None)

    def _percent(self, handle: Handle, device: MigAddress, samples: dict[str, _Sample]) -> int | None:
        """Utilisation of a MIG device since its last sample."""
        now, before = self._clock(), samples.get(device.uuid)
        if before is not None and now - before.taken_at < _SHORTEST_S:
            return before.percent
        buffer = ask(_sample, handle, device.gpu_instance_id)
        if buffer is None:
            return None
        percent = None if before is None else ask(_busy_between, before.buffer, buffer)
        if before is not None:
            _free(before)
        samples[device.uuid] = _Sample(buffer, now, percent)
        return percent


def with_utilisation(
    handle: Handle, processes: Sequence[GpuProcess], gpu_percent: int | None
) -> Sequence[GpuProcess]:
    """The processes on a GPU, each with its utilisation where NVML reports one. `gpu_percent` is the GPU's own.

    NVML has samples only of processes that ran a kernel in the last seconds. A process without a sample was idle if
    another one has a sample, or if the GPU was idle. Otherwise NVML may not have samples of it at all, as of clients of
    MPS: then its utilisation is unknown.

    Raises: as `read_load`.
    """
    samples = ask(_process_samples, handle) if processes else None
    if samples is None:
        return processes
    # The driver may leave rubbish in the buffer: processes that are not there, and percentages above a million.
    newest = {
        sample.pid: int(sample.smUtil) if sample.smUtil <= _FULL else None
        for sample in sorted(samples, key=lambda one: one.timeStamp)
    }
    is_shown = gpu_percent == 0 or any(newest.get(process.pid) is not None for process in processes)
    rest = 0 if is_shown and not any(process.is_mps_server for process in processes) else None
    found = (newest.get(process.pid, rest) for process in processes)
    return [
        replace(process, utilisation_percent=percent)
        for process, percent in zip(processes, found, strict=True)
    ]


def _process_samples(handle: Handle) -> Sequence[Any]:
    """Raises: pynvml.NVMLError."""
    since = time.time_ns() // 1000 - _SAMPLED_US
    try:
        samples: Sequence[Any] = pynvml.nvmlDeviceGetProcessUtilization(handle, since)
    except pynvml.NVMLError as error:
        # The binding raises for success too if there are no samples.
        if error.value not in (pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_SUCCESS):
            raise
        return ()
    return samples


def _mig_handle(handle: Handle, device: MigAddress) -> Handle | None:
    """None if the device is gone, or another one is in its place. Raises: DeviceLostError, NvmlUnavailableError."""
    instance = ask(pynvml.nvmlDeviceGetGpuInstanceById, handle, device.gpu_instance_id)
    compute = instance and ask(
        pynvml.nvmlGpuInstanceGetComputeInstanceById, instance, device.compute_instance_id
    )
    info = compute and ask(pynvml.nvmlComputeInstanceGetInfo, compute)
    if info is None or ask(pynvml.nvmlDeviceGetUUID, info.device) != device.uuid:
        return None
    return info.device


def _has_samples(handle: Handle) -> bool:
    support = ask(pynvml.nvmlGpmQueryDeviceSupport, handle)
    return support is not None and bool(support.isSupportedDevice)


def _sample(handle: Handle, gpu_instance_id: int) -> Handle:
    """Raises: pynvml.NVMLError."""
    buffer = pynvml.nvmlGpmSampleAlloc()
    try:
        return pynvml.nvmlGpmMigSampleGet(handle, gpu_instance_id, buffer)
    except pynvml.NVMLError:
        pynvml.nvmlGpmSampleFree(buffer)
        raise


def _busy_between(first: Handle, second: Handle) -> int | None:
    """Percent of the time; None for what no device can have. Raises: pynvml.NVMLError."""
    wanted = pynvml.c_nvmlGpmMetricsGet_t()
    wanted.version, wanted.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, 1
    wanted.sample1, wanted.sample2 = first, second
    wanted.metrics[0].metricId = pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL
    metric = pynvml.nvmlGpmMetricsGet(wanted).metrics[0]
    # Not a number does not lie between them either.
    is_good = metric.nvmlReturn == pynvml.NVML_SUCCESS and 0 <= metric.value <= 100
    return round(metric.value) if is_good else None


def _free(sample: _Sample) -> None:
    with suppress(pynvml.NVMLError):
        pynvml.nvmlGpmSampleFree(sample.buffer)
