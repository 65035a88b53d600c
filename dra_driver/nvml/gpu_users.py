"""What keeps a GPU or MIG device in use: its processes, and persistence mode.

In persistence mode the NVIDIA driver keeps a GPU open, so no other driver can bind it. NVML shows only processes in
this process's PID namespace or below it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import pynvml

from dra_driver.errors import DeviceBusyError, DraDriverError, NotSupportedError, RetryableError
from dra_driver.model.gpu import GpuProcess
from dra_driver.model.ids import quoted
from dra_driver.model.units import named
from dra_driver.nvml.calls import Handle, nvml_errors, supported
from dra_driver.nvml.mig_reading import gpu_handle

# Compute, compute through MPS, graphics; newest version first. Each driver has one version of each kind.
PROCESS_LISTS = (
    ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"),
    ("nvmlDeviceGetMPSComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v2"),
    ("nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v2"),
)
_LONGEST_NAME = 80
_NO_INSTANCE = 0xFFFFFFFF
_NO_MEMORY = 0xFFFFFFFFFFFFFFFF
# NVML refuses permanently: the caller lacks the privilege, or the device has no such list.
_REFUSALS = frozenset({pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_INVALID_ARGUMENT})
_MAX_NAMED = 8


def read_processes(uuid: str) -> Mapping[int, str]:
    """Return the processes by ID, such as `process 4711 (python3)`, without MPS servers.

    A list that NVML refuses counts as empty. Raises: DeviceLostError, NvmlUnavailableError, RetryableError.
    """
    found = read_gpu_processes(uuid, gpu_handle(uuid, None))
    return {
        process.pid: process_text(process.pid, process.name) for process in found if not process.is_mps_server
    }


def read_gpu_processes(uuid: str, handle: Handle) -> Sequence[GpuProcess]:
    found = {int(entry.pid): entry for versions in PROCESS_LISTS for entry in listed(handle, uuid, versions)}
    return [_process(pid, entry) for pid, entry in sorted(found.items())]


def _process(pid: int, entry: Any) -> GpuProcess:
    memory, instance = entry.usedGpuMemory, getattr(entry, "gpuInstanceId", _NO_INSTANCE)
    is_known = memory is not None and memory != _NO_MEMORY
    return GpuProcess(
        pid,
        process_name(pid),
        int(memory) if is_known else None,
        None if instance in (None, _NO_INSTANCE) else int(instance),
    )


def process_name(pid: int) -> str:
    try:
        name = pynvml.nvmlSystemGetProcessName(pid)
    except (pynvml.NVMLError, ValueError):
        return ""  # in another PID namespace, or gone
    text = name.decode(errors="replace") if isinstance(name, bytes) else str(name)
    return " ".join(text.split())[:_LONGEST_NAME]


def process_text(pid: int, name: str) -> str:
    """Quote unusual characters, because the program in the pod chooses the name."""
    return f"process {pid} ({quoted(name)})" if name else f"process {pid}"


def listed(handle: Handle, uuid: str, versions: Sequence[str]) -> Sequence[Any]:
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


def holders_of(handles: Iterable[Handle]) -> list[str]:
    pids: set[int] = set()
    for handle in handles:
        for versions in PROCESS_LISTS:
            with suppress(DraDriverError):
                pids |= {int(process.pid) for process in listed(handle, "the device", versions)}
    return [process_text(pid, process_name(pid)) for pid in sorted(pids)]


def busy_error(action: str, holders: Sequence[str], subject: str, look_at: str) -> DeviceBusyError:
    if not holders:
        return DeviceBusyError(
            f"cannot {action}: {subject} is in use, but NVML shows no process on it; a monitor such as DCGM or "
            f"another process may have the device file open: check with {look_at}"
        )
    remedy = (
        "stop the process, or wait until it stops"
        if len(holders) == 1
        else "stop them, or wait until they stop"
    )
    return DeviceBusyError(f"cannot {action}: {subject} is in use by {named(holders, _MAX_NAMED)}; {remedy}")


class PersistenceModes:
    """Reads and sets persistence mode through NVML, which notifies nvidia-persistenced if it is running.

    All methods raise DeviceLostError if the GPU is gone or replaced, NvmlUnavailableError, RetryableError.
    """

    def __init__(self, operation: Callable[[], AbstractContextManager[object]]) -> None:
        self._operation = operation

    def get(self, gpu_uuid: str, pci_bus_id: str | None) -> bool | None:
        """Return None if the GPU does not support it."""
        with self._operation():
            mode = supported(pynvml.nvmlDeviceGetPersistenceMode, gpu_handle(gpu_uuid, pci_bus_id))
        return None if mode is None else bool(mode)

    def set(self, gpu_uuid: str, pci_bus_id: str | None, on: bool) -> None:
        """Set the mode if necessary, and read it back. Also raises NotSupportedError."""
        action = f"switch persistence mode of GPU {gpu_uuid} {'on' if on else 'off'}"
        with self._operation():
            if self.get(gpu_uuid, pci_bus_id) == on:
                return
            with nvml_errors(action):
                pynvml.nvmlDeviceSetPersistenceMode(gpu_handle(gpu_uuid, pci_bus_id), int(on))
            if self.get(gpu_uuid, pci_bus_id) != on:
                raise RetryableError(
                    f"cannot {action}: NVML reported success, but the mode did not change; check nvidia-persistenced"
                )
