"""What a recording needs to know of one GPU beyond the inventory, read through the guarded binding."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pynvml  # noqa: TID251  a recording holds what the binding answers, not what the driver makes of it

from dra_driver.errors import DraDriverError
from dra_driver.model.gpu import Gpu
from dra_driver.nvml.fabric import fabric_info
from dra_driver.nvml.failures import nvml_errors, supported
from dra_driver.nvml.readings import FaultLog, link_states
from gpucheck.migfacts import profile_rows

JsonObject = dict[str, Any]
Handle = Any

UNKNOWN = 0xFFFFFFFF
_MIB = 1 << 20
_FABRIC_STATES = {0: "not-supported", 1: "not-started", 2: "in-progress", 3: "completed"}
_CORES_PER_MULTIPROCESSOR = {(7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}
_MORE_CORES = 128
_LINK_SPEED, _C2C_LINKS, _RESETLESS_MIG = 90, 170, 184
"""Numbers of the fields NVLINK_SPEED_MBPS_COMMON, C2C_LINK_COUNT and IS_RESETLESS_MIG_SUPPORTED."""


def handle_of(gpu: Gpu) -> Handle:
    """The NVML handle. Raises: DraDriverError."""
    with nvml_errors(f"find GPU {gpu.uuid}"):
        return pynvml.nvmlDeviceGetHandleByUUID(gpu.uuid)


class Reader:
    """Asks one GPU; a value that it does not answer is None."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.handle = handle_of(gpu)
        self.log = FaultLog(f"GPU {gpu.uuid}")

    def get(self, call: Callable[..., Any], *arguments: object) -> Any:
        """The call's answer about this GPU, or None."""
        try:
            return supported(call, self.handle, *arguments)
        except (DraDriverError, ValueError):
            return None

    def field(self, number: int) -> int | None:
        """The value of a field, or None."""
        values = self.get(pynvml.nvmlDeviceGetFieldValues, [number])
        if values is None or values[0].nvmlReturn != pynvml.NVML_SUCCESS:
            return None
        return int(values[0].value.uiVal)

    def number(self, call: Callable[..., Any], otherwise: int) -> int:
        """The call's answer as a number."""
        answer = self.get(call)
        return otherwise if answer is None else int(answer)

    def has(self, call: Callable[..., Any]) -> bool:
        """Whether the GPU answers the call."""
        return self.get(call) is not None

    def links(self) -> list[bool]:
        """For each NVLink whether it is up."""
        return link_states(self.log, self.handle)

    def link_remote(self, link: int) -> tuple[int | None, str | None]:
        """(kind of the other end, its bus ID as NVML writes it) of a link that is up."""
        info = self.get(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, link)
        return self.get(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, link), None if info is None else str(
            info.busId
        )

    def board(self) -> JsonObject:
        """The facts of this board alone, under the names of a machine file; None if NVML does not tell one."""
        return {
            "serial": self.get(pynvml.nvmlDeviceGetSerial),
            # The binding's default argument is shared by all calls, so one is given.
            "module": self.get(pynvml.nvmlDeviceGetModuleId, ctypes.c_uint()),
            "memory_numa": self.get(pynvml.nvmlDeviceGetNumaNodeId),
            "virtualization": self.get(pynvml.nvmlDeviceGetVirtualizationMode) or None,
            "persistence": self.get(pynvml.nvmlDeviceGetPersistenceMode),
            "platform": self.platform(),
        }

    def fabric(self) -> JsonObject | None:
        """Registration with the NVLink fabric, in the words of a machine file."""
        info = self.get(fabric_info)
        if info is None:
            return None
        cluster = bytes(info.clusterUuid)
        return {
            "state": _FABRIC_STATES.get(int(info.state), "not-supported"),
            "status": int(info.status),
            "cluster": cluster.hex() if any(cluster) else "none",
            "clique": int(info.cliqueId),
            "health_mask": int(getattr(info, "healthMask", 0)),
            "health_summary": int(getattr(info, "healthSummary", 0)),
        }

    def platform(self) -> JsonObject | None:
        """The place in a rack. Read as memory, since the binding types these bytes as characters."""
        struct = getattr(pynvml, "c_nvmlPlatformInfo_v2_t", None)
        info = None if struct is None else struct()
        if info is None or self.get(pynvml.nvmlDeviceGetPlatformInfo, ctypes.byref(info)) is None:
            return None
        raw = ctypes.string_at(ctypes.addressof(info) + type(info).ibGuid.offset, 37)
        slot, tray, host, peer_type, module = raw[32:]
        return {
            "chassis_serial": raw[16:32].rstrip(b"\0").decode("ascii", errors="replace"),
            "slot": slot,
            "tray": tray,
            "host": host,
            "peer_type": peer_type,
            "module": module,
        }


