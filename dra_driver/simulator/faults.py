"""Faults that can be injected, in words that people type."""

from __future__ import annotations

import pynvml

from dra_driver.errors import InvalidConfigError
from dra_driver.simulator.state import Fault

_PREFIX = "NVML_ERROR_"
_ERRORS = {
    0: "Success", 1: "Uninitialized", 2: "Invalid Argument", 3: "Not Supported", 4: "Insufficient Permissions",
    5: "Already Initialized", 6: "Not Found", 7: "Insufficient Size", 8: "Insufficient External Power",
    9: "Driver Not Loaded", 10: "Timeout", 11: "Interrupt Request Issue", 12: "NVML Shared Library Not Found",
    13: "Function Not Found", 14: "Corrupted infoROM", 15: "GPU is lost", 16: "GPU requires reset",
    17: "GPU access blocked by the operating system", 18: "Driver/library version mismatch",
    19: "In use by another client", 20: "Insufficient Memory", 21: "No data", 22: "vGPU ECC Not Supported",
    23: "Insufficient Resources", 24: "Frequency Not Supported", 25: "Argument Version Mismatch", 26: "Deprecated",
    27: "Not Ready", 28: "GPU Not Found", 29: "Invalid State", 999: "Unknown Error",
}  # fmt: skip


def error_text(code: int) -> str:
    """The text of nvmlErrorString for a return code."""
    return _ERRORS.get(code, "Unknown Error")


def error_names() -> list[str]:
    """Return codes by name, such as `gpu-is-lost`."""
    names = [name for name in dir(pynvml) if name.startswith(_PREFIX)]
    return sorted(name.removeprefix(_PREFIX).lower().replace("_", "-") for name in names)


def error_code(value: int | str) -> int:
    """A return code by number or by name: 15, `gpu-is-lost`, `GpuIsLost` or `NVML_ERROR_GPU_IS_LOST`."""
    if isinstance(value, int) or value.isdigit():
        return int(value)
    wanted = _plain(value.removeprefix("NVMLError_").removeprefix(_PREFIX))
    for name in dir(pynvml):
        if name.startswith(_PREFIX) and _plain(name.removeprefix(_PREFIX)) == wanted:
            return int(getattr(pynvml, name))
    raise InvalidConfigError(
        f"there is no NVML error {value!r}; use a number or one of: {', '.join(error_names())}"
    )


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def make_fault(
    function: str, code: int | str | None, delay_s: float, count: int | None, gpu: str | None
) -> Fault:
    if code is None and delay_s <= 0:
        raise InvalidConfigError(f"a fault of {function} needs an error code, a delay, or both")
    if delay_s < 0 or (count is not None and count < 1):
        raise InvalidConfigError(f"a fault of {function} needs a delay of 0 or more and a count of 1 or more")
    return Fault(
        function=function,
        code=None if code is None else error_code(code),
        delay_s=float(delay_s),
        remaining=count,
        gpu=gpu,
    )
