"""One device: its properties, processes, health counters and field values; GPM; NVLinks, peer access and fabric."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import pynvml

from dra_driver.simulator.catalogue import PLACEHOLDER_BUS
from dra_driver.simulator.library.core import (
    Core,
    Handle,
    address,
    number,
    put,
    put_handle,
    rows_for,
    target,
)
from dra_driver.simulator.machine import Machine
from dra_driver.simulator.machine_state import (
    ANY_INSTANCE,
    REMOTE_SWITCH,
    RUBIN,
    Gpu,
    Holder,
    Model,
    State,
    active_links,
    nvlink_peers,
    nvml_bus_id,
    pci_numbers,
)
from dra_driver.simulator.mig import Refusal, max_devices

MIB = 1 << 20
_RESETLESS_MIG = 184
_RECOVERY_ACTION = 230
_RECOVERY_ACTION_SINCE = 570
_LAST_FIELD = 512
_BLACKWELL = 10
_NVLINK_ERRORS = {38: "crc", 45: "crc data", 52: "replay", 59: "recovery"}
"""Totals over all links, on GPUs before Blackwell; later GPUs have a count for each link."""
_LINK_RECOVERIES = 215
_HOPPER, _AMPERE, _VOLTA = 9, 7, 5
_UNLIKE = 4711.0
_IDLE_POWER, _LOAD_POWER = 0.1, 0.8
"""As fractions of the limit; the load comes in addition."""
_CLOCKS_MHZ = {pynvml.NVML_CLOCK_SM: (345, 1755), pynvml.NVML_CLOCK_MEM: (1593, 1593)}
"""Idle, and busy."""
_PCIE_FIELDS = (pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES)
_NVLINK_FIELDS = (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
_ALL_LINKS = 0xFFFFFFFF
_PCIE_BYTES_S, _LINK_KIB_S = 10**9, 10**6
_SAMPLE_S, _KEPT_SAMPLES = 0.2, 100


def _limit_mw(model: Model, gpu: Gpu) -> int:
    limits = (model.power_limit_w * 1000, gpu.power_limit_mw, gpu.power_enforced_mw)
    return min(limit for limit in limits if limit is not None)


def _wanted_mw(model: Model, gpu: Gpu) -> int:
    return round(model.power_limit_w * 1000 * (_IDLE_POWER + _LOAD_POWER * gpu.busy / 100))


def _power_mw(model: Model, gpu: Gpu) -> int:
    return min(_wanted_mw(model, gpu), _limit_mw(model, gpu))


def _clock_reasons(model: Model, gpu: Gpu) -> int:
    is_capped = _wanted_mw(model, gpu) > _limit_mw(model, gpu)
    return gpu.slowdown | (pynvml.nvmlClocksEventReasonSwPowerCap if is_capped else 0)


def _if_settable(value: Callable[[Model, Gpu], Any]) -> _Read:
    return lambda model, gpu: value(model, gpu) if _is_settable(model, gpu) else None


def _is_settable(model: Model, gpu: Gpu) -> bool:
    return bool(model.power_min_w) and gpu.virtualization != pynvml.NVML_GPU_VIRTUALIZATION_MODE_VGPU


def _energy_mj(model: Model, gpu: Gpu) -> int | None:
    """Return None for older GPUs, which do not count energy."""
    now = time.time()
    full_s = _IDLE_POWER * (now - gpu.loads[0][0]) + _LOAD_POWER * gpu.busy_s(now)
    return round(model.power_limit_w * 1000 * full_s) if model.architecture >= _VOLTA else None


def _celsius(_model: Model, gpu: Gpu) -> int:
    return 30 + gpu.minor % 8 + 40 * gpu.busy // 100


def _platform(gpu: Gpu) -> Mapping[str, Any] | None:
    if not gpu.chassis:
        return None
    slot, tray = (bytes([int(gpu.chassis[name])]) for name in ("slot", "tray"))
    serial = str(gpu.chassis["serial"]).encode()
    return {"chassisSerialNumber": serial, "slotNumber": slot, "trayIndex": tray}


_Read = Callable[[Model, Gpu], int | Sequence[int] | Mapping[str, Any] | None]
"""Return one value, the values of several output arguments, or the fields of a struct; None if the GPU does not support
the call.
"""
_OF_GPUS: Mapping[str, _Read] = {
    "nvmlDeviceGetCurrPcieLinkGeneration": lambda _, gpu: gpu.pcie_link[2],
    "nvmlDeviceGetCurrPcieLinkWidth": lambda _, gpu: gpu.pcie_link[0],
    "nvmlDeviceGetCurrentClocksEventReasons": _clock_reasons,
    "nvmlDeviceGetCurrentClocksThrottleReasons": _clock_reasons,
    "nvmlDeviceGetEnforcedPowerLimit": _limit_mw,
    "nvmlDeviceGetMaxMigDeviceCount": lambda model, gpu: max_devices(model) if gpu.mig_mode else 0,
    "nvmlDeviceGetMaxPcieLinkGeneration": lambda _, gpu: gpu.pcie_link[3],
    "nvmlDeviceGetMaxPcieLinkWidth": lambda _, gpu: gpu.pcie_link[1],
    "nvmlDeviceGetMigMode": lambda model, gpu: (gpu.mig_mode, gpu.mig_pending) if model.mig else None,
    "nvmlDeviceGetMinorNumber": lambda _, gpu: gpu.minor,
    "nvmlDeviceGetModuleId": lambda _, gpu: gpu.module,
    "nvmlDeviceGetNumGpuCores": lambda model, _: model.cores,
    "nvmlDeviceGetPersistenceMode": lambda _, gpu: gpu.persistence,
    "nvmlDeviceGetPowerManagementDefaultLimit": _if_settable(lambda model, _: model.power_limit_w * 1000),
    "nvmlDeviceGetPowerManagementLimit": _if_settable(
        lambda model, gpu: gpu.power_limit_mw or model.power_limit_w * 1000
    ),
    "nvmlDeviceGetPowerManagementLimitConstraints": _if_settable(
        lambda model, _: (model.power_min_w * 1000, model.power_limit_w * 1000)
    ),
    "nvmlDeviceGetPlatformInfo": lambda _, gpu: _platform(gpu),
    "nvmlDeviceGetPowerUsage": _power_mw,
    "nvmlDeviceGetRetiredPagesPendingStatus": lambda model, gpu: gpu.retired_pending if model.retired_pages else None,
    "nvmlDeviceGetTemperature": _celsius,
    "nvmlDeviceGetTemperatureV": lambda model, gpu: {"temperature": _celsius(model, gpu)},
    "nvmlDeviceGetTotalEnergyConsumption": _energy_mj,
    "nvmlDeviceGetVirtualizationMode": lambda _, gpu: gpu.virtualization,
    "nvmlGpmQueryDeviceSupport": lambda model, _: {"isSupportedDevice": model.architecture >= _HOPPER},
}  # fmt: skip
_OF_ECC: Mapping[str, _Read] = {
    "nvmlDeviceGetBankRemapperStatus_v1": lambda model, gpu: (
        {"bPending": gpu.bank_remap_pending} if model.architecture >= RUBIN else None
    ),
    "nvmlDeviceGetRepairStatus": lambda _, gpu: dict(
        zip(("bChannelRepairPending", "bTpcRepairPending"), gpu.repairs_pending, strict=True)
    ),
    "nvmlDeviceGetSramEccErrorStatus": lambda _, gpu: {"bThresholdExceeded": gpu.sram_exceeded},
    "nvmlDeviceGetUnrepairableMemoryFlag_v1": lambda _, gpu: {"unrepairableMemory": gpu.memory_unrepairable},
}
_OF_MIG_TOO: Mapping[str, _Read] = {
    **_OF_ECC,
    "nvmlDeviceGetAddressingMode": lambda _, gpu: None if gpu.addressing is None else {"value": gpu.addressing},
    "nvmlDeviceGetArchitecture": lambda model, _: model.architecture,
    "nvmlDeviceGetBrand": lambda model, _: model.brand,
    "nvmlDeviceGetCudaComputeCapability": lambda model, _: model.compute,
    "nvmlDeviceGetNumaNodeId": lambda _, gpu: gpu.memory_numa,
    "nvmlDeviceGetRemappedRows": lambda model, gpu: gpu.remapped_rows if model.row_remapper else None,
}  # fmt: skip
_VERSIONS = {
    "nvmlDeviceGetAddressingMode": pynvml.nvmlDeviceAddressingMode_v1,
    "nvmlDeviceGetPlatformInfo": pynvml.nvmlPlatformInfo_v2,
    "nvmlDeviceGetSramEccErrorStatus": pynvml.nvmlEccSramErrorStatus_v1,
}
"""The only valid version of these structs."""


def busy(holders: Iterable[Holder]) -> int:
    return min(100, sum(holder.utilisation for holder in holders))


def _unsupported() -> Refusal:
    return Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)


class Device(Core):
    @property
    def getters(self) -> dict[str, Callable[..., None]]:
        return {name: partial(self._get, name, read) for name, read in {**_OF_GPUS, **_OF_MIG_TOO}.items()}

    def _get(self, name: str, read: _Read, handle: Any, *arguments: Any) -> None:
        state, gpu = self.device(handle)[:2] if name in _OF_MIG_TOO else self.gpu(handle)
        found, out = read(state.model_of(gpu), gpu), target(arguments[-1])
        if name in _VERSIONS and out.version != _VERSIONS[name]:
            raise Refusal(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        match found:
            case _ if found is None or (name in _OF_ECC and not state.model_of(gpu).ecc):
                raise _unsupported()
            case Mapping():
                for field, value in found.items():
                    setattr(out, field, value)
            case int():
                put(out, found)
            case _:
                for argument, value in zip(arguments, found, strict=True):
                    put(argument, value)

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

    def nvmlDeviceGetUtilizationRates(self, handle: Any, out: Any) -> None:  # noqa: N802
        _, gpu = self.gpu(handle)
        if gpu.mig_mode:
            raise _unsupported()
        rates = target(out)
        rates.gpu = gpu.busy
        rates.memory = rates.gpu // 2

    def nvmlDeviceGetSamples(  # noqa: N802
        self, handle: Any, kind: Any, since: Any, value_type: Any, count: Any, out: Any
    ) -> None:
        """Only samples of the utilisation. An idle GPU has none."""
        _, gpu = self.gpu(handle)
        if gpu.mig_mode or number(kind) != pynvml.NVML_GPU_UTILIZATION_SAMPLES:
            raise _unsupported()
        last = int(time.time() / _SAMPLE_S)
        first = max(int(number(since) / 1e6 / _SAMPLE_S) + 1, last - _KEPT_SAMPLES + 1)
        found = [(tick * _SAMPLE_S, gpu.load_at((tick - 0.5) * _SAMPLE_S)) for tick in range(first, last + 1)]
        put(value_type, pynvml.NVML_VALUE_TYPE_UNSIGNED_INT)
        if not any(percent for _, percent in found):
            raise Refusal(pynvml.NVML_ERROR_NOT_FOUND)
        room = len(found) if out is None else number(target(count))
        put(count, min(room, len(found)))
        for slot, (at, percent) in zip(target(out) or (), found[:room], strict=False):
            slot.timeStamp, slot.sampleValue.uiVal = int(at * 1e6), percent

    def nvmlDeviceGetClockInfo(self, handle: Any, kind: Any, out: Any) -> None:  # noqa: N802
        _, gpu = self.gpu(handle)
        if number(kind) not in _CLOCKS_MHZ:
            raise Refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        domain = "memory" if number(kind) == pynvml.NVML_CLOCK_MEM else "graphics"
        least, most = gpu.locked_mhz.get(domain, (0, 10_000))
        put(out, min(most, max(least, _CLOCKS_MHZ[number(kind)][bool(gpu.busy)])))

    def nvmlDeviceSetPersistenceMode(self, handle: Any, mode: Any) -> None:  # noqa: N802
        _, gpu = self.gpu(handle)
        self.machine.set_gpu(gpu.uuid, persistence=number(mode))

    # --- limits --------------------------------------------------------------------------------

    def nvmlDeviceSetPowerManagementLimit(self, handle: Any, limit: Any) -> None:  # noqa: N802
        model, gpu = self._settable(handle)
        if not model.power_min_w * 1000 <= number(limit) <= model.power_limit_w * 1000:
            raise Refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        self.machine.set_gpu(gpu.uuid, power_limit_mw=number(limit))

    def nvmlDeviceSetGpuLockedClocks(self, handle: Any, least: Any, most: Any) -> None:  # noqa: N802
        self._lock(handle, "graphics", [number(least), number(most)])

    def nvmlDeviceSetMemoryLockedClocks(self, handle: Any, least: Any, most: Any) -> None:  # noqa: N802
        self._lock(handle, "memory", [number(least), number(most)])

    def nvmlDeviceResetGpuLockedClocks(self, handle: Any) -> None:  # noqa: N802
        self._lock(handle, "graphics", None)

    def nvmlDeviceResetMemoryLockedClocks(self, handle: Any) -> None:  # noqa: N802
        self._lock(handle, "memory", None)

    def nvmlDeviceGetSupportedMemoryClocks(self, handle: Any, count: Any, out: Any) -> None:  # noqa: N802
        self._clocks(self._settable(handle)[0].memory_mhz, count, out)

    def nvmlDeviceGetSupportedGraphicsClocks(  # noqa: N802
        self, handle: Any, memory: Any, count: Any, out: Any
    ) -> None:
        model, _ = self._settable(handle)
        if number(memory) not in model.memory_mhz:
            raise Refusal(pynvml.NVML_ERROR_NOT_FOUND)
        self._clocks(model.graphics_mhz, count, out)

    def _settable(self, handle: Any) -> tuple[Model, Gpu]:
        state, gpu = self.gpu(handle)
        model = state.model_of(gpu)
        if not _is_settable(model, gpu):
            raise _unsupported()
        return model, gpu

    def _lock(self, handle: Any, domain: str, clocks: list[int] | None) -> None:
        model, gpu = self._settable(handle)
        others = {name: one for name, one in gpu.locked_mhz.items() if name != domain}
        known = model.memory_mhz if domain == "memory" else model.graphics_mhz
        if model.architecture < (_AMPERE if domain == "memory" else _VOLTA):
            raise _unsupported()
        if clocks is not None and not min(known) <= clocks[0] <= clocks[1] <= max(known):
            raise Refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        self.machine.set_gpu(gpu.uuid, locked_mhz=others if clocks is None else {**others, domain: clocks})

    def _clocks(self, clocks: list[int], count: Any, out: Any) -> None:
        rows_for(out, count, len(clocks))[: len(clocks)] = clocks

    # --- processes -----------------------------------------------------------------------------

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, out: Any) -> None:  # noqa: N802
        self._processes(handle, count, out, mps=False)

    def nvmlDeviceGetComputeRunningProcesses_v2(self, handle: Any, count: Any, out: Any) -> None:  # noqa: N802
        self._processes(handle, count, out, mps=False)

    def nvmlDeviceGetMPSComputeRunningProcesses_v3(self, handle: Any, count: Any, out: Any) -> None:  # noqa: N802
        self._processes(handle, count, out, mps=True)

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, handle: Any, count: Any, out: Any) -> None:  # noqa: N802
        self.device(handle)
        put(count, 0)

    def nvmlDeviceGetProcessUtilization(self, handle: Any, out: Any, count: Any, since: Any) -> None:  # noqa: N802
        """MPS clients have no samples. Each sample has the current time."""
        _, gpu = self.gpu(handle)
        if gpu.mig_mode:
            raise _unsupported()
        now = time.time_ns() // 1000
        found = [one for one in gpu.holders if one.utilisation and not one.mps] if number(since) < now else []
        rows = rows_for(out, count, len(found))
        if not found:
            raise Refusal(pynvml.NVML_ERROR_NOT_FOUND)
        for slot, holder in zip(rows, found, strict=False):
            slot.pid, slot.timeStamp, slot.smUtil = holder.pid, now, holder.utilisation

    def _processes(self, handle: Any, count: Any, out: Any, *, mps: bool) -> None:
        _, gpu, parsed = self.device(handle)
        found = [holder for holder in self._holders(gpu, parsed) if holder.mps == mps]
        for slot, holder in zip(rows_for(out, count, len(found)), found, strict=False):
            slot.pid, slot.usedGpuMemory = holder.pid, holder.memory_mib * MIB
            slot.gpuInstanceId = ANY_INSTANCE if holder.gpu_instance is None else holder.gpu_instance
            slot.computeInstanceId = (
                ANY_INSTANCE if holder.compute_instance is None else holder.compute_instance
            )

    # --- health --------------------------------------------------------------------------------

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, kind: Any, counter: Any, out: Any) -> None:  # noqa: N802
        state, gpu, _ = self.device(handle)
        if not state.model_of(gpu).ecc:
            raise _unsupported()
        put(out, gpu.ecc_uncorrected if number(kind) == 1 else gpu.ecc_corrected)

    # --- field values: each has its own return code --------------------------------------------

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
            if state.branch < _RECOVERY_ACTION_SINCE:
                raise Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
            return gpu.recovery_action
        if model.nvlinks and model.architecture < _BLACKWELL and field in _NVLINK_ERRORS:
            return gpu.nvlink_errors.get(_NVLINK_ERRORS[field], 0)
        if field in _PCIE_FIELDS and model.architecture >= _HOPPER:
            return int(gpu.busy_s(time.time()) * _PCIE_BYTES_S)
        if field in _NVLINK_FIELDS and model.nvlinks and (scope < model.nvlinks or scope == _ALL_LINKS):
            links = len(active_links(gpu)) if scope == _ALL_LINKS else 1
            return int(gpu.busy_s(time.time()) * _LINK_KIB_S) * links
        if scope < model.nvlinks and model.architecture >= _BLACKWELL and field == _LINK_RECOVERIES:
            # The state has only totals, which are reported for the first link.
            return gpu.nvlink_errors.get("recovery", 0) if scope == 0 else 0
        raise Refusal(
            pynvml.NVML_ERROR_INVALID_ARGUMENT if field >= _LAST_FIELD else pynvml.NVML_ERROR_NOT_SUPPORTED
        )


class _Taken(NamedTuple):
    devices: tuple[str, ...]
    percent: int


class Gpm(Core):
    """If a GPU instance is replaced by one with the same ID between two samples, the metrics get an impossible
    value.
    """

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self._numbers = itertools.count(0x6000_0000, 16)
        self.gpm_samples: dict[int, _Taken | None] = {}

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


_GPU_FABRIC_V3_SINCE = 575
_UNICAST_POINTER = 0


class Links(Core):
    def _link(self, handle: Any, link: Any) -> tuple[State, Gpu, Model, int]:
        state, gpu = self.gpu(handle)
        model = state.model_of(gpu)
        if not model.nvlinks:
            raise Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
        if not 0 <= number(link) < model.nvlinks:
            raise Refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        if number(link) in gpu.links_unsupported:
            raise Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return state, gpu, model, number(link)

    def _active(self, handle: Any, link: Any) -> tuple[State, Gpu, Model, int, str]:
        state, gpu, model, wanted = self._link(handle, link)
        for index, kind, remote in active_links(gpu):
            if index == wanted:
                return state, gpu, model, kind, remote or PLACEHOLDER_BUS
        raise Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlDeviceGetNvLinkState(self, handle: Any, link: Any, out: Any) -> None:  # noqa: N802
        _, gpu, _, wanted = self._link(handle, link)
        put(out, int(any(index == wanted for index, _, _ in active_links(gpu))))

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: Any, link: Any, out: Any) -> None:  # noqa: N802
        put(out, self._active(handle, link)[3])

    def nvmlDeviceGetNvLinkRemotePciInfo_v2(self, handle: Any, link: Any, out: Any) -> None:  # noqa: N802
        state, _, _, kind, remote = self._active(handle, link)
        info = target(out)
        if kind == REMOTE_SWITCH and remote == PLACEHOLDER_BUS:
            if state.nvlink.get("remote") == "not-supported":
                raise Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
            info.domain = info.bus = info.device = info.pciDeviceId = 0xFFFFFFFF
            info.busId, info.busIdLegacy = b"FFFFFFFF:FF:FF.0", b"FFFF:FF:FF.0"
            return
        peer = next((item for item in state.gpus if item.bus_id == remote), None)
        info.domain, info.bus, info.device = pci_numbers(remote)
        info.busId, info.busIdLegacy = nvml_bus_id(remote).encode(), remote.upper().encode()
        if peer is not None:
            info.pciDeviceId = state.model_of(peer).pci_id
        else:
            switch = next((item for item in state.functions if item.bus_id == remote), None)
            info.pciDeviceId = (switch.device << 16 | 0x10DE) if switch else 0

    # --- peers ---------------------------------------------------------------------------------

    def nvmlDeviceGetP2PStatus(self, first: Any, second: Any, index: Any, out: Any) -> None:  # noqa: N802
        state, ours = self.gpu(first)
        _, theirs = self.gpu(second)
        kind = number(index[0] if isinstance(index, tuple) else index)
        if ours.uuid == theirs.uuid or not 0 <= kind < pynvml.NVML_P2P_CAPS_INDEX_UNKNOWN:
            raise Refusal(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        put(out, self._p2p(state, ours, theirs, kind))

    def _p2p(self, state: State, ours: Gpu, theirs: Gpu, kind: int) -> int:
        if ours.mig_mode or theirs.mig_mode:
            return int(pynvml.NVML_P2P_STATUS_NOT_SUPPORTED)
        peers = nvlink_peers(state, ours, theirs)
        if kind == pynvml.NVML_P2P_CAPS_INDEX_NVLINK:
            return int(pynvml.NVML_P2P_STATUS_OK if peers else pynvml.NVML_P2P_STATUS_NOT_SUPPORTED)
        if kind == pynvml.NVML_P2P_CAPS_INDEX_ATOMICS and not peers:
            return int(pynvml.NVML_P2P_STATUS_NOT_SUPPORTED)
        if peers or not (ours.virtualization or theirs.virtualization):
            return int(pynvml.NVML_P2P_STATUS_OK)
        return int(pynvml.NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED)

    # --- fabric --------------------------------------------------------------------------------

    def nvmlDeviceGetGpuFabricInfo(self, handle: Any, out: Any) -> None:  # noqa: N802
        info = target(out)
        info.cliqueId = _first_clique(self._fill_fabric(handle, info))

    def nvmlDeviceGetGpuFabricInfoV(self, handle: Any, out: Any) -> None:  # noqa: N802
        info = target(out)
        known = {pynvml.nvmlGpuFabricInfo_v2}
        if self.state().branch >= _GPU_FABRIC_V3_SINCE:
            known.add(pynvml.nvmlGpuFabricInfo_v3)
        if info.version not in known:
            raise Refusal(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        fabric = self._fill_fabric(handle, info)
        info.cliqueId = _first_clique(fabric)
        info.healthMask, summary = _health(fabric)
        if info.version == pynvml.nvmlGpuFabricInfo_v3:
            info.healthSummary = summary

    def nvmlDeviceGetGpuFabricInfo_v4(self, handle: Any, out: Any) -> None:  # noqa: N802
        info = target(out)
        fabric = self._fill_fabric(handle, info)
        info.healthMask, info.healthSummary = _health(fabric)
        info.numCliques = len(_cliques(fabric))
        for entry, (kind, clique) in zip(info.cliques, _cliques(fabric), strict=False):
            entry.type, entry.id = kind, clique

    def _fill_fabric(self, handle: Any, info: Any) -> dict[str, Any]:
        state, gpu = self.gpu(handle)
        if not state.model_of(gpu).fabric:
            raise Refusal(pynvml.NVML_ERROR_NOT_SUPPORTED)
        fabric = {**state.fabric, **gpu.fabric}
        info.state = fabric.get("state", pynvml.NVML_GPU_FABRIC_STATE_NOT_SUPPORTED)
        info.status = fabric.get("status", 0)
        cluster = uuid.UUID(fabric["cluster"]).bytes if fabric.get("cluster") else bytes(16)
        for index, byte in enumerate(cluster):
            info.clusterUuid[index] = byte
        return fabric


def _cliques(fabric: dict[str, Any]) -> list[list[int]]:
    return sorted(fabric.get("cliques") or [[_UNICAST_POINTER, fabric.get("clique", 0)]])


def _first_clique(fabric: dict[str, Any]) -> int:
    return next((number for kind, number in _cliques(fabric) if kind == _UNICAST_POINTER), 0)


def _health(fabric: dict[str, Any]) -> tuple[int, int]:
    summary = fabric.get("health_summary", 0)
    is_complete = fabric.get("state") == pynvml.NVML_GPU_FABRIC_STATE_COMPLETED
    return fabric.get("health_mask", 0), summary or int(is_complete)
