"""Reads the identity and attributes of one physical GPU, with its NVLinks and NVLink fabric; and confidential
computing, which NVML reports for the whole machine.
"""

from __future__ import annotations

import ctypes
import uuid as uuidlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import pynvml

from dra_driver.errors import DraDriverError, NotSupportedError, RetryableError
from dra_driver.model.dataclass import dataclass, field, replace
from dra_driver.model.gpu import READINGS, Chassis, Fabric, FabricRegistration, Gpu, Reading, UnreadyFabric
from dra_driver.model.inventory import ConfidentialMode, DiscoveryFault
from dra_driver.nvml.calls import Handle, nvml_errors, query, supported

_LOCKS_GRAPHICS_CLOCK, _LOCKS_MEMORY_CLOCK = (7, 0), (8, 0)
"""The first compute capability, Volta and Ampere, whose clocks NVML can lock."""
NOT_GPUS = frozenset({"DLA", "NPU"})
"""Architectures of devices that NVML may list but that are not GPUs."""
_CORES_PER_MULTIPROCESSOR = {
    (3, 0): 192, (3, 2): 192, (3, 5): 192, (3, 7): 192, (5, 0): 128, (5, 2): 128, (5, 3): 128, (6, 0): 64,
    (6, 1): 128, (6, 2): 128, (7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64, (8, 6): 128, (8, 7): 128,
    (8, 9): 128, (9, 0): 128, (10, 0): 128, (10, 1): 128, (10, 3): 128, (11, 0): 128, (12, 0): 128, (12, 1): 128,
}  # fmt: skip
_MAX_LINKS = pynvml.NVML_NVLINK_MAX_LINKS
_UP = frozenset({pynvml.NVML_FEATURE_ENABLED, pynvml.NVML_NVLINK_STATE_SLEEP})
ABSENT, NOT_STARTED, IN_PROGRESS, COMPLETED = range(4)
"""NVML's registration states."""
_PENDING: Final = {
    NOT_STARTED: "the registration has not started",
    IN_PROGRESS: "the registration is in progress",
}

_UNICAST: Final = (
    pynvml.NVML_GPU_FABRIC_CLIQUE_TYPE_UNICAST_POINTER,
    pynvml.NVML_GPU_FABRIC_CLIQUE_TYPE_UNICAST_LOGICAL_ENDPOINT,
)

_FORMS: Final = (
    ("nvmlDeviceGetGpuFabricInfo_v4", pynvml.c_nvmlGpuFabricInfo_v4_t),
    ("nvmlDeviceGetGpuFabricInfoV", pynvml.c_nvmlGpuFabricInfo_v3_t),
    ("nvmlDeviceGetGpuFabricInfoV", pynvml.c_nvmlGpuFabricInfo_v2_t),
    ("nvmlDeviceGetGpuFabricInfo", pynvml.c_nvmlGpuFabricInfo_t),
)
"""Newest first. R535 has only the last form; later branches added v2, then v3, and R615 added v4."""
_SETTINGS_ABSENT = (
    pynvml.NVMLError_NotSupported,
    pynvml.NVMLError_FunctionNotFound,
    pynvml.NVMLError_ArgumentVersionMismatch,
)


@dataclass(slots=True)
class FaultLog:
    """Collects read failures, so that one unreadable attribute never hides a GPU. `failed` has their texts by the names
    of the queries.
    """

    subject: str
    faults: list[DiscoveryFault] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def read(self, what: str, call: Callable[..., Any], *args: object) -> Any:
        """Return the call's result; None if the call is not supported, or if it failed, which adds a fault.

        Raises: DeviceLostError, NvmlUnavailableError, because nothing else can be read after these.
        """

        def failed(error: Exception) -> None:
            self.failed[what] = f"{what}: {error}"
            self.faults.append(DiscoveryFault(self.subject, self.failed[what]))

        return query(call, *args, failed=failed)


def read_values(handle: Handle, readings: Mapping[str, Reading], read: Callable[..., Any]) -> dict[str, Any]:
    """Return the fields of a GPU that have a call. `read` gets the name of a query, a function and its arguments; its
    errors are passed on.
    """
    answers: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for name, reading in readings.items():
        if not reading.call:
            continue
        [what] = reading.what
        if reading.call not in answers:
            answers[reading.call] = read(what, getattr(pynvml, reading.call), handle)
        answer = answers[reading.call]
        if answer is None:
            values[name] = reading.absent
        else:
            values[name] = answer if reading.to is None else read(what, reading.to, answer)
    return values


def read_gpu(index: int) -> tuple[Handle, Gpu, FaultLog]:
    """Return the handle and the values of GPU number `index`, and what could not be read, without MIG devices and
    topology.

    Raises: DeviceLostError, RetryableError if the handle or the UUID cannot be read.
    """
    with nvml_errors(f"find GPU with NVML index {index}"):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = pynvml.nvmlDeviceGetUUID(handle)
    log = FaultLog(f"GPU {uuid}")
    gpu = Gpu(uuid, **read_values(handle, READINGS, log.read))
    if gpu.minor is None and "minor number" not in log.failed:
        text = (
            "it is not published: NVML reports no minor number, so its device node is not known and no claim could be "
            "prepared; WSL2 and vGPU hosts without device nodes are not supported"
        )
        log.faults.append(DiscoveryFault(log.subject, text))
    fabric = _fabric(log, handle)
    links = log.read("NVLink", link_states, handle)
    # If the capability is unknown, NVML may refuse a claim later.
    compute = gpu.cuda_compute_capability or _LOCKS_MEMORY_CLOCK
    memory_clocks = log.read("memory clocks", pynvml.nvmlDeviceGetSupportedMemoryClocks, handle)
    graphics_clocks = memory_clocks and log.read(
        "graphics clocks", pynvml.nvmlDeviceGetSupportedGraphicsClocks, handle, max(memory_clocks)
    )
    gpu = replace(
        gpu,
        nvlink_links=sum(links) if links else None,
        fabric=fabric if isinstance(fabric, Fabric) else None,
        unready_fabric=fabric if isinstance(fabric, UnreadyFabric) else None,
        multiprocessors=_multiprocessors(log, handle, gpu.cuda_compute_capability),
        memory_numa_node=_memory_numa_node(log, handle, gpu.addressing_mode),
        graphics_clocks_mhz=_range(graphics_clocks) if compute >= _LOCKS_GRAPHICS_CLOCK else None,
        memory_clocks_mhz=_range(memory_clocks) if compute >= _LOCKS_MEMORY_CLOCK else None,
        chassis=log.read("platform", _chassis, handle),
        # The binding's default argument is one object for all threads.
        module_id=log.read("module ID", pynvml.nvmlDeviceGetModuleId, handle, ctypes.c_uint()),
    )
    return handle, gpu, log


def _range(values: Sequence[int] | None) -> tuple[int, int] | None:
    return (int(min(values)), int(max(values))) if values else None


def _multiprocessors(log: FaultLog, handle: Handle, compute: tuple[int, int] | None) -> int | None:
    """Divide NVML's number of cores by the cores of a multiprocessor."""
    per_multiprocessor = _CORES_PER_MULTIPROCESSOR.get(compute) if compute is not None else None
    if per_multiprocessor is None:
        return None
    cores = log.read("number of cores", pynvml.nvmlDeviceGetNumGpuCores, handle)
    if not cores or cores % per_multiprocessor:
        return None
    return int(cores) // per_multiprocessor


def _memory_numa_node(log: FaultLog, handle: Handle, addressing: str | None) -> int | None:
    """Query NVML only if the addressing mode is ATS or unknown: other GPUs have no such node."""
    if addressing in ("None", "HMM"):
        return None
    node = log.read("NUMA node of the memory", pynvml.nvmlDeviceGetNumaNodeId, handle)
    return None if node is None or node < 0 else node


def _chassis(handle: Handle) -> Chassis | None:
    """Return None for a GPU without a chassis serial number: it is not in a rack. Raises: pynvml.NVMLError.

    Reads the bytes of the structure: the binding declares its numbers as characters, and cannot return all of them.
    """
    info = pynvml.c_nvmlPlatformInfo_v2_t()
    pynvml.nvmlDeviceGetPlatformInfo(handle, pynvml.byref(info))
    raw, kind = bytes(info), type(info)
    start = kind.chassisSerialNumber.offset
    serial = raw[start : start + kind.chassisSerialNumber.size].partition(b"\0")[0].decode("ascii").strip()
    slot, tray = raw[kind.slotNumber.offset], raw[kind.trayIndex.offset]
    return Chassis(serial, slot, tray) if serial else None


def link_states(handle: Handle) -> list[bool]:
    """Return for each NVLink number whether the link is up. A board may skip numbers.

    Raises: the errors of `nvml_errors` if a link cannot be read: a partial result would look like a GPU with fewer
    links.
    """
    states: list[int | None] = []
    for link in range(_MAX_LINKS):
        try:
            with nvml_errors(f"read NVLink {link}"):
                states.append(int(pynvml.nvmlDeviceGetNvLinkState(handle, link)))
        except NotSupportedError:
            states.append(None)
        except RetryableError as error:
            if isinstance(error.__cause__, pynvml.NVMLError_InvalidArgument):
                break
            raise
    has_links = any(state is not None for state in states)
    return [state in _UP for state in states] if has_links else []


def _fabric(log: FaultLog, handle: Handle) -> FabricRegistration:
    """Return an unreadable fabric as "unknown", not as None: otherwise a claim would be prepared without its
    IMEX channel and never get it.
    """
    info = log.read("NVLink fabric", fabric_info, handle)
    if "NVLink fabric" in log.failed:
        return UnreadyFabric("unknown", log.failed["NVLink fabric"])
    return None if info is None else fabric_registration(info)


def fabric_info(handle: Handle) -> Any:
    """Return NVML's structure, or None without a fabric or the library's support.

    It has `state`, `status` and `clusterUuid`; from v2 on `healthMask`, from v3 on also `healthSummary`; in v4
    `cliques` and `numCliques`, before v4 `cliqueId`. Raises: DeviceLostError, NvmlUnavailableError, RetryableError.
    """
    for name, struct in _FORMS:
        info = struct()
        try:
            with nvml_errors(name):
                getattr(pynvml, name)(handle, pynvml.byref(info))
            return info
        except DraDriverError as error:
            # The handle is valid, so the library does not know this version of the structure.
            is_unknown = isinstance(error.__cause__, pynvml.NVMLError_InvalidArgument)
            if not isinstance(error, NotSupportedError) and not is_unknown:
                raise
            # If a GPU does not support this version, it does not support older ones. Only the newest version may be
            # unsupported on a GPU with a fabric.
            if struct is not _FORMS[0][1] and isinstance(error.__cause__, pynvml.NVMLError_NotSupported):
                return None
    return None


def fabric_registration(info: Any) -> FabricRegistration:
    """Return the registration from the structure that `fabric_info` returned.

    A single board also completes its registration, with a cluster UUID of zeros. Until then it is unknown whether the
    fabric extends beyond the board.
    """
    state, status = int(info.state), int(info.status)
    if state == ABSENT:
        return None
    if state in _PENDING:
        return UnreadyFabric("pending", _PENDING[state])
    if state != COMPLETED:
        return UnreadyFabric("unknown", f"NVML reports state {state}")
    if status != pynvml.NVML_SUCCESS:
        return UnreadyFabric("broken", f"the registration failed with NVML error {status}")
    cluster = uuidlib.UUID(bytes=bytes(info.clusterUuid))
    return None if cluster.int == 0 else Fabric(str(cluster), *_unicast_cliques(info))


def _unicast_cliques(info: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the cliques for pointers and for logical endpoints. Before v4 NVML reports only the first
    clique for pointers.
    """
    if not hasattr(info, "cliques"):
        return (int(info.cliqueId),), ()
    found = [(int(one.type), int(one.id)) for one in info.cliques[: info.numCliques]]
    pointers, endpoints = (
        tuple(sorted({clique for kind, clique in found if kind == wanted})) for wanted in _UNICAST
    )
    return pointers, endpoints


def confidential_mode() -> ConfidentialMode:
    """Return the GPUs' confidential computing mode. Raises: NVMLError; ValueError for an unknown mode."""
    feature, has_tools, several_gpus = _settings()
    if several_gpus == pynvml.NVML_CC_SYSTEM_MULTIGPU_PROTECTED_PCIE:
        return "ppcie"  # the feature itself is off then
    if feature == pynvml.NVML_CC_SYSTEM_FEATURE_DISABLED:
        return "off"
    if feature != pynvml.NVML_CC_SYSTEM_FEATURE_ENABLED:
        raise ValueError(f"NVML reports the unknown mode {feature}")
    return "devtools" if has_tools else "on"


def accepts_work() -> bool | None:
    """Return whether programs can use the GPUs: with confidential computing only once the ready state is set.

    None if NVML does not support the queries. Raises: the errors of `nvml_errors`; ValueError for an unknown mode.
    """
    mode = supported(confidential_mode)
    # Without confidential computing the ready state has no meaning and its value is arbitrary.
    if mode is None or mode == "off":
        return None if mode is None else True
    ready = supported(pynvml.nvmlSystemGetConfComputeGpusReadyState)
    return None if ready is None else ready == pynvml.NVML_CC_ACCEPTING_CLIENT_REQUESTS_TRUE


def _settings() -> tuple[int, bool, int]:
    """Return the feature, whether developer tools are allowed, and the multi-GPU mode, which drivers before
    R550 and GPUs before Hopper do not report.
    """
    settings = pynvml.c_nvmlSystemConfComputeSettings_v1_t()
    try:
        pynvml._nvmlCheckReturn(pynvml.nvmlSystemGetConfComputeSettings(pynvml.byref(settings)))
    except _SETTINGS_ABSENT:
        state = pynvml.nvmlSystemGetConfComputeState()
        return int(state.ccFeature), bool(state.devToolsMode), pynvml.NVML_CC_SYSTEM_MULTIGPU_NONE
    return int(settings.ccFeature), bool(settings.devToolsMode), int(settings.multiGpuMode)
