"""One health poll of a GPU. A query that fails does not affect the other health signals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import byref
from typing import Any, TypeVar

import pynvml

from dra_driver.errors import DeviceLostError
from dra_driver.model.gpu import UnreadyFabric
from dra_driver.model.health import FabricState, NvLinks, PolledHealth
from dra_driver.nvml.calls import Handle, nvml_errors, supported
from dra_driver.nvml.calls import query as query_nvml
from dra_driver.nvml.mig_reading import gpu_handle
from dra_driver.nvml.readings import (
    ABSENT,
    accepts_work,
    fabric_info,
    fabric_registration,
    link_states,
)
from dra_driver.nvml.usage_source import clock_reasons, temperature

T = TypeVar("T")
_RECOVERY_ACTION_FIELD = pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
_GPU_RESET = 1
_SLOWDOWNS = {0x40: "thermal", 0x80: "power"}
_ANY_SLOWDOWN = 0x8
_IDLE = 0x1
_TRUE, _FALSE = 1, 2
_FLAG_MASK = _UNDEFINED = 0b11  # 0 is "not supported"
# Shift, the value that is a fault, its meaning, and its severity.
_FABRIC_FLAGS: tuple[tuple[int, int, str, FabricState], ...] = (
    (0, _TRUE, "its bandwidth is reduced", "limited"),
    (2, _TRUE, "its routes are being recovered", "limited"),
    (4, _TRUE, "a route is unhealthy", "broken"),
    (6, _TRUE, "it is recovering from an access timeout", "limited"),
    (12, _FALSE, "no partition is assigned to it", "broken"),
    (14, _FALSE, "its fabric manager is disconnected", "limited"),
)
_CONFIGURATION_SHIFT, _CONFIGURATION_MASK, _CONFIGURATION_CORRECT = 8, 0xF, 1
_CONFIGURATIONS = {
    2: "its system GUID is wrong", 3: "its chassis serial number is wrong", 4: "it has no partition",
    5: "it has too few NVLinks", 6: "its firmware is not compatible", 7: "its location is not valid",
    8: "the state of the GPU is not valid",
}  # fmt: skip
_ERRORS_OF_ALL = (
    ("crc", pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL),
    ("crc", pynvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL),
    ("replay", pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL),
    ("recovery", pynvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL),
)
_ERRORS_OF_LINK = (("recovery", pynvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS),)
_SUMMARY_HEALTHY = 1
_SUMMARIES: Mapping[int, FabricState] = {2: "broken", 3: "limited"}


class _Queries:
    def __init__(self) -> None:
        self.failed: set[str] = set()
        self.wants_reset = False
        self.has_succeeded = self._has_failed = False

    @property
    def answered(self) -> bool:
        return self.has_succeeded or not self._has_failed

    def query(self, name: str, call: Callable[..., T], *args: object) -> T | None:
        def failed(error: Exception) -> None:
            self.failed.add(name)
            self.wants_reset |= getattr(error.__cause__, "value", None) == pynvml.NVML_ERROR_RESET_REQUIRED

        return query_nvml(call, *args, failed=failed)

    def query_gpu(self, name: str, call: Callable[..., T], *args: object) -> T | None:
        """Run a query that needs the GPU itself, so that a value proves that the GPU is alive."""
        value = self.query(name, call, *args)
        self.has_succeeded |= value is not None
        self._has_failed |= name in self.failed
        return value


def read_health(uuid: str, handle: Handle | None = None, before: PolledHealth | None = None) -> PolledHealth:
    """Return all health signals of one GPU; `handle` must be of this session.

    With an earlier poll in `before`, its repair signals (`_RARE_REPAIRS`) and NVLinks are copied instead of queried;
    the other rare signals are None. Raises: DeviceLostError, NvmlUnavailableError, RetryableError.
    """
    handle = gpu_handle(uuid, None) if handle is None else handle
    queries = _Queries()
    # The kernel driver answers this query from its own memory, unless the GPU fell off the bus.
    query_nvml(pynvml.nvmlDeviceGetMinorNumber, handle)
    rows = queries.query_gpu("remap_pending", pynvml.nvmlDeviceGetRemappedRows, handle)
    pages = queries.query_gpu("pages_pending", pynvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
    errors = queries.query_gpu(
        "ecc_uncorrected",
        pynvml.nvmlDeviceGetTotalEccErrors,
        handle,
        pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        pynvml.NVML_VOLATILE_ECC,
    )
    clocks = queries.query_gpu("slowdowns", clock_reasons, handle)
    if not queries.has_succeeded:
        # Every GPU has this sensor, even if it supports none of the queries above.
        queries.query_gpu("temperature", temperature, handle)
    linked = queries.query("fabric", fabric_info, handle)
    fabric, fabric_text = (None, "") if linked is None else _fabric(linked)
    action = queries.query("recovery_action", _recovery_action, handle)
    accepts = _accepts_work(queries)
    if before is None:
        # The PCIe generation is checked only while the GPU is known to be busy.
        more = _rare(queries, handle, is_working=clocks is not None and not clocks & _IDLE)
    else:
        more = {name: getattr(before, name) for name in (*_RARE_REPAIRS, "nvlinks")}
    return PolledHealth(
        recovery_action=_GPU_RESET if queries.wants_reset and not action else action,
        remap_pending=None if rows is None else bool(rows[2]),
        remap_failed=None if rows is None else bool(rows[3]),
        pages_pending=None if pages is None else bool(pages),
        ecc_uncorrected=errors,
        fabric=fabric,
        fabric_text=fabric_text,
        slowdowns=None if clocks is None else _slowdowns(clocks),
        fabric_registration=None if linked is None else fabric_registration(linked),
        accepts_work=accepts,
        failed=frozenset(queries.failed),
        answered=queries.answered,
        **more,
    )


def _rare(queries: _Queries, handle: Handle, *, is_working: bool) -> dict[str, Any]:
    nvlinks = queries.query("nvlinks", _nvlinks, handle)
    errors = (
        queries.query("nvlink_errors", _nvlink_errors, handle, nvlinks.up) if nvlinks and nvlinks.up else None
    )
    return {
        **{name: queries.query(name, call, handle) for name, call in _RARE_REPAIRS.items()},
        "power_limit_mw": queries.query("power_limit_mw", pynvml.nvmlDeviceGetPowerManagementLimit, handle),
        "pcie_narrow": queries.query("pcie_narrow", _pcie_narrow, handle),
        "pcie_slow": queries.query("pcie_slow", _pcie_slow, handle) if is_working else None,
        "nvlinks": nvlinks,
        "nvlink_errors": errors,
    }


def _accepts_work(queries: _Queries) -> bool | None:
    """Query the whole machine, so a failure does not mean that this GPU has a fault."""
    try:
        return queries.query("accepts_work", accepts_work)
    except DeviceLostError:
        queries.failed.add("accepts_work")
        return None


def read_instances(uuid: str, handle: Handle | None = None) -> Mapping[tuple[int, int], str]:
    """Return the UUIDs of the MIG devices of a GPU by GPU instance and compute instance.

    Raises: DeviceLostError, NvmlUnavailableError, RetryableError.
    """
    handle = gpu_handle(uuid, None) if handle is None else handle
    count = supported(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
    found: dict[tuple[int, int], str] = {}
    for index in range(count):
        with nvml_errors(f"read MIG device {index} of GPU {uuid}"):
            try:
                mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
                instance = pynvml.nvmlDeviceGetGpuInstanceId(mig)
                compute = pynvml.nvmlDeviceGetComputeInstanceId(mig)
                found[instance, compute] = pynvml.nvmlDeviceGetUUID(mig)
            except (
                pynvml.NVMLError_NotFound,
                pynvml.NVMLError_InvalidArgument,
                pynvml.NVMLError_NotSupported,
            ):
                continue  # a gap in the numbering, an instance that was just destroyed, or MIG mode is off
    return found


def _recovery_action(handle: Handle) -> int | None:
    (entry,) = pynvml.nvmlDeviceGetFieldValues(handle, [_RECOVERY_ACTION_FIELD])
    if entry.nvmlReturn == pynvml.NVML_ERROR_INVALID_ARGUMENT:
        return None
    if entry.nvmlReturn != pynvml.NVML_SUCCESS:
        raise pynvml.NVMLError(entry.nvmlReturn)
    return int(entry.value.uiVal)


def _nvlinks(handle: Handle) -> NvLinks | None:
    """Return None for a GPU without NVLink, or in MIG mode."""
    states = link_states(handle)
    if states and not any(states):
        mode = supported(pynvml.nvmlDeviceGetMigMode, handle)
        if mode is not None and mode[0]:
            return None
        # MIG mode may have been disabled in between.
        states = link_states(handle)
    if not states:
        return None
    up = tuple(link for link, is_up in enumerate(states) if is_up)
    remote = supported(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, up[0]) if up else None
    return NvLinks(
        up,
        supported(pynvml.nvmlDeviceGetName, handle),
        None if remote is None else remote == pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH,
    )


def _nvlink_errors(handle: Handle, links: Sequence[int]) -> Mapping[str, int] | None:
    """Return the supported error counts. GPUs before Blackwell have one count for all links."""
    wanted = [(kind, (field, link)) for kind, field in _ERRORS_OF_LINK for link in links]
    wanted += [(kind, (field, 0)) for kind, field in _ERRORS_OF_ALL]
    counts: dict[str, int] = {}
    answers = pynvml.nvmlDeviceGetFieldValues(handle, [field for _, field in wanted])
    for (kind, _), entry in zip(wanted, answers, strict=True):
        if entry.nvmlReturn == pynvml.NVML_SUCCESS:
            counts[kind] = counts.get(kind, 0) + int(entry.value.ullVal)
        elif entry.nvmlReturn not in (pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_INVALID_ARGUMENT):
            raise pynvml.NVMLError(entry.nvmlReturn)
    return counts or None


def _sram_exceeded(handle: Handle) -> bool:
    status = pynvml.c_nvmlEccSramErrorStatus_v1_t()
    status.version = pynvml.nvmlEccSramErrorStatus_v1
    pynvml.nvmlDeviceGetSramEccErrorStatus(handle, byref(status))
    return bool(status.bThresholdExceeded)


def _memory_unrepairable(handle: Handle) -> bool:
    return bool(pynvml.nvmlDeviceGetUnrepairableMemoryFlag_v1(handle))


def _bank_remap_pending(handle: Handle) -> bool:
    status = pynvml.c_nvmlEccBankRemapperStatus_v1_t()
    pynvml.nvmlDeviceGetBankRemapperStatus_v1(handle, byref(status))
    return bool(status.bPending)


def _repairs_pending(handle: Handle) -> frozenset[str]:
    pending = zip(("channel", "tpc"), pynvml.nvmlDeviceGetRepairStatus(handle), strict=True)
    return frozenset(part for part, is_pending in pending if is_pending)


_RARE_REPAIRS: Mapping[str, Callable[[Handle], Any]] = {
    "sram_exceeded": _sram_exceeded,
    "memory_unrepairable": _memory_unrepairable,
    "bank_remap_pending": _bank_remap_pending,
    "repairs_pending": _repairs_pending,
}
"""They decide whether a health reason set by an event may end."""


def _pcie_narrow(handle: Handle) -> bool:
    """Compare with NVML's maximum, which both the GPU and the machine support."""
    lanes, most = pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle), pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle)
    return bool(lanes < most)