def model_facts(reader: Reader, pci_class: int | None) -> JsonObject:
    """The facts of the GPU's product, under the names of `models:` in a machine file."""
    gpu = reader.gpu
    pci = reader.get(pynvml.nvmlDeviceGetPciInfo)
    compute = gpu.cuda_compute_capability or (0, 0)
    cores = reader.number(pynvml.nvmlDeviceGetNumGpuCores, 0)
    links = reader.links()
    power = reader.get(pynvml.nvmlDeviceGetPowerManagementLimit)
    facts: JsonObject = {
        "name": gpu.product_name or "unknown",
        "arch": reader.number(pynvml.nvmlDeviceGetArchitecture, UNKNOWN),
        "compute": list(compute),
        "sm": cores // _CORES_PER_MULTIPROCESSOR.get(compute, _MORE_CORES),
        "cores": cores,
        "memory_bytes": gpu.memory_bytes,
        "reserved_bytes": _reserved(reader),
        "brand": reader.number(pynvml.nvmlDeviceGetBrand, UNKNOWN),
        "pci_id": 0 if pci is None else int(pci.pciDeviceId),
        "subsystem": 0 if pci is None else int(pci.pciSubSystemId),
        "pci_class": pci_class,
        "nvlinks": len(links),
        "nvlink_version": _link_version(reader, links),
        "nvlink_mbps": reader.field(_LINK_SPEED) or 0,
        "fabric": reader.fabric() is not None,
        "platform": reader.platform() is not None,
        "ecc": reader.has(pynvml.nvmlDeviceGetEccMode),
        "row_remapper": reader.has(pynvml.nvmlDeviceGetRemappedRows),
        "retired_pages": reader.has(pynvml.nvmlDeviceGetRetiredPagesPendingStatus),
        "resetless_mig": bool(reader.field(_RESETLESS_MIG)),
        "serial": reader.has(pynvml.nvmlDeviceGetSerial),
        "c2c_links": reader.field(_C2C_LINKS) or 0,
        "pcie_generation": reader.number(pynvml.nvmlDeviceGetMaxPcieLinkGeneration, 0),
        "power": None if power is None else int(power) // 1000,
        "part": reader.get(pynvml.nvmlDeviceGetBoardPartNumber),
        "vbios": reader.get(pynvml.nvmlDeviceGetVbiosVersion),
        "events": reader.number(pynvml.nvmlDeviceGetSupportedEventTypes, 0),
        "mig": profile_rows(reader.handle, gpu) if gpu.mig_capable else None,
    }
    return {name: value for name, value in facts.items() if value is not None}


def _reserved(reader: Reader) -> int:
    memory = reader.get(pynvml.nvmlDeviceGetMemoryInfo, pynvml.nvmlMemory_v2)
    return 0 if memory is None else int(memory.reserved) // _MIB * _MIB


def _link_version(reader: Reader, links: list[bool]) -> int:
    version = reader.get(pynvml.nvmlDeviceGetNvLinkVersion, links.index(True)) if True in links else None
    return 0 if version is None else int(version)
