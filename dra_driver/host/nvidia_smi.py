"""Running the driver's own nvidia-smi, for the settings that NVML has no call for."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from dra_driver.errors import NotSupportedError, NvmlUnavailableError, RetryableError

_TIMEOUT_S = 20.0
_DRIVER_NOT_LOADED = 9
_NO_DEVICES = 6


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
            done = subprocess.run(
                [program, *arguments],
                env=environment,
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise RetryableError(f"{action}: nvidia-smi did not answer within {_TIMEOUT_S:.0f} s") from error
        except OSError as error:
            raise RetryableError(f"{action}: cannot run {program}: {error.strerror}") from error
        said = " ".join(f"{done.stdout} {done.stderr}".split())
        if "not supported" in said.lower():
            raise NotSupportedError(f"{action}: the GPU does not support it ({said})")
        if done.returncode in (_DRIVER_NOT_LOADED, _NO_DEVICES) or "not found" in said.lower():
            raise NvmlUnavailableError(f"{action}: {said}")
        if done.returncode:
            raise RetryableError(f"{action}: nvidia-smi failed with exit code {done.returncode}: {said}")
