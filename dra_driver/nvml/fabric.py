"""What NVML says of a GPU's NVLink fabric, in the newest form that the installed library knows."""

from __future__ import annotations

import uuid as uuidlib
from typing import Any, Final

import pynvml

from dra_driver.errors import DraDriverError, NotSupportedError
from dra_driver.model.gpu import Fabric, FabricRegistration, UnreadyFabric
from dra_driver.nvml.failures import Handle, nvml_errors

ABSENT, NOT_STARTED, IN_PROGRESS, COMPLETED = range(4)
"""NVML's states."""
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
"""Newest first. R535 has the last one only, later branches have v2, newer ones of them v3, and R615 has v4."""


def fabric_info(handle: Handle) -> Any:
    """NVML's structure: `state`, `status`, `clusterUuid`; from v2 on `healthMask`, from v3 on `healthSummary` too; in
    v4 `cliques` and `numCliques`, before that `cliqueId`. None where the GPU has no fabric, or the library does not
    know of any.

    Raises: DeviceLostError, NvmlUnavailableError, RetryableError.
    """
    for name, struct in _FORMS:
        info = struct()
        try:
            with nvml_errors(name):
                getattr(pynvml, name)(handle, pynvml.byref(info))
            return info
        except DraDriverError as error:
            # The handle is good, so it is the version of the structure that the library does not know.
            is_unknown = isinstance(error.__cause__, pynvml.NVMLError_InvalidArgument)
            if not isinstance(error, NotSupportedError) and not is_unknown:
                raise
            # An older form says no more than this one. The newest one may not be supported on every GPU with a fabric.
            if struct is not _FORMS[0][1] and isinstance(error.__cause__, pynvml.NVMLError_NotSupported):
                return None
    return None


def fabric_registration(info: Any) -> FabricRegistration:
    """What the structure of `fabric_info` says. A single board completes its registration too, but with a cluster UUID
    of zeros; before that nobody can tell whether the fabric ends at the board."""
    state, status = int(info.state), int(info.status)
    if state == ABSENT:
        return None
    if state in _PENDING:
        return UnreadyFabric("pending", _PENDING[state])
    if state != COMPLETED:
        return UnreadyFabric("unknown", f"NVML tells state {state}")
    if status != pynvml.NVML_SUCCESS:
        return UnreadyFabric("broken", f"registration ended with NVML error {status}")
    cluster = uuidlib.UUID(bytes=bytes(info.clusterUuid))
    return None if cluster.int == 0 else Fabric(str(cluster), *_unicast_cliques(info))


def _unicast_cliques(info: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The cliques for pointers and those for logical endpoints. Before v4 NVML names the first one for pointers."""
    if not hasattr(info, "cliques"):
        return (int(info.cliqueId),), ()
    found = [(int(one.type), int(one.id)) for one in info.cliques[: info.numCliques]]
    pointers, endpoints = (
        tuple(sorted({clique for kind, clique in found if kind == wanted})) for wanted in _UNICAST
    )
    return pointers, endpoints
