"""Library and driver versions, enumeration, identity."""

from __future__ import annotations

from typing import Any

import pynvml

from dra_driver.simulator.faults import error_text
from dra_driver.simulator.library.core import KIND_GPU, KIND_MIG, Core
from dra_driver.simulator.library.refs import number, put, put_handle, put_text, target, text
from dra_driver.simulator.mig import Refusal
from dra_driver.simulator.topology import nvml_bus_id, pci_numbers, sysfs_bus_id


class System(Core):
    """nvmlInit, nvmlSystem*, and the ways to get a handle."""

    # mypy: names below are C symbols; they are looked up by name
    def nvmlInit_v2(self) -> int:  # noqa: N802
        return self.init()

    def nvmlInitWithFlags(self, flags: Any) -> int:  # noqa: N802
        return self.init()

    def nvmlShutdown(self) -> int:  # noqa: N802
        return self.shutdown()

    def nvmlSystemGetDriverVersion(self, buffer: Any, size: Any) -> None:  # noqa: N802
        put_text(buffer, size, self.state().driver_version)

    def nvmlSystemGetCudaDriverVersion(self, out: Any) -> None:  # noqa: N802
        put(out, self.state().cuda_version)

    def nvmlSystemGetConfComputeState(self, out: Any) -> None:  # noqa: N802
        self._put_confidential(target(out), self._confidential(pynvml.NVML_DEVICE_ARCH_AMPERE))

    def nvmlSystemGetConfComputeSettings(self, out: Any) -> None:  # noqa: N802
        mode, settings = self._confidential(pynvml.NVML_DEVICE_ARCH_HOPPER), target(out)
        if settings.version != pynvml.nvmlSystemConfComputeSettings_v1:
            raise Refusal(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        self._put_confidential(settings, mode)
        settings.multiGpuMode = (
            pynvml.NVML_CC_SYSTEM_MULTIGPU_PROTECTED_PCIE
            if mode == "ppcie"
            else pynvml.NVML_CC_SYSTEM_MULTIGPU_NONE
        )

    def nvmlSystemGetConfComputeGpusReadyState(self, out: Any) -> None:  # noqa: N802
        self._confidential(pynvml.NVML_DEVICE_ARCH_AMPERE)
        put(out, int(self.state().system.get("confidential_ready", False)))

    def _confidential(self, architecture: int) -> str:
        """The mode; refused unless a GPU is of this architecture or a newer one."""
        state = self.state()
        if all(state.model_of(gpu).architecture < architecture for gpu in state.present):
            raise Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return str(state.system.get("confidential_compute", "off"))

    def _put_confidential(self, out: Any, mode: str) -> None:
        """With protected PCIe the feature itself is off, as real GPUs say."""
        out.environment = (
            pynvml.NVML_CC_SYSTEM_ENVIRONMENT_UNAVAILABLE
            if mode == "off"
            else pynvml.NVML_CC_SYSTEM_ENVIRONMENT_PROD
        )
        out.ccFeature = int(mode in ("on", "devtools"))
        out.devToolsMode = int(mode == "devtools")

    def nvmlSystemGetProcessName(self, pid: Any, buffer: Any, size: Any) -> None:  # noqa: N802
        for gpu in self.state().present:
            for holder in gpu.holders:
                if holder.pid == number(pid):
                    return put_text(buffer, size, holder.name)
        raise Refusal(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetCount_v2(self, out: Any) -> None:  # noqa: N802
        self.state()
        put(out, len(self._order))

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, out: Any) -> None:  # noqa: N802
        state = self.state()
        wanted = number(index)
        if wanted >= len(self._order):
            raise Refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        put_handle(out, self.make(KIND_GPU, self.gpu_of(state, self._order[wanted]).uuid))

    def nvmlDeviceGetHandleByUUID(self, uuid: Any, out: Any) -> None:  # noqa: N802
        state = self.state()
        wanted = text(uuid)
        for known in self._order:
            gpu = state.by_uuid.get(known)
            if known == wanted:
                return put_handle(out, self.make(KIND_GPU, self.gpu_of(state, known).uuid))
            for gi, ci in gpu.mig_devices if gpu else []:
                if ci.uuid == wanted:
                    self.gpu_of(state, known)
                    return put_handle(out, self.make(KIND_MIG, known, gi.id, ci.id))
        raise Refusal(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetHandleByPciBusId_v2(self, bus_id: Any, out: Any) -> None:  # noqa: N802
        state = self.state()
        wanted = sysfs_bus_id(text(bus_id))
        for known in self._order:
            gpu = state.by_uuid.get(known)
            if gpu is not None and gpu.bus_id == wanted:
                return put_handle(out, self.make(KIND_GPU, self.gpu_of(state, known).uuid))
        raise Refusal(pynvml.NVML_ERROR_NOT_FOUND)

    def nvmlDeviceGetIndex(self, handle: Any, out: Any) -> None:  # noqa: N802
        _, gpu, parsed = self.device(handle)
        if parsed.is_mig:
            return put(out, self.mig_device(gpu, parsed)[1].index)
        if gpu.uuid not in self._order:
            raise Refusal(pynvml.NVML_ERROR_GPU_NOT_FOUND)
        return put(out, self._order.index(gpu.uuid))

    def nvmlDeviceGetUUID(self, handle: Any, buffer: Any, size: Any) -> None:  # noqa: N802
        _, gpu, parsed = self.device(handle)
        put_text(buffer, size, self.mig_device(gpu, parsed)[1].uuid if parsed.is_mig else gpu.uuid)

    def nvmlDeviceGetMinorNumber(self, handle: Any, out: Any) -> None:  # noqa: N802
        put(out, self.gpu(handle)[1].minor)

    def nvmlDeviceGetName(self, handle: Any, buffer: Any, size: Any) -> None:  # noqa: N802
        state, gpu, parsed = self.device(handle)
        model = state.model_of(gpu)
        name = model.name
        if parsed.is_mig:
            instance, _ = self.mig_device(gpu, parsed)
            profile = next(row.name for row in model.mig if row.id == instance.profile_id)
            name = f"{model.name} MIG {profile}"
        put_text(buffer, size, name)

    def nvmlDeviceGetPciInfo_v3(self, handle: Any, out: Any) -> None:  # noqa: N802
        state, gpu, _ = self.device(handle)
        info, model = target(out), state.model_of(gpu)
        info.domain, info.bus, info.device = pci_numbers(gpu.bus_id)
        info.pciDeviceId, info.pciSubSystemId = model.pci_id, model.subsystem_id
        info.busIdLegacy = gpu.bus_id.upper().encode()
        info.busId = nvml_bus_id(gpu.bus_id).encode()

    def nvmlErrorString(self, code: Any) -> bytes:  # noqa: N802
        return error_text(number(code)).encode()
