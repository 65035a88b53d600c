"""Which processes use a GPU or a MIG device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

import pynvml

from dra_driver.errors import NotSupportedError, RetryableError
from dra_driver.model.gpu import GpuProcess
from dra_driver.model.ids import quoted
from dra_driver.nvml.failures import Handle, nvml_errors
from dra_driver.nvml.mig_instances import gpu_handle

# Compute, compute through MPS, graphics. Newest first; a driver has the first of each kind, or the second.
PROCESS_LISTS = (
    ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"),
    ("nvmlDeviceGetMPSComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v2"),
    ("nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v2"),
)
# It runs as long as its daemon, and its clients are listed themselves.
_MPS_SERVER = "nvidia-cuda-mps-server"
_LONGEST_NAME = 80
_NO_INSTANCE = 0xFFFFFFFF
_NO_MEMORY = 0xFFFFFFFFFFFFFFFF
# NVML never tells: the caller lacks the privilege, or the device has no such list.
_REFUSALS = frozenset({pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_INVALID_ARGUMENT})


def read_processes(uuid: str) -> Mapping[int, str]:
    """The processes on a GPU or MIG device: ID → `process 4711 (python3)`. Servers of MPS are left out.

    Only those in this process's PID namespace or below it are shown; a list that NVML refuses has none.
    Raises: DeviceLostError if the device does not answer or is not there; NvmlUnavailableError; RetryableError if a
    list fails for another reason.
    """
    found = read_gpu_processes(uuid, gpu_handle(uuid, None))
    return {
        process.pid: process_text(process.pid, process.name)
        for process in found
        if PurePosixPath(process.name.partition(" ")[0]).name != _MPS_SERVER
    }


def read_gpu_processes(uuid: str, handle: Handle) -> Sequence[GpuProcess]:
    """The processes on a GPU or MIG device in the order of their IDs, each once, also servers of MPS.

    Only those in this process's PID namespace or below it are shown. Raises as `read_processes` does.
    """
    found = {int(entry.pid): entry for versions in PROCESS_LISTS for entry in listed(handle, uuid, versions)}
    return [_process(pid, entry) for pid, entry in sorted(found.items())]


def _process(pid: int, entry: Any) -> GpuProcess:
    memory, instance = entry.usedGpuMemory, getattr(entry, "gpuInstanceId", _NO_INSTANCE)
    is_told = memory is not None and memory != _NO_MEMORY
    return GpuProcess(
        pid,
        process_name(pid),
        int(memory) if is_told else None,
        None if instance in (None, _NO_INSTANCE) else int(instance),
    )


def process_name(pid: int) -> str:
    """A process's name as NVML knows it, in one short line; empty where it does not."""
    try:
        name = pynvml.nvmlSystemGetProcessName(pid)
    except (pynvml.NVMLError, ValueError):
        return ""  # of another PID namespace, or gone meanwhile
    text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
    return " ".join(text.split())[:_LONGEST_NAME]


def process_text(pid: int, name: str) -> str:
    """`process 4711 (python3)`, without the name where that is empty. Whoever runs in a pod chooses it."""
    return f"process {pid} ({quoted(name)})" if name else f"process {pid}"


def listed(handle: Handle, uuid: str, versions: Sequence[str]) -> Sequence[Any]:
    """One kind of processes, by the first of the functions that the NVIDIA driver has."""
    for name in versions:
        try:
            with nvml_errors(f"list the processes on {uuid}"):
                found: Sequence[Any] = getattr(pynvml, name)(handle)
                return found
        except NotSupportedError:
            continue
        except RetryableError as error:
            if getattr(error.__cause__, "value", None) in _REFUSALS:
                return ()
            raise
    return ()
