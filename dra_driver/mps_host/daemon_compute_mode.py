"""The compute mode of a GPU: exclusive while MPS runs on it, so that no process can bypass MPS."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from dra_driver.base.bounded_program import inherited, run_driver_program
from dra_driver.base.file_lock import LockBusyError, byte_lock, hold_file
from dra_driver.errors import NotSupportedError, RetryableError
from dra_driver.model.driver_files import SMI_PROGRAM, FindPrograms, exit_text, found_no_gpu

DEFAULT = 0
EXCLUSIVE_PROCESS = 3

_NAMES = {0: "DEFAULT", 1: "EXCLUSIVE_THREAD", 2: "PROHIBITED", 3: "EXCLUSIVE_PROCESS"}
_BY_NAME = {name: mode for mode, name in _NAMES.items()}
_TIMEOUT_S = 30.0
"""Without persistence mode the first call initialises the GPU, which takes seconds."""
_OTHER_S = 5.0
"""How long to wait for an nvidia-smi process of an earlier MPS host."""
_NO_SETTING = ("[N/A]", "N/A")
_NOT_SUPPORTED = "not supported"
_NOT_SET = ("unable to set", "treating as warning")
"""nvidia-smi prints these failures with exit code 0."""


class ComputeMode:
    """Reads and sets compute modes with nvidia-smi, as NVML's numbers: 0 default, 2 prohibited, 3 exclusive to one
    process.

    nvidia-smi opens NVML, so it runs only within `using_nvml`. Each nvidia-smi process holds the lock of its GPU in the
    file `locks`, even after the MPS host is killed, so that the next host does not interfere.

    Raises: NotSupportedError if the GPU has no compute mode, RetryableError for other failures.
    """

    def __init__(
        self,
        find: FindPrograms,
        using_nvml: Callable[[], AbstractContextManager[None]] = nullcontext,
        locks: Path | None = None,
    ) -> None:
        self._find = find
        self._using_nvml = using_nvml
        self._locks = locks

    def get(self, gpu_uuid: str) -> int | None:
        """Return the mode; None if the GPU or the NVIDIA driver is gone."""
        action = f"read the compute mode of {gpu_uuid}"
        code, text = self._run(action, gpu_uuid, "--query-gpu=compute_mode", "--format=csv,noheader")
        name = text.splitlines()[-1].strip().upper() if text else ""
        if code == 0 and name in _BY_NAME:
            return _BY_NAME[name]
        if found_no_gpu(code, text):
            return None
        raise _problem(action, code, text, is_unsupported=code == 0 and name in _NO_SETTING)

    def set(self, gpu_uuid: str, mode: int) -> None:
        action = f"set the compute mode of {gpu_uuid} to {_NAMES[mode]}"
        code, text = self._run(action, gpu_uuid, "-c", _NAMES[mode])
        lowered = text.lower()
        if code != 0 or any(part in lowered for part in (_NOT_SUPPORTED, *_NOT_SET)):
            raise _problem(action, code, text)
        found = self.get(gpu_uuid)
        if found != mode:
            now = "no longer readable" if found is None else f"still {_NAMES[found]}"
            raise RetryableError(f"nvidia-smi reported success, but the compute mode of {gpu_uuid} is {now}")

    def _run(self, action: str, gpu_uuid: str, *arguments: str) -> tuple[int, str]:
        asked = (SMI_PROGRAM, "-i", gpu_uuid, *arguments)
        with self._using_nvml(), self._alone(action, gpu_uuid):
            code, text = run_driver_program(
                self._find, *asked, action=action, timeout_s=_TIMEOUT_S, subject=gpu_uuid
            )
        return code, text.strip()

    @contextmanager
    def _alone(self, action: str, gpu_uuid: str) -> Iterator[None]:
        if self._locks is None:
            yield
            return
        lock, until = byte_lock(zlib.crc32(gpu_uuid.encode())), time.monotonic() + _OTHER_S
        try:
            busy = "an earlier nvidia-smi is still running"
            held = hold_file(self._locks, until, busy, lock)
            with held as descriptor, inherited([descriptor]):
                yield
        except LockBusyError as error:
            raise RetryableError(f"cannot {action}: {error}") from error


def _problem(action: str, code: int, text: str, *, is_unsupported: bool = False) -> Exception:
    message = f"cannot {action}: {' '.join(text.split()) or 'nvidia-smi printed nothing'} ({exit_text(code)})"
    if is_unsupported or _NOT_SUPPORTED in text.lower():
        return NotSupportedError(message)
    return RetryableError(message)
