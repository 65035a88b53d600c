"""An installed NVIDIA driver: its files and programs."""

from __future__ import annotations

import errno
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress

from dra_driver.errors import RetryableError
from dra_driver.model.dataclass import dataclass
from dra_driver.model.host import DeviceNode

NO_HOOK = "none"
"""Given instead of the hook's path. With some runtimes NVIDIA's hooks fail in a user namespace."""

BASE_HOOK_VERBS = ("create-symlinks", "update-ldcache")
"""Every nvidia-cdi-hook supports these."""

MORE_HOOK_VERBS = ("enable-cuda-compat", "disable-device-node-modification", "update-application-profile")
"""An older hook fails on these, and so does the container."""


@dataclass(frozen=True, slots=True)
class DriverFile:
    """The path for this process, for the container runtime, and in the container."""

    path: str
    host_path: str
    container_path: str


@dataclass(frozen=True, slots=True)
class DriverLink:
    """The link resolves to `host_path`."""

    path: str
    target: str
    host_path: str


@dataclass(frozen=True, slots=True)
class HostNode:
    """`host_path` is for the runtime."""

    node: DeviceNode
    host_path: str


@dataclass(frozen=True, slots=True)
class CdiMount:
    host_path: str
    container_path: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DriverFiles:
    """What every container with a GPU gets.

    `library_dirs` are all container directories with libraries; `driver_dirs` are the NVIDIA driver's own;
    dynamic linkers in images search `linker_dirs`. `hook` and `ldconfig` are host paths. `notes` name missing
    parts that CUDA does not need.
    """

    version: str
    libraries: tuple[DriverFile, ...]
    nodes: tuple[HostNode, ...]
    links: tuple[DriverLink, ...] = ()
    binaries: tuple[DriverFile, ...] = ()
    firmware: tuple[DriverFile, ...] = ()
    sockets: tuple[DriverFile, ...] = ()
    configs: tuple[DriverFile, ...] = ()
    library_dirs: tuple[str, ...] = ()
    driver_dirs: tuple[str, ...] = ()
    linker_dirs: tuple[str, ...] = ()
    hook: str | None = None
    hook_verbs: tuple[str, ...] = BASE_HOOK_VERBS
    ldconfig: str | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CdiDevice:
    """`drm` is for graphics; `links` are (path, target); `env` is `NAME=value`. With `admin_access` the claim
    only observes the device.
    """

    name: str
    nodes: tuple[HostNode, ...]
    drm: tuple[HostNode, ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    env: tuple[str, ...] = ()
    mounts: tuple[CdiMount, ...] = ()
    admin_access: bool = False


CONTROL_PROGRAM = "nvidia-cuda-mps-control"
SERVER_PROGRAM = "nvidia-cuda-mps-server"
SMI_PROGRAM = "nvidia-smi"
IMEX_PROGRAM = "nvidia-imex-ctl"

_NOT_STARTED_CODES = (126, 127)
"""From a shell or the loader: the program is not executable, or libraries do not match."""
_NO_NVML_CODE = 12
"""nvidia-smi exits with this if the loader finds no compatible libnvidia-ml.so.1."""
_LOADER_SAYS = ("error while loading shared libraries", "symbol lookup error", "(required by ")
"""The loader exits with code 1 if only a symbol version is missing."""
_WHY_NOT_RUN = {
    errno.ENOEXEC: "it is not built for this machine's architecture; install the NVIDIA driver for this machine",
    errno.EACCES: "it is not executable; check its mode, and whether the driver root is mounted with noexec",
    errno.ENOENT: "it is missing, or the loader that it names is missing; "
    "programs that need an unusual loader are not supported",
}


@dataclass(frozen=True, slots=True)
class DriverPrograms:
    """`paths` are for this process. `library_path` is LD_LIBRARY_PATH, None if the loader needs none."""

    root: str
    paths: Mapping[str, str]
    search_path: str
    library_path: str | None = None

    def path(self, name: str) -> str:
        """Return a program's path. Raises: RetryableError if it is not installed."""
        found = self.paths.get(name)
        if found is None:
            raise RetryableError(
                f"{name} is not below the driver root {self.root}: install the NVIDIA driver package that "
                "contains it, or set the driver root to where the NVIDIA driver is installed"
            )
        return found

    def environment(self) -> dict[str, str]:
        directories = dict.fromkeys(path.rpartition("/")[0] for path in self.paths.values())
        found = {"PATH": ":".join([*directories, self.search_path])}
        if self.library_path is not None:
            found["LD_LIBRARY_PATH"] = self.library_path
        return found


FindPrograms = Callable[[], DriverPrograms]
"""Searches at each call, because the driver may be replaced. Raises: StateError."""


def not_run(action: str, program: str, error: OSError) -> RetryableError:
    why = _WHY_NOT_RUN.get(error.errno or 0)
    reason = f"{error.strerror or error}: {why}" if why else str(error.strerror or error)
    return _without_effect(f"cannot {action}: {program} did not start: {reason}")


_NO_GPU_CODES = (6, 9, 15)
"""nvidia-smi's exit codes for: no such GPU, driver not loaded, GPU lost."""
_NO_GPU = "no devices were found", "not found"
_FAILED = (
    "gpu is lost",
    "unable to determine the device handle",
    "couldn't communicate with the nvidia driver",
)
"""With exit code 0 nvidia-smi prints these about other GPUs."""


def check_started(action: str, program: str, code: int, output: str) -> None:
    """Raise RetryableError with `has_no_effect` if the program failed before it could do anything."""
    lowered = output.lower()
    no_nvml = code == _NO_NVML_CODE and program.rpartition("/")[2] == SMI_PROGRAM
    if no_nvml or code in _NOT_STARTED_CODES or (code and any(part in lowered for part in _LOADER_SAYS)):
        raise _without_effect(
            f"cannot {action}: {program} did not start ({exit_text(code)}): {' '.join(output.split())}; run it on "
            "the host; if it works there, report a bug in gpu-dra-driver"
        )


def found_no_gpu(code: int, output: str) -> bool:
    """Whether nvidia-smi found no such GPU, or no NVIDIA driver."""
    texts = (*_NO_GPU, *_FAILED) if code else _NO_GPU
    return code in _NO_GPU_CODES or any(text in output.lower() for text in texts)


def exit_text(code: int) -> str:
    """Return the text of a code as in `subprocess`.

    >>> exit_text(3), exit_text(-9)
    ('exit code 3', 'signal 9, SIGKILL')
    """
    if code >= 0:
        return f"exit code {code}"
    name = ""
    with suppress(ValueError):  # a real-time signal has no name
        name = f", {signal.Signals(-code).name}"
    return f"signal {-code}{name}"


def _without_effect(text: str) -> RetryableError:
    error = RetryableError(text)
    error.has_no_effect = True
    return error
