"""What keeps a GPU or a MIG device in use: its processes, and persistence mode.

In persistence mode the NVIDIA driver keeps a GPU that no process has open. It must release the GPU before another
driver gets it.
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

# Compute, compute through MPS, graphics. Newest first; a driver has the first of each kind, or the second.
PROCESS_LISTS = (
    ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"),
    ("nvmlDeviceGetMPSComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v2"),
    ("nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v2"),
)
_LONGEST_NAME = 80
_NO_INSTANCE = 0xFFFFFFFF
_NO_MEMORY = 0xFFFFFFFFFFFFFFFF
# NVML never tells: the caller lacks the privilege, or the device has no such list.
_REFUSALS = frozenset({pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_INVALID_ARGUMENT})
_MAX_NAMED = 8


def read_processes(uuid: str) -> Mapping[int, str]:
    """The processes on a GPU or MIG device: ID → `process 4711 (python3)`. Servers of MPS are left out.

    Only those in this process's PID namespace or below it are shown; a list that NVML refuses has none.
    Raises: DeviceLostError if the device does not answer or is not there; NvmlUnavailableError; RetryableError if a
    list fails for another reason.
    """
    found = read_gpu_processes(uuid, gpu_handle(uuid, None))
    return {
        process.pid: process_text(process.pid, process.name) for process in found if not process.is_mps_server
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
    """`process 4711 (python3)`, without the name where that is empty. The program in the pod chooses it."""
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


def holders_of(handles: Iterable[Handle]) -> list[str]:
    """The processes that NVML shows on GPUs or MIG devices, as `process 4711 (python3)` in the order of their
    IDs; those that it cannot tell are missing."""
    pids: set[int] = set()
    for handle in handles:
        for versions in PROCESS_LISTS:
            with suppress(DraDriverError):
                pids |= {int(process.pid) for process in listed(handle, "the device", versions)}
    return [process_text(pid, process_name(pid)) for pid in sorted(pids)]


def busy_error(action: str, holders: Sequence[str], subject: str, look_at: str) -> DeviceBusyError:
    """The error of an action that failed because `subject` is in use by `holders`; where none is known,
    `look_at` is how to find out on the node."""
    if not holders:
        return DeviceBusyError(
            f"{action}: {subject} is in use, but NVML shows no process on it; it may be a monitor such as DCGM "
            f"or a process that has the device file open: look with {look_at}"
        )
    return DeviceBusyError(
        f"{action}: {subject} is in use by {named(holders, _MAX_NAMED)}; stop the process, or wait "
        "until it ends"
    )


class PersistenceModes:
    """Reads and sets it, through NVML, which tells nvidia-persistenced where that runs.

    Raises, all methods: DeviceLostError where the GPU is gone or another one stands at its address,
    NvmlUnavailableError, RetryableError.
    """

    def __init__(self, operation: Callable[[], AbstractContextManager[object]]) -> None:
        """`operation` keeps NVML initialised, and waits for it; calls within it may enter it again."""
        self._operation = operation

    def get(self, gpu_uuid: str, pci_bus_id: str | None) -> bool | None:
        """Whether it is on; None where the GPU has none."""
        with self._operation():
            mode = supported(pynvml.nvmlDeviceGetPersistenceMode, gpu_handle(gpu_uuid, pci_bus_id))
        return None if mode is None else bool(mode)

    def set(self, gpu_uuid: str, pci_bus_id: str | None, on: bool) -> None:
        """Switch it; nothing is done where it is so. Raises: NotSupportedError too."""
        with self._operation():
            if self.get(gpu_uuid, pci_bus_id) != on:
                with nvml_errors(f"switch persistence mode of GPU {gpu_uuid} {'on' if on else 'off'}"):
                    pynvml.nvmlDeviceSetPersistenceMode(gpu_handle(gpu_uuid, pci_bus_id), int(on))
