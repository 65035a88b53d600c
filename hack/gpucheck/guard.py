"""The NVML library with its getters only: a function that is not listed here cannot be called.

The binding looks each C function up by name in the library object that it was given. It is given this one,
which holds the listed functions only and not the library, so no way leads from it to a setter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NO_PERMISSION = 4
"""NVML's return code for a caller without permission."""

ALLOWED = frozenset(
    {
        "nvmlInitWithFlags", "nvmlShutdown", "nvmlErrorString",
        "nvmlSystemGetDriverVersion", "nvmlSystemGetNVMLVersion",
        "nvmlSystemGetCudaDriverVersion", "nvmlSystemGetCudaDriverVersion_v2",
        "nvmlSystemGetConfComputeSettings", "nvmlSystemGetConfComputeState",
        "nvmlDeviceGetCount_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetHandleByUUID",
        "nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetIndex", "nvmlDeviceGetUUID", "nvmlDeviceGetMinorNumber",
        "nvmlDeviceGetName", "nvmlDeviceGetBrand", "nvmlDeviceGetArchitecture", "nvmlDeviceGetSerial",
        "nvmlDeviceGetModuleId", "nvmlDeviceGetBoardPartNumber", "nvmlDeviceGetVbiosVersion",
        "nvmlDeviceGetCudaComputeCapability", "nvmlDeviceGetNumGpuCores",
        "nvmlDeviceGetPciInfo_v3", "nvmlDeviceGetPciInfoExt", "nvmlDeviceGetMaxPcieLinkGeneration",
        "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetNumaNodeId",
        "nvmlDeviceGetAddressingMode", "nvmlDeviceGetVirtualizationMode", "nvmlDeviceGetPersistenceMode",
        "nvmlDeviceGetComputeMode", "nvmlDeviceGetPowerManagementLimit", "nvmlDeviceGetSupportedEventTypes",
        "nvmlDeviceGetEccMode", "nvmlDeviceGetRemappedRows", "nvmlDeviceGetRetiredPagesPendingStatus",
        "nvmlDeviceGetFieldValues", "nvmlDeviceGetPlatformInfo",
        "nvmlDeviceGetC2cModeInfoV",
        "nvmlDeviceGetNvLinkState", "nvmlDeviceGetNvLinkVersion", "nvmlDeviceGetNvLinkRemoteDeviceType",
        "nvmlDeviceGetNvLinkRemotePciInfo_v2", "nvmlDeviceGetP2PStatus", "nvmlDeviceGetTopologyCommonAncestor",
        "nvmlDeviceGetGpuFabricInfo", "nvmlDeviceGetGpuFabricInfoV",
        "nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex",
        "nvmlDeviceIsMigDeviceHandle", "nvmlDeviceGetDeviceHandleFromMigDeviceHandle",
        "nvmlDeviceGetGpuInstanceId", "nvmlDeviceGetComputeInstanceId", "nvmlDeviceGetAttributes_v2",
        "nvmlDeviceGetGpuInstanceProfileInfo", "nvmlDeviceGetGpuInstanceProfileInfoV",
        "nvmlDeviceGetGpuInstanceProfileInfoByIdV", "nvmlDeviceGetGpuInstancePossiblePlacements_v2",
        "nvmlDeviceGetGpuInstanceRemainingCapacity", "nvmlDeviceGetGpuInstances", "nvmlDeviceGetGpuInstanceById",
        "nvmlGpuInstanceGetInfo", "nvmlGpuInstanceGetComputeInstances",
        "nvmlGpuInstanceGetComputeInstanceById", "nvmlGpuInstanceGetComputeInstanceProfileInfo",
        "nvmlGpuInstanceGetComputeInstanceProfileInfoV", "nvmlComputeInstanceGetInfo_v2",
    }
)  # fmt: skip


class ReadOnlyLibrary:
    """Stands between the binding and the NVML library.

    `refused` has the functions that somebody called and did not get, `missing` those that somebody asked for
    and that this version of the library does not have.
    """

    def __init__(self, library: object) -> None:
        self.refused: set[str] = set()
        self.missing: set[str] = set()
        for name in ALLOWED:
            function = getattr(library, name, None)
            if function is not None:
                self.__dict__[name] = function

    def __getattr__(self, name: str) -> Callable[..., int]:
        """What was not put in above: unknown to the library, or not allowed."""
        if not name.startswith("nvml") or name in ALLOWED:
            self.missing.add(name)
            raise AttributeError(name)

        def refuse(*_arguments: Any) -> int:
            self.refused.add(name)
            return NO_PERMISSION

        return refuse
