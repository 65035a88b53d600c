"""Reads the usage of GPUs and MIG devices for commands and metrics, each value best effort.

NVML has no utilisation for MIG devices. From Hopper on, two samples of their GPU instances (GPM) give one, so the first
reading has none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import pynvml

from dra_driver.model.dataclass import dataclass, replace
from dra_driver.model.gpu import GpuLoad, GpuMeasure, GpuMeters, GpuProcess, GpuUse, Throttle
from dra_driver.model.mig import GpuAddress, MigAddress
from dra_driver.nvml.calls import Handle, query
from dra_driver.nvml.gpu_users import read_gpu_processes
from dra_driver.nvml.mig_reading import gpu_handle
from dra_driver.nvml.session import NvmlSession

_SAMPLED_US = 2_000_000
_FULL = 100
_SHORTEST_S = 1.0
"""A reading sooner after the last sample, such as for a second Prometheus, gets the previous value."""
_ALL_LINKS = 0xFFFFFFFF
"""The scope of a field that sums all NVLinks of the GPU."""
_TRAFFIC: Mapping[str, tuple[int, int, int]] = {
    "nvlink_sent_bytes": (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, _ALL_LINKS, 1024),
    "nvlink_received_bytes": (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, _ALL_LINKS, 1024),
    "pcie_sent_bytes": (pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, 0, 1),
    "pcie_received_bytes": (pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES, 0, 1),
}
"""Field, scope, and bytes of NVML's unit."""
_THROTTLES: Mapping[Throttle, int] = {
    "sw_power_cap": pynvml.nvmlClocksEventReasonSwPowerCap,
    "hw_slowdown": pynvml.nvmlClocksEventReasonHwSlowdown,
    "sw_thermal_slowdown": pynvml.nvmlClocksEventReasonSwThermalSlowdown,
    "hw_thermal_slowdown": pynvml.nvmlClocksEventReasonHwThermalSlowdown,
    "hw_power_brake": pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown,
}
_MHZ = 1_000_000


def read_load(uuid: str, handle: Handle | None = None) -> GpuLoad:
    handle = gpu_handle(uuid, None) if handle is None else handle
    memory = query(read_memory, handle)
    rates = query(pynvml.nvmlDeviceGetUtilizationRates, handle)
    power = query(pynvml.nvmlDeviceGetPowerUsage, handle)
    limit = query(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle)
    return GpuLoad(
        memory_used_bytes=None if memory is None else int(memory.used),
        memory_total_bytes=None if memory is None else int(memory.total),
        utilisation_percent=None if rates is None else int(rates.gpu),
        temperature_c=query(temperature, handle),
        power_w=None if power is None else power / 1000,
        power_limit_w=None if limit is None else limit / 1000,
    )


def read_meters(handle: Handle) -> GpuMeters:
    energy = query(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle)
    sm = query(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_SM)
    memory = query(pynvml.nvmlDeviceGetClockInfo, handle, pynvml.NVML_CLOCK_MEM)
    reasons = query(clock_reasons, handle)
    limit = query(pynvml.nvmlDeviceGetPowerManagementLimit, handle)
    wanted = [(field, scope) for field, scope, _ in _TRAFFIC.values()]
    entries = query(pynvml.nvmlDeviceGetFieldValues, handle, wanted) or ()
    traffic = {
        name: int(entry.value.ullVal) * unit
        for (name, (_, _, unit)), entry in zip(_TRAFFIC.items(), entries, strict=False)
        if entry.nvmlReturn == pynvml.NVML_SUCCESS
    }
    return GpuMeters(
        energy_j=None if energy is None else energy / 1000,
        sm_clock_hz=None if sm is None else sm * _MHZ,
        memory_clock_hz=None if memory is None else memory * _MHZ,
        throttles=None
        if reasons is None
        else frozenset(name for name, bit in _THROTTLES.items() if reasons & bit),
        power_limit_set_w=None if limit is None else limit / 1000,
        **traffic,
    )


