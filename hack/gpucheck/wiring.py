"""NVLinks as a machine file tells them: through switches, or from GPU to GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from dra_driver.model.ids import pci_bus_id
from gpucheck.gpufacts import Reader

JsonObject = dict[str, Any]

_SWITCH = 2
"""NVML_NVLINK_DEVICE_TYPE_SWITCH"""
_NOWHERE = "f"


def nvlink(readers: Sequence[Reader]) -> JsonObject:
    """The entry `nvlink`; empty without links that are up."""
    positions = {reader.gpu.pci_bus_id: number for number, reader in enumerate(readers)}
    pairs: Counter[tuple[int, int]] = Counter()
    switches: set[str | None] = set()
    active = 0
    for number, reader in enumerate(readers):
        for kind, bus in _remotes(reader):
            active += 1
            peer = positions.get(bus) if bus is not None else None
            if kind == _SWITCH:
                switches.add(bus)
            elif peer is not None and peer > number:
                pairs[number, peer] += 1
    if pairs and not switches:
        return {"pairs": {f"{first}-{second}": count for (first, second), count in sorted(pairs.items())}}
    if not active:
        return {}
    return {"topology": "switched", "remote": _remote(switches)}


def links_down(reader: Reader) -> list[int]:
    """Links that are not up."""
    return [link for link, is_up in enumerate(reader.links()) if not is_up]


def _remotes(reader: Reader) -> list[tuple[int | None, str | None]]:
    """(kind, bus ID in sysfs form or None) of the other end of each link that is up."""
    ends = []
    for link, is_up in enumerate(reader.links()):
        if not is_up:
            continue
        kind, text = reader.link_remote(link)
        try:
            ends.append((kind, None if text is None else pci_bus_id(text)))
        except ValueError:
            ends.append((kind, _NOWHERE))
    return ends


def _remote(switches: set[str | None]) -> str:
    """How the links speak of their switches: by address, by a placeholder, or not at all."""
    named = {bus for bus in switches if bus is not None}
    if not named:
        return "not-supported"
    return "placeholder" if all(set(bus) <= set("f:.0") for bus in named) else "real"
