"""What a GPU reports of its parts, in words that people type: `sram`, `nvlinks-down=3,4`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dra_driver.errors import InvalidConfigError
from dra_driver.simulator.state import Gpu, Model

_LANES = 16
_REPAIRS = ("channel", "tpc")
_RUBIN = 13
"""The first architecture with a bank remapper."""


def _true(value: str, _model: Model) -> bool:
    if value:
        raise ValueError("takes no value")
    return True


def _whole(value: str) -> int:
    if not value.isdecimal():
        raise ValueError("takes whole numbers")
    return int(value)


def _bank_remap(value: str, model: Model) -> bool:
    if model.architecture < _RUBIN:
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
"""The field of `Gpu` that each one sets, and what makes its value of the text after `=`."""
_NEW = Gpu("", "", "", 0, "", "")
_WELL: Mapping[str, Any] = {field: getattr(_NEW, field) for field, _ in _SIGNALS.values()}


def signal_facts(signals: Iterable[str], model: Model) -> Mapping[str, Any]:
    """All fields of `Gpu` that signals set, for a GPU that has these signals and no other. Raises:
    InvalidConfigError."""
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
    """Those that the GPU has."""
    return [name for name, (field, _) in _SIGNALS.items() if getattr(gpu, field) != _WELL[field]]
