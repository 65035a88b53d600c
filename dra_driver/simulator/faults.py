"""Faults that can be injected, in words that people type."""

from __future__ import annotations

import pynvml

from dra_driver.errors import InvalidConfigError
from dra_driver.model.units import counted
from dra_driver.simulator.catalogue import driver_facts
from dra_driver.simulator.state import Fault

_PREFIX = "NVML_ERROR_"


def error_text(code: int) -> str:
    """The text of nvmlErrorString for a return code."""
    return str(driver_facts()["errors"].get(code, "Unknown Error"))


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


def fault_text(fault: Fault) -> str:
    """What it does to calls, such as `gpu is lost, 3 times`."""
    parts = [
        *([] if fault.code is None else [error_text(fault.code).lower()]),
        *([f"after {fault.delay_s:g} s"] if fault.delay_s else []),
        *([] if fault.remaining is None else [counted(fault.remaining, "time")]),
    ]
    return ", ".join(parts)