def clock_reasons(handle: Handle) -> int:
    try:
        return int(pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except pynvml.NVMLError_FunctionNotFound:
        return int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def temperature(handle: Handle) -> int:
    try:
        return int(pynvml.nvmlDeviceGetTemperatureV(handle, pynvml.NVML_TEMPERATURE_GPU))
    except pynvml.NVMLError_FunctionNotFound:
        return int(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU))


def read_memory(handle: Handle) -> Any:
    """Prefer the newer call, which excludes memory reserved by the NVIDIA driver. Raises: pynvml.NVMLError."""
    try:
        return pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except (pynvml.NVMLError_FunctionNotFound, pynvml.NVMLError_NotSupported):
        return pynvml.nvmlDeviceGetMemoryInfo(handle)


@dataclass(frozen=True, slots=True)
class _Sample:
    buffer: Handle
    taken_at: float
    percent: int | None


class UsageSource:
    """Reads usage for the metrics. Different GPUs may be read at the same time, but each GPU by only one thread.

    Only in the host's PID namespace (`sees_all`) NVML shows the processes of other containers.
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
        samples, self._samples = self._samples, {}
        for one in (one for of_gpu in samples.values() for one in of_gpu.values()):
            _free(one)

    def _processes(self, gpu: GpuAddress, handle: Handle, load: GpuLoad) -> Sequence[GpuProcess] | None:
        if not self.sees_all:
            return None
        return with_utilisation(handle, read_gpu_processes(gpu.uuid, handle), load.utilisation_percent)

    def read(self, gpu: GpuAddress, devices: Collection[MigAddress]) -> GpuUse:
        """Return the usage of the GPU and of these MIG devices; devices that are gone are omitted.

        Does not search for MIG devices, because that can take NVML seconds. Raises: DeviceLostError,
        NvmlUnavailableError, RetryableError.
        """
        with self._session.kept_open():
            handle = gpu_handle(gpu.uuid, gpu.pci_bus_id)
            load = read_load(gpu.uuid, handle)
            found = self._of_mig(gpu, handle, devices)
            return GpuUse(load, found, self._processes(gpu, handle, load), read_meters(handle))

    def measure(self, gpu: GpuAddress, devices: Collection[MigAddress], since: float) -> GpuMeasure:
        """Return a reading, with the samples since a time in seconds since 1970. Raises: the errors of `read`."""
        with self._session.kept_open():
            handle = gpu_handle(gpu.uuid, gpu.pci_bus_id)
            memory = query(read_memory, handle)
            energy = query(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle)
            mig = self._of_mig(gpu, handle, devices)
            busy = query(_busy_samples, handle, since)
            at = time.time()
            if busy == ():
                # NVML keeps no samples of an idle GPU.
                rates = query(pynvml.nvmlDeviceGetUtilizationRates, handle)
                busy = ((since, 0.0), (at, 0.0)) if rates is not None and rates.gpu == 0 else None
            return GpuMeasure(
                at,
                None if energy is None else energy / 1000,
                None if memory is None else int(memory.used),
                None if memory is None else int(memory.total),
                busy,
                mig,
            )

    def _of_mig(
        self, gpu: GpuAddress, handle: Handle, devices: Collection[MigAddress]
    ) -> Mapping[str, GpuLoad]:
        samples = self._samples.setdefault(gpu.uuid, {})
        for uuid in samples.keys() - {device.uuid for device in devices}:
            _free(samples.pop(uuid))
        has_samples = bool(devices) and _has_samples(handle)
        found: dict[str, GpuLoad] = {}
        for device in devices:
            mig = _mig_handle(handle, device)
            if mig is not None:
                memory = query(read_memory, mig)
                found[device.uuid] = GpuLoad(
                    memory_used_bytes=None if memory is None else int(memory.used),
                    memory_total_bytes=None if memory is None else int(memory.total),
                    utilisation_percent=self._percent(handle, device, samples) if has_samples else None,
                )
        return found

    def read_processes(self, gpu: GpuAddress) -> GpuUse:
        with self._session.kept_open():
            handle = gpu_handle(gpu.uuid, gpu.pci_bus_id)
            return GpuUse(GpuLoad(), {}, read_gpu_processes(gpu.uuid, handle) if self.sees_all else None)

    def _percent(self, handle: Handle, device: MigAddress, samples: dict[str, _Sample]) -> int | None:
        now, before = self._clock(), samples.get(device.uuid)
        if before is not None and now - before.taken_at < _SHORTEST_S:
            return before.percent
        buffer = query(_sample, handle, device.gpu_instance_id)
        if buffer is None:
            return None
        percent = None if before is None else query(_busy_between, before.buffer, buffer)
        if before is not None:
            _free(before)
        samples[device.uuid] = _Sample(buffer, now, percent)
        return percent


def with_utilisation(
    handle: Handle, processes: Sequence[GpuProcess], gpu_percent: int | None
) -> Sequence[GpuProcess]:
    """Return the processes with their utilisation, if NVML reports it. `gpu_percent` is that of the whole GPU.

    NVML has samples only of processes that ran a kernel in the last seconds. A process without a sample was idle if
    another process has a sample, or if the GPU was idle. Otherwise, and always next to an MPS server, NVML may have no
    samples of the process at all, so its utilisation is unknown.
    """
    samples = query(_process_samples, handle) if processes else None
    if samples is None:
        return processes
    # The driver may leave garbage in the buffer: processes that do not exist, and percentages above a
    # million.
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
    since = time.time_ns() // 1000 - _SAMPLED_US
    try:
        samples: Sequence[Any] = pynvml.nvmlDeviceGetProcessUtilization(handle, since)
    except pynvml.NVMLError as error:
        # If there are no samples, the binding raises an error even for NVML_SUCCESS.
        if error.value not in (pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_SUCCESS):
            raise
        return ()
    return samples


def _busy_samples(handle: Handle, since: float) -> Sequence[tuple[float, float]]:
    """Return (time, percentage) of each sample, oldest first."""
    try:
        kind, samples = pynvml.nvmlDeviceGetSamples(
            handle, pynvml.NVML_GPU_UTILIZATION_SAMPLES, int(since * 1e6)
        )
    except pynvml.NVMLError_NotFound:
        return ()
    member = _VALUES[kind]
    found = ((one.timeStamp / 1e6, float(getattr(one.sampleValue, member))) for one in samples)
    return tuple(sorted((at, value) for at, value in found if at > since and 0 <= value <= _FULL))


_VALUES = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""The member of NVML's union, by its value type."""


