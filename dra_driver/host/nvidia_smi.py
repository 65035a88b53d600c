"""Running the driver's own nvidia-smi, for the settings that NVML has no call for."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from dra_driver.errors import NotSupportedError, NvmlUnavailableError, RetryableError

_TIMEOUT_S = 20.0
_AFTER_KILL_S = 1.0
_ABSENT_CODES = (6, 9, 15)
"""No such GPU, driver not loaded, GPU is lost."""
_ABSENT = (
    "gpu is lost",
    "unable to determine the device handle",
    "couldn't communicate with the nvidia driver",
)


class NvidiaSmi:
    """One nvidia-smi. `find` answers its path and that of the NVML library, or None where they are not there.

    The driver lies below a driver root and not on the loader's path, so the library is handed over.
    """

    def __init__(self, find: Callable[[], tuple[str, str] | None]) -> None:
        self._find = find

    def set_time_slice(self, gpu_uuid: str, level: int) -> None:
        """Set the length of a GPU's time slices: 0 default, 1 short, 2 medium, 3 long.

        Raises: NotSupportedError if the GPU has no such setting, NvmlUnavailableError if there is no driver or
        the GPU is not there, RetryableError otherwise.
        """
        self._run(
            f"set the time slice of GPU {gpu_uuid}",
            ["compute-policy", "-i", gpu_uuid, "--set-timeslice", str(level)],
        )

    def _run(self, action: str, arguments: list[str]) -> None:
        found = self._find()
        if found is None:
            raise NvmlUnavailableError(
                f"{action}: nvidia-smi is not below the driver root; install the NVIDIA driver"
            )
        program, library = found
        environment = {**os.environ, "LD_LIBRARY_PATH": str(Path(library).parent)}
        try:
            code, output = _run_bounded([program, *arguments], environment)
        except subprocess.TimeoutExpired as error:
            raise RetryableError(f"{action}: nvidia-smi did not answer within {_TIMEOUT_S:.0f} s") from error
        except OSError as error:
            raise RetryableError(f"{action}: cannot run {program}: {error.strerror}") from error
        said = " ".join(output.split())
        lowered = said.lower()
        if code in _ABSENT_CODES or (code and any(part in lowered for part in _ABSENT)):
            raise NvmlUnavailableError(f"{action}: {said}")
        if "not supported" in lowered:
            raise NotSupportedError(f"{action}: the GPU does not support it ({said})")
        if "not found" in lowered:
            raise NvmlUnavailableError(f"{action}: {said}")
        if code:
            raise RetryableError(f"{action}: nvidia-smi failed with exit code {code}: {said}")


def _run_bounded(arguments: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """The exit code and all output; what hangs in the kernel on a GPU is left behind, for a thread to reap."""
    child = subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        text=True,
        errors="replace",
    )
    try:
        output, _ = child.communicate(timeout=_TIMEOUT_S)
    except BaseException:
        child.kill()
        try:
            child.wait(_AFTER_KILL_S)
        except subprocess.TimeoutExpired:
            threading.Thread(target=child.wait, name="nvidia-smi-reaper", daemon=True).start()
        if child.stdout is not None:
            child.stdout.close()
        raise
    return child.returncode, output
