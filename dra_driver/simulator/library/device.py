"""Properties and modes of one device: memory, class, compute and persistence mode, processes, health counters; the
values of nvmlDeviceGetFieldValues that this plugin reads; and GPU performance monitoring (GPM), samples of a GPU
instance and the metrics between two of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import pynvml

from dra_driver.simulator.library.core import Core, Handle, address, number, put, put_handle, target
from dra_driver.simulator.machine_state import ANY_INSTANCE, Gpu, Holder, State
from dra_driver.simulator.mig import Refusal

_RUBIN = 13

MIB = 1 << 20
_RESETLESS_MIG = 184
_RECOVERY_ACTION = 230
_RECOVERY_ACTION_SINCE = 570
_LAST_FIELD = 512
_BLACKWELL = 10
_NVLINK_ERRORS = {38: "crc", 45: "crc data", 52: "replay", 59: "recovery"}
"""The totals of all links, which GPUs have had until Blackwell; since then they count for each link."""
_LINK_RECOVERIES = 215
_HOPPER = 9
_UNLIKE = 4711.0


def busy(holders: Iterable[Holder]) -> int:
    """Percent of the time."""
    return min(100, sum(holder.utilisation for holder in holders))


def _unsupported() -> Refusal:
    return Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)


class Device(Core):
    """nvmlDeviceGet*/Set* of a single device."""

    def nvmlDeviceGetBrand(self, handle: Any, out: Any) -> None:  # noqa: N802
        state, gpu, _ = self.device(handle)
        put(out, state.model_of(gpu).brand)

    def nvmlDeviceGetArchitecture(self, handle: Any, out: Any) -> None:  # noqa: N802
        state, gpu, _ = self.device(handle)
        put(out, state.model_of(gpu).architecture)

    def nvmlDeviceGetCudaComputeCapability(self, handle: Any, major: Any, minor: Any) -> None:  # noqa: N802
        state, gpu, _ = self.device(handle)
        put(major, state.model_of(gpu).compute[0])
        put(minor, state.model_of(gpu).compute[1])

    def nvmlDeviceGetNumGpuCores(self, handle: Any, out: Any) -> None:  # noqa: N802
        state, gpu = self.gpu(handle)
        put(out, state.model_of(gpu).cores)

    def nvmlDeviceGetMemoryInfo(self, handle: Any, out: Any) -> None:  # noqa: N802
        total, reserved, used = self._memory(handle)
        info = target(out)
        info.total, info.used, info.free = total, used + reserved, total - used - reserved

    def nvmlDeviceGetMemoryInfo_v2(self, handle: Any, out: Any) -> None:  # noqa: N802
        info = target(out)
        if info.version != pynvml.nvmlMemory_v2:
            raise Refusal(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        total, reserved, used = self._memory(handle)
        info.total, info.reserved, info.used, info.free = total, reserved, used, total - used - reserved

    def _memory(self, handle: Any) -> tuple[int, int, int]:
        state, gpu, parsed = self.device(handle)
        model = state.model_of(gpu)
        if model.memory_bytes is None:
            raise _unsupported()
        total, reserved = model.memory_bytes, model.reserved_bytes
        if parsed.is_mig:
            instance, _ = self.mig_device(gpu, parsed)
            total = next(row.memory_mib for row in model.mig if row.id == instance.profile_id) * MIB
            reserved = 0
        used = sum(holder.memory_mib for holder in self._holders(gpu, parsed)) * MIB
        return total, reserved, min(used, total - reserved)

    def _holders(self, gpu: Gpu, parsed: Handle) -> list[Holder]:
        if not parsed.is_mig:
            return gpu.holders
        return [
            holder
            for holder in gpu.holders
            if holder.gpu_instance == parsed.gi and holder.compute_instance in (None, parsed.ci)
        ]

    def nvmlDeviceGetAddressingMode(self, handle: Any, out: Any) -> None:  # noqa: N802
        info = target(out)
        if info.version != pynvml.nvmlDeviceAddressingMode_v1:
            raise Refusal(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        mode = self.device(handle)[1].addressing
        if mode is None:
            raise _unsupported()
        info.value = mode

    def nvmlDeviceGetVirtualizationMode(self, handle: Any, out: Any) -> None:  # noqa: N802
        put(out, self.gpu(handle)[1].virtualization)

    def nvmlDeviceGetNumaNodeId(self, handle: Any, out: Any) -> None:  # noqa: N802
        node = self.device(handle)[1].memory_numa
        if node is None:
            raise _unsupported()
        put(out, node)

    def nvmlDeviceGetTemperatureV(self, handle: Any, out: Any) -> None:  # noqa: N802
        target(out).temperature = 30 + self.gpu(handle)[1].minor % 8

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: Any, out: Any) -> None:  # noqa: N802
        put(out, 30 + self.gpu(handle)[1].minor % 8)

    def nvmlDeviceGetPowerUsage(self, handle: Any, out: Any) -> None:  # noqa: N802
        state, gpu = self.gpu(handle)
        put(out, state.model_of(gpu).power_limit_w * 100)

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: Any, out: Any) -> None:  # noqa: N802
        state, gpu = self.gpu(handle)
        put(out, state.model_of(gpu).power_limit_w * 1000)

    def nvmlDeviceGetUtilizationRates(self, handle: Any, out: Any) -> None:  # noqa: N802
        _, gpu = self.gpu(handle)
        if gpu.mig_mode:
            raise _unsupported()
        rates = target(out)
        rates.gpu = busy(gpu.holders)
        rates.memory = rates.gpu // 2

    def nvmlDeviceGetPersistenceMode(self, handle: Any, out: Any) -> None:  # noqa: N802
        put(out, self.gpu(handle)[1].persistence)

    def nvmlDeviceSetPersistenceMode(self, handle: Any, mode: Any) -> None:  # noqa: N802
        _, gpu = self.gpu(handle)
        self.machine.set_gpu(gpu.uuid, persistence=number(mode))

    # --- processes -----------------------------------------------------------------------------

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, out: Any) -> int:  # noqa: N802
        return self._processes(handle, count, out, mps=False)

    def nvmlDeviceGetComputeRunningProcesses_v2(self, handle: Any, count: Any, out: Any) -> int:  # noqa: N802
        return self._processes(handle, count, out, mps=False)

    def nvmlDeviceGetMPSComputeRunningProcesses_v3(self, handle: Any, count: Any, out: Any) -> int:  # noqa: N802
        return self._processes(handle, count, out, mps=True)

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, handle: Any, count: Any, out: Any) -> int:  # noqa: N802
        self.device(handle)
        put(count, 0)
        return 0

    def _processes(self, handle: Any, count: Any, out: Any, *, mps: bool) -> int:
        _, gpu, parsed = self.device(handle)
        found = [holder for holder in self._holders(gpu, parsed) if holder.mps == mps]
        room = number(target(count))
        put(count, len(found))
        if not found:
            return int(pynvml.NVML_SUCCESS)
        if out is None or room < len(found):
            return int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
        for slot, holder in zip(target(out), found, strict=False):
            slot.pid, slot.usedGpuMemory = holder.pid, holder.memory_mib * MIB
            slot.gpuInstanceId = ANY_INSTANCE if holder.gpu_instance is None else holder.gpu_instance
            slot.computeInstanceId = (
                ANY_INSTANCE if holder.compute_instance is None else holder.compute_instance
            )
        return int(pynvml.NVML_SUCCESS)

    # --- health --------------------------------------------------------------------------------

    def _with_ecc(self, handle: Any) -> tuple[State, Gpu]:
        state, gpu, _ = self.device(handle)
        if not state.model_of(gpu).ecc:
            raise _unsupported()
        return state, gpu

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, kind: Any, counter: Any, out: Any) -> None:  # noqa: N802
        _, gpu = self._with_ecc(handle)
        put(out, gpu.ecc_uncorrected if number(kind) == 1 else gpu.ecc_corrected)

    def nvmlDeviceGetRemappedRows(self, handle: Any, *out: Any) -> None:  # noqa: N802
        state, gpu, _ = self.device(handle)
        if not state.model_of(gpu).row_remapper:
            raise _unsupported()
        for argument, value in zip(out, gpu.remapped_rows, strict=True):
            put(argument, value)

    def nvmlDeviceGetRetiredPagesPendingStatus(self, handle: Any, out: Any) -> None:  # noqa: N802
        state, gpu = self.gpu(handle)
        if not state.model_of(gpu).retired_pages:
            raise _unsupported()
        put(out, gpu.retired_pending)

    def nvmlDeviceGetSramEccErrorStatus(self, handle: Any, out: Any) -> int:  # noqa: N802
        _, gpu = self._with_ecc(handle)
        if target(out).version != pynvml.nvmlEccSramErrorStatus_v1:
            return int(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        target(out).bThresholdExceeded = gpu.sram_exceeded
        return int(pynvml.NVML_SUCCESS)

    def nvmlDeviceGetUnrepairableMemoryFlag_v1(self, handle: Any, out: Any) -> None:  # noqa: N802
        target(out).unrepairableMemory = self._with_ecc(handle)[1].memory_unrepairable

    def nvmlDeviceGetBankRemapperStatus_v1(self, handle: Any, out: Any) -> None:  # noqa: N802
        state, gpu = self._with_ecc(handle)
        if state.model_of(gpu).architecture < _RUBIN:
            raise _unsupported()
        target(out).bPending = gpu.bank_remap_pending

    def nvmlDeviceGetRepairStatus(self, handle: Any, out: Any) -> None:  # noqa: N802
        _, gpu = self._with_ecc(handle)
        target(out).bChannelRepairPending, target(out).bTpcRepairPending = gpu.repairs_pending

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: Any, out: Any) -> None:  # noqa: N802
        put(out, self.gpu(handle)[1].pcie_link[0])

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: Any, out: Any) -> None:  # noqa: N802
        put(out, self.gpu(handle)[1].pcie_link[1])

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: Any, out: Any) -> None:  # noqa: N802
        put(out, self.gpu(handle)[1].pcie_link[2])

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Any, out: Any) -> None:  # noqa: N802
        put(out, self.gpu(handle)[1].pcie_link[3])

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: Any, out: Any) -> None:  # noqa: N802
        put(out, self.gpu(handle)[1].slowdown)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any, out: Any) -> None:  # noqa: N802
        put(out, self.gpu(handle)[1].slowdown)


class Fields(Core):
    """Each value has its own return code."""

    def nvmlDeviceGetFieldValues(self, handle: Any, count: Any, out: Any) -> None:  # noqa: N802
        state, gpu, parsed = self.device(handle)
        values = target(out)
        for index in range(number(count)):
            entry = values[index]
            try:
                if parsed.is_mig:
                    raise Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
                answer = self._field(state, gpu, int(entry.fieldId), int(entry.scopeId))
            except Refusal as refusal:
                entry.nvmlReturn = refusal.code
                continue
            entry.nvmlReturn = pynvml.NVML_SUCCESS
            entry.valueType = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
            entry.value.ullVal = answer

    def _field(self, state: State, gpu: Gpu, field: int, scope: int) -> int:
        model = state.model_of(gpu)
        if field == _RESETLESS_MIG and model.mig:
            return int(model.resetless_mig)
        if field == _RECOVERY_ACTION:
            if int(state.driver_version.partition(".")[0]) < _RECOVERY_ACTION_SINCE:
                raise Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return gpu.recovery_action
        if model.nvlinks and model.architecture < _BLACKWELL and field in _NVLINK_ERRORS:
            return gpu.nvlink_errors.get(_NVLINK_ERRORS[field], 0)
        if scope < model.nvlinks and model.architecture >= _BLACKWELL and field == _LINK_RECOVERIES:
            # All of them were of the first link.
            return gpu.nvlink_errors.get("recovery", 0) if scope == 0 else 0
        raise Refusal(
            pynvml.NVML_ERROR_INVALID_ARGUMENT if field >= _LAST_FIELD else pynvml.NVML_ERROR_NOT_SUPPORTED
        )


class _Taken(NamedTuple):
    """What a sample shows: the MIG devices that there were in the GPU instance, and how busy they were."""

    devices: tuple[str, ...]
    percent: int


class Gpm(Core):
    """nvmlGpm*. Of two samples of different instances with the same ID a metric comes out that no device can have."""

    def __init__(self, machine: Any) -> None:
        super().__init__(machine)
        self._numbers = itertools.count(0x6000_0000, 16)
        self.gpm_samples: dict[int, _Taken | None] = {}

    def nvmlGpmQueryDeviceSupport(self, handle: Any, out: Any) -> None:  # noqa: N802
        state, gpu = self.gpu(handle)
        target(out).isSupportedDevice = int(state.model_of(gpu).architecture >= _HOPPER)

    def nvmlGpmSampleAlloc(self, out: Any) -> None:  # noqa: N802
        self.state()
        made = next(self._numbers)
        self.gpm_samples[made] = None
        put_handle(out, made)

    def nvmlGpmSampleFree(self, sample: Any) -> None:  # noqa: N802
        self.state()
        self.gpm_samples.pop(self._sample(sample))

    def nvmlGpmMigSampleGet(self, handle: Any, gi: Any, sample: Any) -> None:  # noqa: N802
        state, gpu = self.gpu(handle)
        if state.model_of(gpu).architecture < _HOPPER or not gpu.mig_mode:
            raise Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
        instance = gpu.instance(number(gi))
        if instance is None:
            raise Refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        holders = [holder for holder in gpu.holders if holder.gpu_instance == instance.id]
        taken = _Taken(tuple(device.uuid for device in instance.compute), busy(holders))
        self.gpm_samples[self._sample(sample)] = taken

    def nvmlGpmMetricsGet(self, out: Any) -> None:  # noqa: N802
        self.state()
        wanted = target(out)
        if wanted.version != pynvml.NVML_GPM_METRICS_GET_VERSION:
            raise Refusal(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        first, second = (self.gpm_samples[self._sample(one)] for one in (wanted.sample1, wanted.sample2))
        if first is None or second is None:
            raise Refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        is_same = first.devices == second.devices
        for metric in wanted.metrics[: wanted.numMetrics]:
            metric.nvmlReturn = pynvml.NVML_SUCCESS
            metric.value = (first.percent + second.percent) / 2 if is_same else _UNLIKE

    def _sample(self, sample: Any) -> int:
        found = address(sample)
        if found not in self.gpm_samples:
            raise Refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return found