def _mig_handle(handle: Handle, device: MigAddress) -> Handle | None:
    instance = query(pynvml.nvmlDeviceGetGpuInstanceById, handle, device.gpu_instance_id)
    compute = instance and query(
        pynvml.nvmlGpuInstanceGetComputeInstanceById, instance, device.compute_instance_id
    )
    info = compute and query(pynvml.nvmlComputeInstanceGetInfo, compute)
    if info is None or query(pynvml.nvmlDeviceGetUUID, info.device) != device.uuid:
        return None
    return info.device


def _has_samples(handle: Handle) -> bool:
    support = query(pynvml.nvmlGpmQueryDeviceSupport, handle)
    return support is not None and bool(support.isSupportedDevice)


def _sample(handle: Handle, gpu_instance_id: int) -> Handle:
    buffer = pynvml.nvmlGpmSampleAlloc()
    try:
        return pynvml.nvmlGpmMigSampleGet(handle, gpu_instance_id, buffer)
    except pynvml.NVMLError:
        pynvml.nvmlGpmSampleFree(buffer)
        raise


def _busy_between(first: Handle, second: Handle) -> int | None:
    wanted = pynvml.c_nvmlGpmMetricsGet_t()
    wanted.version, wanted.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, 1
    wanted.sample1, wanted.sample2 = first, second
    wanted.metrics[0].metricId = pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL
    metric = pynvml.nvmlGpmMetricsGet(wanted).metrics[0]
    # Also rejects NaN.
    is_good = metric.nvmlReturn == pynvml.NVML_SUCCESS and 0 <= metric.value <= 100
    return round(metric.value) if is_good else None


def _free(sample: _Sample) -> None:
    with suppress(pynvml.NVMLError):
        pynvml.nvmlGpmSampleFree(sample.buffer)
