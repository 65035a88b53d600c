"""The NVIDIA driver's programs, set up to run in a container with a different C library; and nvidia-smi, for settings
that NVML cannot change.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

from dra_driver.base.atomic import replace_symlink
from dra_driver.base.bounded_program import run_driver_program
from dra_driver.errors import (
    NotSupportedError,
    NvmlDetachedError,
    NvmlUnavailableError,
    RetryableError,
    StateError,
)
from dra_driver.host.libraries import scan_libraries
from dra_driver.host.rooted_tree import RootedTree
from dra_driver.model.dataclass import dataclass
from dra_driver.model.driver_files import (
    CONTROL_PROGRAM,
    SERVER_PROGRAM,
    SMI_PROGRAM,
    DriverPrograms,
    FindPrograms,
    exit_text,
    found_no_gpu,
)

_PROGRAMS = (CONTROL_PROGRAM, SERVER_PROGRAM, SMI_PROGRAM)
BINARY_DIRS = (
    "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin",
    "/usr/local/nvidia/bin", "/opt/nvidia/current/usr/bin", "/opt/bin", "/usr/libexec/nvidia/tesla/bin",
)  # fmt: skip
"""In search order: directories of every system, then of GKE, driver installers, Flatcar and Bottlerocket."""
_TIMEOUT_S = 20.0
_MIN_S = 0.1


class InstalledPrograms:
    """Programs of a driver that is not installed in `/` load their libraries from a directory of links: the driver's
    own directories also contain a C library, with which no program would start.
    """

    def __init__(
        self, root: str, links: Path, links_mode: int = 0o700, names: Sequence[str] = _PROGRAMS
    ) -> None:
        """Set `links_mode` for programs that run as another user: they need access to `links`."""
        self._root = root
        self._links = links
        self._links_mode = links_mode
        self._search_path = os.environ.get("PATH", ":".join(BINARY_DIRS))
        self._names = names
        self._lock = threading.Lock()

    def __call__(self) -> DriverPrograms:
        tree = RootedTree(self._root)
        paths = {
            name: tree.local(found[1]) for name in self._names if (found := find_program(tree.file, name))
        }
        elsewhere = self._root.rstrip("/") != ""
        if elsewhere:
            with self._lock:
                self._link()
        return DriverPrograms(self._root, paths, self._search_path, str(self._links) if elsewhere else None)

    def _link(self) -> None:
        wanted = _libraries(RootedTree(self._root))
        try:
            self._links.mkdir(parents=True, exist_ok=True)
            self._links.chmod(self._links_mode)
            for link in self._links.iterdir():
                if link.name not in wanted:
                    link.unlink()
            for name, target in wanted.items():
                replace_symlink(self._links / name, target)
        except OSError as error:
            raise StateError(
                f"cannot create links to the NVIDIA driver's libraries in {self._links}: {error.strerror}"
            ) from error


def find_program(look: Callable[[str], str | None], name: str) -> tuple[str, str] | None:
    """Return the path of a program and its resolved file, both inside the tree."""
    for directory in BINARY_DIRS:
        resolved = look(f"{directory}/{name}")
        if resolved is not None:
            return f"{directory}/{name}", resolved
    return None


def _libraries(tree: RootedTree) -> dict[str, str]:
    scanned = scan_libraries(tree, None)
    files = dict(scanned.files)
    names = files | {path: files[leads_to] for path, _, leads_to in scanned.links}
    return {
        path.rpartition("/")[2]: tree.local(file)
        for path, file in names.items()
        if path.rpartition("/")[0] in scanned.directories
    }


@dataclass(eq=False)
class NvidiaSmi:
    """nvidia-smi opens NVML, so it runs only inside `using_nvml`, which takes a time limit in seconds.

    `using_nvml` raises NvmlDetachedError while NVML must stay closed.
    """

    find: FindPrograms
    using_nvml: Callable[[float], AbstractContextManager[None]] = lambda _wait_s: nullcontext()

    def set_time_slice(self, gpu_uuid: str, level: int, timeout_s: float = _TIMEOUT_S) -> None:
        """Set the length of a GPU's time slices: 0 default, 1 short, 2 medium, 3 long.

        Raises: NotSupportedError; NvmlUnavailableError; StateError if libraries cannot be linked; otherwise
        RetryableError.
        """
        action = f"set the time slice of GPU {gpu_uuid}"
        until = time.monotonic() + timeout_s
        with ExitStack() as held:
            try:
                held.enter_context(self.using_nvml(timeout_s))
            except NvmlDetachedError as error:
                waits = RetryableError(f"cannot {action}: {error}")
                waits.has_no_effect = True
                raise waits from error
            self._run(action, gpu_uuid, level, max(_MIN_S, until - time.monotonic()))

    def _run(self, action: str, gpu_uuid: str, level: int, timeout_s: float) -> None:
        programs = self.find()
        if SMI_PROGRAM not in programs.paths:
            absent = NvmlUnavailableError(
                f"cannot {action}: nvidia-smi is not below the driver root {programs.root}; install the NVIDIA driver"
            )
            absent.has_no_effect = True
            raise absent
        arguments = (SMI_PROGRAM, "compute-policy", "-i", gpu_uuid, "--set-timeslice", str(level))
        code, output = run_driver_program(
            lambda: programs, *arguments, action=action, timeout_s=timeout_s, subject=gpu_uuid
        )
        said = f"nvidia-smi failed with {exit_text(code)}: {' '.join(output.split()) or 'it printed nothing'}"
        if found_no_gpu(code, output):
            raise NvmlUnavailableError(f"cannot {action}: {said}")
        if "not supported" in output.lower():
            raise NotSupportedError(f"cannot {action}: the GPU does not support it ({said})")
        if code:
            raise RetryableError(f"cannot {action}: {said}")
