"""Properties and modes of one device: memory, class, compute and persistence mode, processes, health counters."""

from __future__ import annotations

from typing import Any

import pynvml

from dra_driver.simulator.library.core import Core, Handle
from dra_driver.simulator.library.refs import Return, number, put, put_text, target
from dra_driver.simulator.state import ANY_INSTANCE, Gpu, Holder, State

MIB = 1 << 20
_COMPUTE_MODES = {
    pynvml.NVML_COMPUTEMODE_DEFAULT,
    pynvml.NVML_COMPUTEMODE_PROHIBITED,
    pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS,
}


def _unsupported() -> Return:
    return Return(pynvml.NVML_ERROR_NOT_SUPPORTED)


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
            raise Return(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
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

    def nvmlDeviceGetBAR1MemoryInfo(self, handle: Any, out: Any) -> None:  # noqa: N802
        state, gpu, _ = self.device(handle)
        size = state.model_of(gpu).memory_bytes
        if size is None:
            raise _unsupported()
        info = target(out)
        info.bar1Total = 1 << (size - 1).bit_length()
        info.bar1Used = 2 * MIB
        info.bar1Free = info.bar1Total - info.bar1Used

    def nvmlDeviceGetAddressingMode(self, handle: Any, out: Any) -> None:  # noqa: N802
        info = target(out)
        if info.version != pynvml.nvmlDeviceAddressingMode_v1:
            raise Return(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        mode = self.device(handle)[1].addressing
        if mode is None:
            raise _unsupported()
        info.value = mode

    def nvmlDeviceGetVirtualizationMode(self, handle: Any, out: Any) -> None:  # noqa: N802
        put(out, self.gpu(handle)[1].virtualization)

    def nvmlDeviceGetPersistenceMode(self, handle: Any, out: Any) -> None:  # noqa: N802
        put(out, self.gpu(handle)[1].persistence)

    def nvmlDeviceSetPersistenceMode(self, handle: Any, mode: Any) -> None:  # noqa: N802
        _, gpu = self.gpu(handle)
        if number(mode) not in (0, 1):
            raise Return(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        self.machine.update_gpu(gpu.uuid, lambda copy: setattr(copy, "persistence", number(mode)))

    def nvmlDeviceGetComputeMode(self, handle: Any, out: Any) -> None:  # noqa: N802
        _, gpu, _ = self.device(handle)
        put(out, self.machine.compute_mode(gpu.uuid))

    def nvmlDeviceSetComputeMode(self, handle: Any, mode: Any) -> None:  # noqa: N802
        _, gpu = self.gpu(handle)
        if gpu.mig_mode:
            raise _unsupported()
        if number(mode) not in _COMPUTE_MODES:
            raise Return(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        self.machine.set_compute_mode(gpu.uuid, number(mode))

    def nvmlDeviceGetNumaNodeId(self, handle: Any, out: Any) -> None:  # noqa: N802
        node = self.device(handle)[1].memory_numa
        if node is None:
            raise _unsupported()
        put(out, node)

    def nvmlDeviceGetC2cModeInfoV(self, handle: Any, out: Any) -> None:  # noqa: N802
        state, gpu = self.gpu(handle)
        if not state.model_of(gpu).c2c_links:
            raise _unsupported()
        target(out).isC2cEnabled = 1

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: Any, out: Any) -> None:  # noqa: N802
        state, gpu = self.gpu(handle)
        put(out, state.model_of(gpu).pcie_generation)

    nvmlDeviceGetCurrPcieLinkGeneration = nvmlDeviceGetMaxPcieLinkGeneration  # noqa: N815
    nvmlDeviceGetGpuMaxPcieLinkGeneration = nvmlDeviceGetMaxPcieLinkGeneration  # noqa: N815

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: Any, out: Any) -> None:  # noqa: N802
        self.gpu(handle)
        put(out, 16)

    nvmlDeviceGetCurrPcieLinkWidth = nvmlDeviceGetMaxPcieLinkWidth  # noqa: N815

    def nvmlDeviceGetBoardPartNumber(self, handle: Any, buffer: Any, size: Any) -> None:  # noqa: N802
        state, gpu = self.gpu(handle)
        if not state.model_of(gpu).part_number:
            raise _unsupported()
        put_text(buffer, size, state.model_of(gpu).part_number)

    def nvmlDeviceGetVbiosVersion(self, handle: Any, buffer: Any, size: Any) -> None:  # noqa: N802
        state, gpu = self.gpu(handle)
        put_text(buffer, size, state.model_of(gpu).vbios)

    def nvmlDeviceGetMultiGpuBoard(self, handle: Any, out: Any) -> None:  # noqa: N802
        self.gpu(handle)
        put(out, 0)

    def nvmlDeviceGetDisplayActive(self, handle: Any, out: Any) -> None:  # noqa: N802
        self.gpu(handle)
        put(out, 0)

    def nvmlDeviceGetGspFirmwareMode(self, handle: Any, enabled: Any, default: Any) -> None:  # noqa: N802
        state, gpu = self.gpu(handle)
        runs = int(state.model_of(gpu).architecture >= 6)
        put(enabled, runs)
        put(default, runs)

    def nvmlDeviceGetTemperature(self, handle: Any, sensor: Any, out: Any) -> None:  # noqa: N802
        put(out, 30 + self.gpu(handle)[1].minor % 8)

    def nvmlDeviceGetPowerUsage(self, handle: Any, out: Any) -> None:  # noqa: N802
        state, gpu = self.gpu(handle)
        put(out, state.model_of(gpu).power_limit_w * 100)

    def nvmlDeviceGetPowerManagementLimit(self, handle: Any, out: Any) -> None:  # noqa: N802
        state, gpu = self.gpu(handle)
        put(out, state.model_of(gpu).power_limit_w * 1000)

    nvmlDeviceGetEnforcedPowerLimit = nvmlDeviceGetPowerManagementLimit  # noqa: N815

    def nvmlDeviceGetPerformanceState(self, handle: Any, out: Any) -> None:  # noqa: N802
        self.gpu(handle)
        put(out, 0)

    def nvmlDeviceGetUtilizationRates(self, handle: Any, out: Any) -> None:  # noqa: N802
        _, gpu = self.gpu(handle)
        if gpu.mig_mode:
            raise _unsupported()
        rates = target(out)
        rates.gpu, rates.memory = (40, 20) if gpu.holders else (0, 0)

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

    def nvmlDeviceGetEccMode(self, handle: Any, current: Any, pending: Any) -> None:  # noqa: N802
        self._with_ecc(handle)
        put(current, 1)
        put(pending, 1)

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, kind: Any, counter: Any, out: Any) -> None:  # noqa: N802
        _, gpu = self._with_ecc(handle)
        put(out, gpu.ecc_uncorrected if number(kind) == 1 else gpu.ecc_corrected)

    def nvmlDeviceGetRemappedRows(self, handle: Any, *out: Any) -> None:  # noqa: N802
        state, gpu, _ = self.device(handle)
        if not state.model_of(gpu).row_remapper:
            raise _unsupported()
        for argument, value in zip(out, gpu.remapped_rows, strict=True):
            put(argument, value)

    def nvmlDeviceGetRowRemapperHistogram(self, handle: Any, out: Any) -> None:  # noqa: N802
        state, gpu, _ = self.device(handle)
        if not state.model_of(gpu).row_remapper:
            raise _unsupported()
        histogram = target(out)
        histogram.max, histogram.high, histogram.partial, histogram.low, histogram.none = 640, 0, 0, 0, 0

    def nvmlDeviceGetRetiredPagesPendingStatus(self, handle: Any, out: Any) -> None:  # noqa: N802
        state, gpu = self.gpu(handle)
        if not state.model_of(gpu).retired_pages:
            raise _unsupported()
        put(out, gpu.retired_pending)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any, out: Any) -> None:  # noqa: N802
        put(out, self.gpu(handle)[1].slowdown)

    def nvmlDeviceGetRepairStatus(self, handle: Any, out: Any) -> None:  # noqa: N802
        state, gpu = self.gpu(handle)
        if not state.model_of(gpu).row_remapper:
            raise _unsupported()
        status = target(out)
        status.bChannelRepairPending = status.bTpcRepairPending = 0

    def nvmlDeviceGetUnrepairableMemoryFlag_v1(self, handle: Any, out: Any) -> None:  # noqa: N802
        _, gpu = self._with_ecc(handle)
        target(out).unrepairableMemory = gpu.remapped_rows[3]
