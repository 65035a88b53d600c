"""A cheap look at the host that tells whether discovery has to look again."""

from __future__ import annotations

import os
from collections.abc import Hashable, Mapping
from pathlib import Path

_NVIDIA = "0x10de"
_GPU = "gpu"


class HardwareFingerprint:
    """Tells NVIDIA's PCI functions from the many others by their vendor, which is read once for each function."""

    def __init__(self, sys: str, proc: str) -> None:
        self._functions = Path(sys, "bus/pci/devices")
        self._gpus = Path(proc, "driver/nvidia/gpus")
        self._vendors: dict[str, str] = {}

    def read(self) -> Hashable:
        """A value that differs when a GPU or a PCI function of NVIDIA's came or went.

        Two directory listings, under a millisecond on a node with eight GPUs; NVML is not needed.
        """
        present = _names(self._functions)
        # A name that comes again may be another card.
        self._vendors = {name: self._vendors[name] for name in present if name in self._vendors}
        return (_names(self._gpus), tuple(name for name in present if self._vendor(name) == _NVIDIA))

    def _vendor(self, function: str) -> str:
        known = self._vendors.get(function)
        if known is None:
            known = _text(self._functions / function / "vendor").strip()
            if known:
                self._vendors[function] = known
        return known


def driver_fingerprint(proc: str) -> str:
    """A value that differs when another driver was loaded; empty while none is."""
    return _text(Path(proc, "driver/nvidia/version"))


def instance_fingerprint(proc: str) -> Mapping[int, Hashable]:
    """By the minor number of each GPU that shows any, a value that differs when a GPU instance or a compute instance
    came or went."""
    capabilities = Path(proc, "driver/nvidia/capabilities")
    found: dict[int, Hashable] = {}
    for name in _names(capabilities):
        minor = name.removeprefix(_GPU)
        if minor == name or not minor.isdecimal():
            continue
        instances = capabilities / name / "mig"
        shown = tuple((instance, _names(instances / instance)) for instance in _names(instances))
        if shown:
            found[int(minor)] = shown
    return found


def _names(directory: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(os.listdir(directory)))  # noqa: PTH208  no Path objects wanted every second
    except OSError:
        return ()


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
