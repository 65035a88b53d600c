"""The whole machine: versions, enumeration, identity, and events, including those that other processes raise."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import pynvml

from dra_driver.model.dataclass import dataclass, field
from dra_driver.simulator.library.core import (
    KIND_GPU,
    KIND_MIG,
    Core,
    address,
    as_handle,
    number,
    program,
    put,
    put_handle,
    put_text,
    target,
    text,
)
from dra_driver.simulator.machine import Machine
from dra_driver.simulator.machine_files import Session
from dra_driver.simulator.machine_state import Event, State, nvml_bus_id, pci_numbers, sysfs_bus_id
from dra_driver.simulator.mig import Refusal

_SET_BASE = 0x7E10_0000_0000
_set_numbers = itertools.count(1)
_device_files: dict[int, Session] = {}
"""By event set. The real driver keeps a GPU's device file open until the set is freed, even after a shutdown."""
_POLL_S = 1.0
"""How often a wait for events checks for changes by other processes."""


class System(Core):
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
        """Refuse unless a GPU has this architecture or a newer one."""
        state = self.state()
        if all(state.model_of(gpu).architecture < architecture for gpu in state.present):
            raise Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return str(state.system.get("confidential_compute", "off"))

    def _put_confidential(self, out: Any, mode: str) -> None:
        """Switch the confidential computing feature off with protected PCIe, as on real GPUs."""
        out.environment = (
            pynvml.NVML_CC_SYSTEM_ENVIRONMENT_UNAVAILABLE
            if mode == "off"
            else pynvml.NVML_CC_SYSTEM_ENVIRONMENT_PROD
        )
        out.ccFeature = int(mode in ("on", "devtools"))
        out.devToolsMode = int(mode == "devtools")

    def nvmlSystemGetProcessName(self, pid: Any, buffer: Any, size: Any) -> None:  # noqa: N802
        wanted = number(pid)
        for gpu in self.state().present:
            for holder in gpu.holders:
                if holder.pid == wanted:
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


@dataclass(slots=True)
class _EventSet:
    """For each GPU, `masks` has the event types, the last event before its registration, and its number of resets
    then.
    """

    masks: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    seen: int = 0
    checked: int = -1
    reported_lost: set[str] = field(default_factory=set)


class Waiting(Core):
    """A reset of a GPU, also by a change of its MIG mode, silently ends its registrations.

    After a GPU is lost, a wait first returns the earlier events, then GPU_IS_LOST once for each set and GPU.
    """

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self._sets: dict[int, _EventSet] = {}
        self._sets_lock = threading.Lock()

    def _set(self, handle: Any) -> _EventSet:
        found = self._sets.get(address(handle))
        if found is None:
            raise Refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return found

    def nvmlEventSetCreate(self, out: Any) -> None:  # noqa: N802
        self.state()
        key = _SET_BASE | next(_set_numbers) << 4
        self._sets[key] = _EventSet()
        put_handle(out, key)

    def nvmlEventSetFree(self, handle: Any) -> None:  # noqa: N802
        self._set(handle)
        self._sets.pop(address(handle), None)
        with self._sets_lock:
            if files := _device_files.pop(address(handle), None):
                self.machine.close_session(files)

    def nvmlDeviceGetSupportedEventTypes(self, handle: Any, out: Any) -> None:  # noqa: N802
        state, gpu, parsed = self.device(handle)
        put(out, 0 if parsed.is_mig else state.model_of(gpu).events)

    def nvmlDeviceRegisterEvents(self, handle: Any, mask: Any, event_set: Any) -> None:  # noqa: N802
        state, gpu = self.gpu(handle)
        wanted = number(mask)
        if not wanted or wanted & ~state.model_of(gpu).events:
            raise Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
        events = self._set(event_set)
        with self._sets_lock:
            if address(event_set) not in _device_files:
                _device_files[address(event_set)] = self.machine.open_session(program())
            before, since, resets = events.masks.get(gpu.uuid, (0, state.event_seq, gpu.resets))
            if resets != gpu.resets:
                before, since = 0, state.event_seq
            events.masks[gpu.uuid] = (before | wanted, since, gpu.resets)
            events.checked = -1

    def nvmlEventSetWait_v2(self, handle: Any, out: Any, timeout: Any) -> None:  # noqa: N802
        deadline = time.monotonic() + number(timeout) / 1000
        while True:
            events = self._set(handle)
            state = self.state()
            if state.version != events.checked:
                found = self._next(state, events)
                if found is not None:
                    return self._fill(target(out), found)
                self._report_lost(state, events)
                events.checked = state.version
            left = deadline - time.monotonic()
            if left <= 0:
                raise Refusal(pynvml.NVML_ERROR_TIMEOUT)
            self.machine.wait_changed(state, min(_POLL_S, left))

    def _next(self, state: State, events: _EventSet) -> Event | None:
        with self._sets_lock:
            for event in state.events:
                if event.seq <= events.seen:
                    continue
                mask, since, resets = events.masks.get(event.gpu, (0, 0, 0))
                gpu = state.by_uuid.get(event.gpu)
                if gpu is None or gpu.resets != resets:
                    continue
                if event.seq > since and event.type & mask:
                    events.seen = event.seq
                    return event
        return None

    def _report_lost(self, state: State, events: _EventSet) -> None:
        lost = {
            uuid
            for uuid in events.masks
            if (gpu := state.by_uuid.get(uuid)) is None or gpu.lost or not gpu.present
        }
        news = lost - events.reported_lost
        events.reported_lost = lost
        if news:
            raise Refusal(pynvml.NVML_ERROR_GPU_IS_LOST)

    def _fill(self, data: Any, event: Event) -> None:
        data.device = as_handle(self.make(KIND_GPU, event.gpu), pynvml.c_nvmlDevice_t)
        data.eventType, data.eventData = event.type, event.data
        data.gpuInstanceId, data.computeInstanceId = event.gpu_instance, event.compute_instance
