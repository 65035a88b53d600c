"""Injected faults and health signals of a GPU, by names that users type: `sram`, `nvlinks-down=3,4`."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pynvml

from dra_driver.errors import InvalidConfigError
from dra_driver.model.units import counted
from dra_driver.simulator.catalogue import driver_facts
from dra_driver.simulator.machine_state import RUBIN, Fault, Gpu, Model

_PREFIX = "NVML_ERROR_"


WRITES = ("driver_override", "unbind", "bind", "drivers_probe", "modprobe")
"""Actions that change the driver of a PCI function. The code of their faults is an errno, or one of the following."""
SMI = "nvidia-smi"
"""Their only fault is `no-effect`: nvidia-smi reports success."""
NO_EFFECT, HANG, LATE_USER = -1, -2, -3
_BEHAVIOURS = {"no-effect": NO_EFFECT, "hang": HANG, "late-user": LATE_USER}
_LANES = 16
_REPAIRS = ("channel", "tpc")


def error_text(code: int) -> str:
    return str(driver_facts()["errors"].get(code, "Unknown Error"))


def code_text(fault: Fault) -> str:
    if fault.function not in (*WRITES, SMI):
        return error_text(fault.code or 0).lower()
    behaviour = next((name for name, code in _BEHAVIOURS.items() if code == fault.code), None)
    return behaviour or os.strerror(fault.code or 0).lower()


def error_code(value: int | str) -> int:
    """Return a return code by number or name: 15, `gpu-is-lost` or `NVML_ERROR_GPU_IS_LOST`."""
    if isinstance(value, int) or value.isdigit():
        return int(value)
    codes = {
        name.removeprefix(_PREFIX): code for name, code in vars(pynvml).items() if name.startswith(_PREFIX)
    }
    found = codes.get(value.upper().replace("-", "_").removeprefix(_PREFIX))
    if found is None:
        known = ", ".join(sorted(name.lower().replace("_", "-") for name in codes))
        raise InvalidConfigError(f"there is no NVML error {value!r}; use a number or one of: {known}")
    return int(found)


def _write_code(value: int | str) -> int:
    """Return the code for an errno, `no-effect`, `hang` (until the fault is cleared), or `late-user` (a program opens
    the GPU just before the write).
    """
    if isinstance(value, int) or value.isdigit():
        return int(value)
    found = _BEHAVIOURS.get(value, getattr(errno, value.upper(), None))
    if not isinstance(found, int):
        raise InvalidConfigError(
            f"a write to sysfs cannot fail with {value!r}; use EBUSY, ENODEV or another errno, or one of: "
            f"{', '.join(_BEHAVIOURS)}"
        )
    return found


def make_fault(
    function: str,
    gpu: str | None = None,
    *,
    code: int | str | None = None,
    delay_s: float = 0.0,
    count: int | None = None,
    blocks_all: bool = False,
) -> Fault:
    """Return a fault, of one GPU if `gpu` is a UUID, for `count` calls or until it is cleared.

    With `blocks_all` no NVML call of the process returns during the delay.
    """
    if code is None and delay_s <= 0:
        raise InvalidConfigError(f"a fault of {function} needs an error code, a delay, or both")
    if blocks_all and delay_s <= 0:
        raise InvalidConfigError(f"a fault of {function} that blocks all calls needs a delay")
    if function == SMI and (code != "no-effect" or delay_s or count is not None):
        raise InvalidConfigError("a fault of nvidia-smi can only be no-effect, until it is cleared")
    if delay_s < 0 or (count is not None and count < 1):
        raise InvalidConfigError(f"a fault of {function} needs a delay of 0 or more and a count of 1 or more")
    return Fault(
        function=function,
        code=None if code is None else (_write_code if function in (*WRITES, SMI) else error_code)(code),
        delay_s=float(delay_s),
        remaining=count,
        gpu=gpu,
        blocks_all=blocks_all,
    )


def fault_text(fault: Fault) -> str:
    """Describe the fault's effect, such as `gpu is lost, 3 times`."""
    parts = [
        *([] if fault.code is None else [code_text(fault)]),
        *([f"after {fault.delay_s:g} s"] if fault.delay_s else []),
        *(["all other calls wait"] if fault.blocks_all else []),
        *([] if fault.remaining is None else [counted(fault.remaining, "time")]),
    ]
    return ", ".join(parts)


def _true(value: str, _model: Model) -> bool:
    if value:
        raise ValueError("takes no value")
    return True


def _whole(value: str) -> int:
    if not value.isdecimal():
        raise ValueError("takes whole numbers")
    return int(value)


def _bank_remap(value: str, model: Model) -> bool:
    if model.architecture < RUBIN:
        raise ValueError(f"is not possible on {model.name}, which has no bank remapper")
    return _true(value, model)


def _links(value: str, model: Model) -> list[int]:
    links = [_whole(link) for link in value.split(",")]
    if max(links) >= model.nvlinks:
        raise ValueError(f"is not possible on {model.name}, which has {model.nvlinks} NVLinks")
    return links


def _recoveries(value: str, model: Model) -> dict[str, int]:
    if not model.nvlinks:
        raise ValueError(f"is not possible on {model.name}, which has no NVLinks")
    return {"recovery": _whole(value)}


def _lanes(value: str, _model: Model) -> list[int]:
    lanes = _whole(value)
    if not 1 <= lanes <= _LANES:
        raise ValueError(f"takes a number from 1 to {_LANES}")
    return [lanes, *_WELL["pcie_link"][1:]]


def _repairs(value: str, _model: Model) -> list[int]:
    parts = value.split(",")
    if not {*parts} <= {*_REPAIRS}:
        raise ValueError(f"takes {', '.join(_REPAIRS)}, or both")
    return [int(part in parts) for part in _REPAIRS]


_SIGNALS: Mapping[str, tuple[str, Callable[[str, Model], Any]]] = {
    "bank-remap": ("bank_remap_pending", _bank_remap),
    "memory": ("memory_unrepairable", _true),
    "nvlink-recoveries": ("nvlink_errors", _recoveries),
    "nvlinks-down": ("links_down", _links),
    "pcie-lanes": ("pcie_link", _lanes),
    "repair": ("repairs_pending", _repairs),
    "sram": ("sram_exceeded", _true),
}
"""The field of `Gpu` that each signal sets, and the parser of the text after `=`."""
_NEW = Gpu("", "", "", 0, "", "")
_WELL: Mapping[str, Any] = {field: getattr(_NEW, field) for field, _ in _SIGNALS.values()}


def signal_facts(signals: Iterable[str], model: Model) -> Mapping[str, Any]:
    """Return all signal fields for a GPU that has exactly these signals. Raises: InvalidConfigError."""
    facts = dict(_WELL)
    for signal in signals:
        name, _, value = signal.partition("=")
        if name not in _SIGNALS:
            raise InvalidConfigError(f"there is no signal {name!r}; use one of: {', '.join(_SIGNALS)}")
        field, parse = _SIGNALS[name]
        try:
            facts[field] = parse(value, model)
        except ValueError as error:
            raise InvalidConfigError(f"signal {signal!r}: {name} {error}") from error
    return facts


def signal_names(gpu: Gpu) -> list[str]:
    return [name for name, (field, _) in _SIGNALS.items() if getattr(gpu, field) != _WELL[field]]