def _pcie_slow(handle: Handle) -> bool:
    now = pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)
    return bool(now < pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))


def _slowdowns(clocks: int) -> frozenset[str]:
    causes = frozenset(name for bit, name in _SLOWDOWNS.items() if clocks & bit)
    return causes or (frozenset({"hardware"}) if clocks & _ANY_SLOWDOWN else frozenset())


def _fabric(info: Any) -> tuple[FabricState | None, str]:
    if info.state == ABSENT:
        return "absent", ""
    match fabric_registration(info):
        case UnreadyFabric("broken", text):
            return "broken", text
        case UnreadyFabric("pending"):
            return "pending", ""
        case UnreadyFabric():
            return "pending", f"NVML reports the unknown state {int(info.state)}"
    mask = int(getattr(info, "healthMask", 0))
    faults: list[tuple[FabricState, str]] = []
    for shift, bad, text, state in _FABRIC_FLAGS:
        value = mask >> shift & _FLAG_MASK
        if value == bad:
            faults.append((state, text))
        elif value == _UNDEFINED:
            bits = f"bits {shift} and {shift + 1} of its health mask"
            faults.append(("limited", f"NVML reports the unknown value {value} for {bits}"))
    configuration = mask >> _CONFIGURATION_SHIFT & _CONFIGURATION_MASK
    if configuration > _CONFIGURATION_CORRECT:
        unknown = f"NVML reports the unknown configuration {configuration}"
        faults.append(("broken", _CONFIGURATIONS.get(configuration, unknown)))
    summary = int(getattr(info, "healthSummary", 0))
    if summary in _SUMMARIES:
        faults.append((_SUMMARIES[summary], ""))
    elif summary > _SUMMARY_HEALTHY:
        faults.append(("limited", f"NVML reports the unknown health {summary}"))
    if not faults:
        return "ready", ""
    worst: FabricState = "broken" if any(state == "broken" for state, _ in faults) else "limited"
    return worst, ", ".join(text for _, text in faults if text)
